"""Training commands on the pretend GPU of the tests: accuracy beside the CPU, waits, launches, memory, and failures.

    python benchmarks/on_pretend_gpu.py table --output benchmarks/results/pretend_gpu.json
    python benchmarks/on_pretend_gpu.py failures --output benchmarks/results/pretend_gpu_failures.json
    python benchmarks/on_pretend_gpu.py plan --output benchmarks/results/pretend_gpu_plan.json

``table`` runs each variant of a recipe of ten steps and the same seed on the CPU and on the pretend GPU. ``failures``
runs a small recipe again and again, each time out of memory at another place. ``plan`` holds the planner's live bytes
against those of a run. Nothing here measures time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
FLOAT32 = "policy.compute_type=float32"
COMMON = (
    "run.steps=10", "run.prompts_per_step=8", "algorithm.group_size=8", "evaluation.num_prompts=100",
    "run.save_every_steps=0", "rollouts.max_completion_tokens=96", "data.limit=600",
)  # fmt: skip
LOSS = '''
import torch

def loss(logprobs, old_logprobs, advantages, mask):
    """REINFORCE with the ratio."""
    return -torch.exp(logprobs - old_logprobs) * advantages[:, None]
'''
VARIANTS: dict[str, list[str]] = {
    "float32": [FLOAT32],
    "float32, not recorded": [FLOAT32, "rollouts.cuda_graphs=false"],
    "bfloat16 with float32 masters": ["policy.compute_type=bfloat16"],
    "bfloat16, not recorded": ["policy.compute_type=bfloat16", "rollouts.cuda_graphs=false"],
    "KL, frozen reference": [FLOAT32, "algorithm.kl_coef=0.02"],
    "KL, moving reference": [FLOAT32, "algorithm.kl_coef=0.02", "algorithm.reference=average"],
    "LoRA with KL": [FLOAT32, "policy.lora.rank=16", "algorithm.kl_coef=0.02", "optimizer.learning_rate=1e-3"],
    "gradient checkpointing": [FLOAT32, "policy.gradient_checkpointing=true"],
    "packing off": [FLOAT32, "policy.packing=false"],
    "two updates a batch": [FLOAT32, "run.completions_per_update=32"],
    "transformers sampler": [FLOAT32, "rollouts.type=transformers"],
    "offloaded activations": [FLOAT32, "policy.offload_activations=true"],
    "custom loss": [FLOAT32, "algorithm.type=custom", "algorithm.function=loss.py:loss"],
    "killed and resumed": [FLOAT32, "run.save_every_steps=3"],
}
PLACES = (
    *(f"allocation:prefill:{number}" for number in (3, 40)),
    *(f"allocation:decode_step:{number}" for number in (2, 60, 400)),
    *(f"operation:aten::searchsorted.Tensor:{number}" for number in (1, 9)),
    *(f"allocation:sample:{number}" for number in (1, 30, 900)),
    *(f"allocation:annotate:{number}" for number in (5, 200)),
    *(f"allocation:microbatch:{number}" for number in (10, 120, 400, 700)),
    *(f"allocation:update:{number}" for number in (1, 30, 100)),
    "allocation:train:20",
)
"""Twenty places at which memory runs out, once each."""
SMALL = (
    "run.steps=2", "run.prompts_per_step=4", "algorithm.group_size=4", "evaluation.num_prompts=8",
    "run.save_every_steps=1", "rollouts.max_completion_tokens=48", "data.limit=100", "algorithm.kl_coef=0.02",
    "run.rollouts_every_steps=1", FLOAT32,
)  # fmt: skip


LENGTHS = ("rollouts.max_completion_tokens=96", "rollouts.min_completion_tokens=96")
COIN = """
import zlib

def coin(completion):
    return float(zlib.crc32(completion.encode()) % 2)
