"""vLLM's CPU build, two steps ahead and in flight, one of two servers killed: are the log-probabilities right?

A run of 30 steps, whose first server is killed (SIGKILL) in the middle. Each completion is then scored again by
transformers, each token under the weights that sampled it, behind the keys and values that the weights before had
computed, and compared with what the server had said.

    ONCURVE_VLLM_PYTHON=vllm-env/bin/python python benchmarks/faults/ahead_vllm.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from ahead_kills import command
from ahead_replay import wait_for
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from oncurve.core.records import Completion
from oncurve.history.past import PastRun, open_run
from oncurve.observe.manifest import describe_run
from oncurve.observe.run_model import locate

RESULTS = Path(__file__).resolve().parents[1] / "results" / "ahead_vllm.json"
STEPS, PROMPTS, GROUP, STALENESS, SERVER_DIES = 30, 16, 2, 2, 12
TEMPERATURE = 1.2
RECIPE = f"""
model: embedded
data: {{type: word_problems, limit: 256}}
algorithm: {{group_size: {GROUP}, correction: truncate}}
rollouts:
  type: servers
  vllm_servers: 2
  vllm_options: [--max-num-seqs=2]
  staleness: {STALENESS}
  in_flight: true
  max_completion_tokens: 96
  temperature: {TEMPERATURE}
policy: {{compute_type: float32}}
optimizer: {{learning_rate: 1e-4}}
evaluation: {{every_steps: 0, num_prompts: 4}}
run: {{steps: {STEPS}, prompts_per_step: {PROMPTS}, save_every_steps: 1, keep_every_steps: 1, record: all}}
"""


def leaders_of(trainer: int) -> list[int]:
    """The leaders of the groups in which a trainer's servers are."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(trainer)], capture_output=True, text=True, check=False)
    return [number for number in map(int, found.stdout.split()) if os.getpgid(number) == number]


def one_run(folder: Path) -> PastRun:
    """The run, one of whose servers is killed."""
    recipe, run = folder / "recipe.yaml", folder / "run"
    recipe.write_text(RECIPE, encoding="utf-8")
    with (folder / "said.txt").open("ab") as log:
        words = ["train", str(recipe), f"run.folder={folder}", "run.name=run"]
        trainer = subprocess.Popen(command(*words), stdout=log, stderr=log)
        try:
            wait_for(run, SERVER_DIES, trainer)
            os.killpg(leaders_of(trainer.pid)[0], signal.SIGKILL)
        finally:
            if status := trainer.wait():
                raise RuntimeError(f"the run ended with {status}: {(folder / 'said.txt').read_text()[-2000:]}")
    return open_run(run)


@torch.inference_mode()
def logprobs(one: Completion, models: Models) -> torch.Tensor:
    """Of each token, under the weights that sampled it. The keys and values of earlier tokens stay what they were."""
    spans = one.versions or ((0, one.policy_version),)
    ends = [*(start for start, _ in spans[1:]), len(one.token_ids)]
    ids, found, past, fed = [*one.prompt_ids, *one.token_ids], [], None, 0
    for (_, version), end in zip(spans, ends, strict=True):
        until = len(one.prompt_ids) + end - 1
        made = models[version](input_ids=torch.tensor([ids[fed:until]]), past_key_values=past, use_cache=True)
        past, start = made.past_key_values, max(0, len(one.prompt_ids) - 1 - fed)
        targets = torch.tensor(ids[fed + start + 1 : until + 1])
        found.append((made.logits[0, start:] / TEMPERATURE).log_softmax(-1).gather(1, targets[:, None])[:, 0])
        fed = until
    return torch.cat(found)


class Models(dict[int, PreTrainedModel]):
    """The models after so many steps of a run."""

    def __init__(self, run: PastRun) -> None:
        super().__init__()
        self.run = run

    def __missing__(self, version: int) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(locate("embedded"), dtype=torch.float32).eval()
        if version:
            file = self.run.path / "checkpoints" / f"step_{version:06d}" / "model.safetensors"
            model.load_state_dict(load_file(file), strict=False)  # its head is its embedding
        self[version] = model
        return model


def difference(one: Completion, models: Models) -> float:
    """The largest difference of a completion's log-probabilities from those that its server said."""
    return (logprobs(one, models) - torch.tensor(one.sampler_logprobs)).abs().max().item()


def main() -> None:
    """The run, and all its completions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oncurve-ahead-") as place:
        run = one_run(Path(place))
        models = Models(run)
        sampled = [(step, one) for step in run.steps for group in run.step(step).groups for one in group.completions]
        differences = [difference(one, models) for _, one in sampled]
        mixed = [one for _, one in sampled if one.versions]
        found = {
            "command": "python benchmarks/faults/ahead_vllm.py",
            "steps": len(run.steps),
            "steps_with_a_gradient": sum(row.get("policy/gradient_norm", 0.0) > 0 for row in run.metrics),
            "completions": len(sampled),
            "servers_lost": (run.path / "log.txt").read_text(encoding="utf-8").count(" is lost"),
            "lost": STEPS * PROMPTS * GROUP - len(sampled),
            "of_several_versions": len(mixed),
            "oldest_token_steps": max(step - 1 - one.policy_version for step, one in sampled),
            "largest_difference": max(differences),
            "completions_beyond_a_thousandth": sum(gap > 1e-3 for gap in differences),
            "largest_difference_of_several_versions": max((difference(one, models) for one in mixed), default=None),
            "the_same_under_the_oldest_weights_alone": max(
                (difference(replace(one, versions=()), models) for one in mixed), default=None
            ),
            "run": describe_run(),
        }
    chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
