"""Run folders made on the spot, as a run would write them, with whatever text a test wants in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from oncurve.core.records import Completion, Group, Prompt, Reward, SamplingParams, Segment, ToolCall
from oncurve.evaluate.evaluation import Evaluation, Example
from oncurve.observe.measure import episode_metrics, episode_row
from oncurve.observe.record import RunFolder
from oncurve.observe.tokens import TokenRecord

CONFIG: dict[str, Any] = {
    "model": "embedded",
    "data": {"type": "word_problems"},
    "rewards": [{"type": "r1_zero", "weight": 1.0}],
    "algorithm": {"type": "grpo", "group_size": 4},
    "rollouts": {"type": "engine", "max_completion_tokens": 96},
    "policy": {"tokens_per_microbatch": 8192},
    "optimizer": {"learning_rate": 1e-4},
    "run": {"steps": 8, "prompts_per_step": 3, "save_every_steps": 4, "name": "made", "folder": "runs"},
}
MANIFEST: dict[str, Any] = {
    "oncurve": "0.1.0",
    "code": {"commit": "0123456789abcdef", "dirty": False},
    "packages": {"torch": "2.13.0"},
    "hardware": {"cpu": "a CPU", "cpu_cores": 2, "gpus": []},
    "command": "oncurve train word_problems",
    "started": "2026-01-01T00:00:00+00:00",
    "prompts": {"training": 24, "test": 4, "held_out": 4, "too_long": 0},
    "processes": 1,
}


class Letters:
    """A tokenizer whose tokens are letters: what DecodeStream is told to use."""

    @staticmethod
    def make() -> Any:
        from tokenizers import Tokenizer, decoders, models

        made = Tokenizer(models.WordLevel({chr(code): code for code in range(32, 127)}, unk_token=" "))
        made.decoder = decoders.Fuse()
        return made


def row(step: int, **more: float) -> dict[str, float]:
    """The metrics of a step that learns a little."""
    found = {
        "reward/mean": 0.1 * step,
        "reward/correct": 0.1 * step,
        "completion/mean_tokens": 20.0 + step,
        "completion/min_tokens": 5.0,
        "completion/max_tokens": 60.0,
        "group/zero_signal_fraction": 0.25,
        "group/std_mean": 0.3,
        "policy/loss": 0.0,
        "policy/gradient_norm": 0.2,
        "policy/entropy": 1.0 / step,
        "mismatch/kl": 1e-5,
        "time/step_seconds": 2.0,
        "time/sample_seconds": 1.2,
        "time/train_seconds": 0.7,
        "time/elapsed_seconds": 2.0 * step,
        "tokens/sampled": 1000.0,
        "tokens/trained": 800.0,
        "speed/tokens_per_second": 500.0,
        "memory/process_gib": 0.5,
    }
    if step % 4 == 0:
        found |= {f"evaluation/correct_{end}fraction": 0.1 * step + by for end, by in HELD_OUT_ENDS}
    return {**found, **more}


HELD_OUT_ENDS = (("", 0.0), ("low_", -0.05), ("high_", 0.05))


def group(
    step: int, place: int, *, text: str = "", prompt: str = "", errors: bool = False
) -> tuple[Group, list[Reward]]:
    """Four completions of a prompt; more of them right in later groups of later steps."""
    asked = Prompt(
        prompt or f"User: question {place} of step {step}\nAssistant:", (1, 2), 10 * step + place, {"answer": "7"}
    )
    completions, rewards = [], []
    for index in range(4):
        written = text or f"step {step} place {place} sample {index} says {index + place}"
        ids = tuple(ord(letter) if 32 <= ord(letter) < 127 else 63 for letter in written)
        logprobs = tuple(-0.02 * (position % 200) for position in range(len(ids)))
        end = "length" if index == 3 else "stop"
        completions.append(Completion((1, 2), ids, written, logprobs, end, step - 1, index))
        is_right = float(index < place)
        rewards.append(Reward(is_right, {"correct": is_right, "format": 1.0}, detail=f"answer '{index}'"))
    if errors:
        rewards[0] = Reward(None, error="timeout", detail="took 3 s")
    return Group(asked, tuple(completions)), rewards


def episode(index: int) -> Completion:
    """A completion in which the policy calls a calculator, cannot be read once, and answers."""
    spoken = [
        (True, "<tool>2+3</tool>"),
        (False, "<result>5</result>"),
        (True, "<tool>2+</tool>"),
        (False, "<result>error: cannot be read</result>"),
        (True, "so 5"),
    ]
    segments, text, logprobs = [], "", []
    for is_policy, said in spoken:
        segments.append(Segment(is_policy, len(text), len(text) + len(said), said))
        text += said
        logprobs += [-2.0 if is_policy else 0.0] * len(said)
    calls = (
        ToolCall("calculator", '{"expression": "2+3"}', "5", None, 0, 0.25),
        ToolCall("", "2+", "error: cannot be read", "malformed", 1, 0.0),
    )
    ids = tuple(map(ord, text))
    return Completion(
        (1, 2), ids, text, tuple(logprobs), "turns" if index else "stop", 1, index,
        segments=tuple(segments), calls=calls, waiting_seconds=0.5, own_prompt="an environment asks" if index else None,
        branches=(fork(),) if index else (),
    )  # fmt: skip


def fork() -> Completion:
    """A row that goes on from an earlier place of an episode."""
    ids = tuple(map(ord, "else"))
    return Completion(
        (1, 2), ids, "else", (-2.0,) * 4, "stop", 1, 0,
        segments=(Segment(True, 0, 4, "else"),), own_prompt="what was read before the fork",
    )  # fmt: skip


def episode_group() -> tuple[Group, list[Reward]]:
    """Two episodes of one prompt."""
    asked = Prompt("User: what is 2+3?\nAssistant:", (1, 2), 7, {"answer": "5"})
    rewards = [Reward(1.0, {"correct": 1.0}), Reward(0.0, {"correct": 0.0})]
    return Group(asked, (episode(0), episode(1))), rewards


def make_episode_run(path: Path) -> Path:
    """A run with one step of episodes, and a measurement with one."""
    with RunFolder(path) as folder:
        folder.write_start(yaml.safe_dump(CONFIG), CONFIG, MANIFEST)
        made, rewards = episode_group()
        tokens = TokenRecord(Letters.make(), num_groups=1)
        folder.write_rollouts(1, [made], [rewards], [[0.5, -0.5]], tokens=tokens)
        folder.write_metrics(1, row(1) | episode_metrics([made]))
        shown = replace(evaluation("trained", 1, right=[True]).examples[0], episode=episode_row(made.completions[0]))
        measured = Evaluation("trained", (shown,), asdict(SamplingParams(temperature=0.0)), step=1)
        folder.write_evaluation("trained", measured.rows(), measured.summary())
        folder.write_status(1, "finished")
    return path


def evaluation(name: str, step: int, *, right: Sequence[bool], text: str = "") -> Evaluation:
    """A measurement of as many problems as there are verdicts."""
    examples = tuple(
        Example(
            index=place,
            question=f"held-out question {place}",
            answer="7",
            completion=text or f"{name} answers {place}",
            num_tokens=9,
            finish_reason="stop",
            category="correct" if verdict else "wrong",
            reward=float(verdict),
            correct_any_format=verdict,
        )
        for place, verdict in enumerate(right)
    )
    return Evaluation(name, examples, asdict(SamplingParams(temperature=0.0)), step=step)


def make_run(
    path: Path,
    *,
    steps: int = 8,
    every: int = 2,
    text: str = "",
    prompt: str = "",
    config: Mapping[str, Any] = CONFIG,
    manifest: Mapping[str, Any] = MANIFEST,
    metrics: Mapping[str, float] | None = None,
    right: Sequence[bool] = (True, True, True, False),
) -> Path:
    """A finished run of so many steps, completions of ``every`` so many of them, three groups each."""
    with RunFolder(path) as folder:
        folder.write_start(yaml.safe_dump(dict(config)), config, manifest)
        base = evaluation("base", 0, right=[False] * (len(right) - 1) + [True], text=text)
        folder.write_evaluation("base", base.rows(), base.summary())
        folder.write_metrics(0, base.metrics())
        for step in range(1, steps + 1):
            write_step(folder, step, keeps=step == 1 or step % every == 0, text=text, prompt=prompt, metrics=metrics)
        trained = evaluation("trained", steps, right=right, text=text)
        folder.write_evaluation("trained", trained.rows(), trained.summary())
        folder.write_status(steps, "finished")
        folder.log("the run is over")
    return path


def write_step(
    folder: RunFolder,
    step: int,
    *,
    keeps: bool = True,
    text: str = "",
    prompt: str = "",
    metrics: Mapping[str, float] | None = None,
) -> None:
    """What a step leaves in the folder."""
    if keeps:
        made = [group(step, place, text=text, prompt=prompt, errors=place == 2) for place in range(3)]
        advantages = [[0.5 if reward.value else -0.5 for reward in rewards] for _, rewards in made]
        tokens = TokenRecord(Letters.make(), num_groups=2)
        folder.write_rollouts(
            step, [one for one, _ in made], [rewards for _, rewards in made], advantages, tokens=tokens
        )
    folder.write_metrics(step, row(step, **(metrics or {})))