"""
"""A reward with a signal in nearly every group, whatever is written."""
PLANNED: dict[str, list[str]] = {
    "full, float32": [FLOAT32, *LENGTHS],
    "full, bfloat16": [*LENGTHS],
    "LoRA": ["policy.lora.rank=16", *LENGTHS],
    "LoRA with KL": ["policy.lora.rank=16", "algorithm.kl_coef=0.02", *LENGTHS],
    "reference": ["algorithm.kl_coef=0.02", *LENGTHS],
    "checkpointing": ["policy.gradient_checkpointing=true", *LENGTHS],
    "small microbatches": ["policy.tokens_per_microbatch=2048", *LENGTHS],
    "large microbatches": ["policy.tokens_per_microbatch=16384", *LENGTHS],
    "long completions": ["rollouts.max_completion_tokens=384", "rollouts.min_completion_tokens=384"],
    "padded": ["policy.packing=false", *LENGTHS],
}
"""Configurations of the planner; every completion runs to the limit, so that the plan knows its length."""


def command(words: list[str], folder: Path, *, pretended: bool, **environment: str) -> tuple[int, str]:
    """The exit code of a command of oncurve in a folder, and what it printed."""
    program = [str(ROOT / "tests" / "pretend_gpu.py")] if pretended else ["-m", "oncurve"]
    ended = subprocess.run(
        [sys.executable, *program, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


def accuracy(run: Path, name: str) -> float | None:
    """The share of right answers in an evaluation; None where it was not made."""
    path = run / "evaluations" / f"{name}.json"
    return json.loads(path.read_text())["metrics"]["evaluation/correct_fraction"] if path.is_file() else None


def texts(run: Path, name: str) -> list[str]:
    lines = (run / "evaluations" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["completion"] for line in lines]


def row(name: str, folder: Path) -> dict[str, Any]:
    """A variant on the CPU and on the pretend GPU."""
    (folder / "loss.py").write_text(LOSS)
    keys = [*COMMON, *VARIANTS[name], f"run.folder={folder}"]
    report = folder / "report.json"
    on_cpu = [key for key in keys if not key.startswith("rollouts.cuda_graphs")]
    command(["train", "word_problems", *on_cpu, "policy.device=cpu", "run.name=cpu"], folder, pretended=False)
    words = ["train", "word_problems", *keys, "policy.device=cuda", "run.name=gpu"]
    if name == "killed and resumed":
        command(words, folder, pretended=True, PRETEND_GPU_FAIL_AT="allocation:update:400")  # ends it in a later step
        words = ["resume", str(folder / "gpu")]
    code, said = command(words, folder, pretended=True, PRETEND_GPU_REPORT=str(report))
    if code:
        return {"variant": name, "rc": code, "said": said[-800:]}
    parts = json.loads(report.read_text())["parts"]
    cpu, gpu = folder / "cpu", folder / "gpu"
    first = [texts(place, "base") for place in (cpu, gpu)]
    decode, microbatch = parts.get("engine_step", {}), parts["microbatch"]
    return {
        "variant": name,
        "rc": code,
        "same_greedy_completions_at_start": sum(a == b for a, b in zip(*first, strict=True)),
        "of": len(first[0]),
        "accuracy_base": accuracy(gpu, "base"),
        "accuracy_cpu": accuracy(cpu, "trained"),
        "accuracy_pretend": accuracy(gpu, "trained"),
        "waits_per_decode_step": decode.get("synchronizations_per_call"),
        "kernels_per_decode_step_and_layer": parts.get("decode_step", {}).get("kernels_per_layer_and_call"),
        "host_launches_per_decode_step": decode.get("host_launches_per_call"),
        "waits_per_microbatch": microbatch["synchronizations_per_call"],
        "kernels_per_microbatch_and_layer": microbatch["kernels_per_layer_and_call"],
        "peak_mib": max(part["peak_bytes"] for part in parts.values()) / 2**20,
    }


def failure(place: str, folder: Path, expected: dict[str, list[Any]]) -> dict[str, Any]:
    """What becomes of a run that is out of memory once, at one place."""
    keys = [*SMALL, "policy.device=cuda", f"run.folder={folder}", "run.name=run"]
    code, said = command(["train", "word_problems", *keys], folder, pretended=True, PRETEND_GPU_FAIL_AT=place)
    run = folder / "run"
    found = rollouts(run) if code == 0 else {}
    raised = [line.split(" in ", 1)[1] for line in said.splitlines() if line.startswith("pretend GPU: out of memory")]
    return {
        "place": place,
        "rc": code,
        "traceback": "Traceback" in said,
        "raised_in": raised,
        "same_completions": found.get("1") == expected["1"] if found else None,
        "message": next(
            (line[:300] for line in said.splitlines() if "memory" in line.lower() and "GiB" not in line), ""
        ),
    }


def rollouts(run: Path) -> dict[str, list[Any]]:
    """The token texts of every completion, by step."""
    found: dict[str, list[Any]] = {}
    for path in sorted((run / "rollouts").glob("step_*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(int(path.stem.removeprefix("step_")))] = [
            completion["text"] for one in rows for completion in one["completions"]
        ]
    return found


def planned(name: str, folder: Path) -> dict[str, Any]:
    """Live bytes of a run by phase, and those of its plan."""
    keys = [
        *PLANNED[name], "policy.device=cuda", "run.prompts_per_step=16", "algorithm.group_size=8", "data.limit=600",
        "evaluation.num_prompts=4", "run.save_every_steps=0", "rewards=[{type: custom, function: 'coin.py:coin'}]",
    ]  # fmt: skip
    (folder / "coin.py").write_text(COIN)
    report = folder / "report.json"
    words = ["train", "word_problems", *keys, "run.steps=2", f"run.folder={folder}", "run.name=run"]
    code, said = command(words, folder, pretended=True, PRETEND_GPU_REPORT=str(report))
    if code:
        return {"configuration": name, "rc": code, "said": said[-800:]}
    rows = (folder / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    tokenizer = Tokenizer.from_file(str(ROOT / "oncurve" / "assets" / "base_model" / "tokenizer.json"))
    longest = max(len(tokenizer.encode(json.loads(one)["prompt"]).ids) for one in rows)
    words = ["plan", "word_problems", *keys, "--gpu", "H100", "--prompt-tokens", str(longest), "--json"]
    limit = next(key for key in PLANNED[name] if key.startswith("rollouts.max_completion_tokens=")).rpartition("=")[2]
    _, text = command([*words, "--mean-tokens", limit], folder, pretended=False)
    live = json.loads(text)["memory"][0]["live_bytes"]
    parts = json.loads(report.read_text())["parts"]
    found = {"configuration": name, "prompt_tokens": longest}
    for phase in ("sample", "train"):
        real = parts[phase]["peak_bytes"]
        found |= {f"{phase}_live": real, f"{phase}_planned": live[phase], f"{phase}_ratio": live[phase] / real}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("table", "failures", "plan"))
    parser.add_argument("--only", nargs="*", default=[], help="Parts of the names of variants or places.")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    def chosen(names: Any) -> list[str]:
        return [name for name in names if not arguments.only or any(part in name for part in arguments.only)]

    rows: list[dict[str, Any]] = []
    if arguments.what == "table":
        for name in chosen(VARIANTS):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row(name, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    elif arguments.what == "plan":
        for name in chosen(PLANNED):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(planned(name, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    else:
        with tempfile.TemporaryDirectory() as folder:
            keys = [*SMALL, "policy.device=cuda", f"run.folder={folder}", "run.name=run"]
            code, said = command(["train", "word_problems", *keys], Path(folder), pretended=True)
            assert code == 0, said
            expected = rollouts(Path(folder) / "run")
        for place in chosen(PLACES):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(failure(place, Path(folder), expected))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps({"command": " ".join(sys.argv), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
