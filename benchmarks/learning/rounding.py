"""What rounding copies of the weights to bfloat16 loses: what arrives of a change, final models, and the time it takes.

    python benchmarks/bench.py rounding arrive                  what float32 taught, and the share that copies show
    python benchmarks/bench.py rounding arrive --sums FOLDER    the same on sums, with SmolLM2-135M (fetch_models.py)
    python benchmarks/bench.py rounding final --steps 8         models saved in bfloat16, read by plain transformers
    python benchmarks/bench.py rounding speed --steps 64        seconds of a step, the three in turn on one work

What it does to learning is `python benchmarks/bench.py study rounding`, and `study rounding_sums`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import ROOT, Record
from safetensors.torch import load_file, save_file
from torch import Tensor

import oncurve
from oncurve.algorithm.precision import key_of, narrow
from oncurve.core.grading import RewardFunction
from oncurve.core.records import Completion, Group, Prompt
from oncurve.data.from_settings import shared_columns
from oncurve.evaluate.evaluate import grade_groups
from oncurve.evaluate.evaluation import read_evaluation
from oncurve.model.context import context_of
from oncurve.model.lora_linear import linear_layers
from oncurve.policy.final_model import write_model
from oncurve.policy.forward import row_logprobs
from oncurve.rewards.terms import make_reward_function
from oncurve.run.rendered import make_prompts, split_rows

MODES = ("float32", "dither", "nearest")
STEPS = (1, 2, 4, 8, 16)
"""Steps after which what has arrived is measured."""


def embedded_on_grid(place: Path) -> Path:
    """The model in the package with its weights on bfloat16's grid, as those of a published model are."""
    if not place.is_dir():
        partial = place.with_name(f".{place.name}-{os.getpid()}")
        shutil.copytree(ROOT / "oncurve" / "assets" / "base_model", partial)
        file = partial / "model.safetensors"
        weights = {name: weight.bfloat16().float().contiguous() for name, weight in load_file(file).items()}
        save_file(weights, partial / "new", metadata={"format": "pt"})
        (partial / "new").replace(file)
        partial.rename(place)
    return place


def make_trainer(
    mode: str, seed: int, runs: Path, sums: Path | None, *, rate: float | None = None, **run: Any
) -> oncurve.Trainer:
    """A run of 16 steps; the embedded model at a rate of 2e-5, or sums at 1e-5. Unmeasured at another rate."""
    policy = {"compute_type": "float32"} if mode == "float32" else {"compute_type": "bfloat16", "rounding": mode}
    name = f"{'embedded' if sums is None else 'sums'}_{mode}_{seed}"
    shared = {"steps": STEPS[-1], "prompts_per_step": 16, "seed": seed, "save_every_steps": 0, "folder": str(runs)}
    if sums is None:
        return oncurve.Trainer(
            str(embedded_on_grid(runs / "grid")),
            {"type": "word_problems", "limit": 4096},
            "r1_zero",
            algorithm={"group_size": 8, "clip_high": 0.28},
            rollouts={"type": "engine", "max_completion_tokens": 96},
            optimizer={"learning_rate": rate or 2e-5, "warmup_updates": 2},
            policy=policy,
            run={**shared, "name": name, **run},
            evaluation={"num_prompts": 1} if rate else {
                "data": {"type": "word_problems", "split": "test", "limit": 400},
                "num_prompts": 300, "every_steps": 4, "num_prompts_during": 300,
            },
        )  # fmt: skip
    rows = {
        "type": "generated", "function": f"{ROOT}/benchmarks/learning/sums.py:sums", "template": "question_only",
        "chat": True,
    }  # fmt: skip
    return oncurve.Trainer(
        str(sums),
        rows,
        {"type": "mathematics", "answer_from": "prose"},
        algorithm={"type": "grpo", "group_size": 8},
        rollouts={"type": "engine", "max_completion_tokens": 16},
        optimizer={"learning_rate": rate or 1e-5, "warmup_updates": 4},
        policy=policy,
        run={**shared, "name": name, **run},
        evaluation={"num_prompts": 1} if rate else {
            "data": {**rows, "split": "test"}, "num_prompts": 99, "every_steps": 4, "num_prompts_during": 60,
        },
    )  # fmt: skip


def arrive(asked: argparse.Namespace, record: Record) -> None:
    """Train in float32; after some steps compare the change of log-probabilities with the one that copies show.

    With d the change of the log-probabilities of the first step's completions, and c that of a model whose matrices are
    copies: the share c d / d d that arrives, with its standard error over completions, and what else the copies change,
    |c - share d| / |d|.
    """
    runs, sums = asked.folder, asked.sums
    due = [step for step in STEPS if step <= asked.steps]
    record.total = 2 * len(due) * len(asked.seeds)
    for seed in asked.seeds:
        trainer = make_trainer("float32", seed, runs, sums, name=f"arrive_{time.time_ns()}", steps=asked.steps)
        base = make_trainer("float32", seed, runs, sums).policy.model
        texts: list[Tensor] = []
        for step in trainer.steps():
            if not texts:
                texts = [
                    torch.tensor([*group.prompt.prompt_ids, *one.token_ids])
                    for group in step.groups
                    for one in group.completions[:4]
                ]
                before = logprobs(base, texts)
            if step.number in due:
                for row in arrived(trainer.policy.model, texts, before, seed, step.number):
                    record.add(row)


def logprobs(model: Any, texts: list[Tensor]) -> list[Tensor]:
    """Of all tokens of the rows but their first."""
    with torch.no_grad():
        return [row_logprobs(model, ids).double() for ids in texts]


def arrived(model: Any, texts: list[Tensor], before: list[Tensor], seed: int, step: int) -> list[dict[str, Any]]:
    """The share of the change since the start that copies of the matrices show, by each way to round."""

    def changes() -> list[Tensor]:
        return [after - was for after, was in zip(logprobs(model, texts), before, strict=True)]

    taught = changes()
    size = sum(float(d @ d) for d in taught)
    names = {id(weight): name for name, weight in model.named_parameters()}
    found = []
    for mode in MODES[1:]:
        kept = [(part.weight, part.weight.data) for part in linear_layers(model)]
        for weight, data in kept:
            key = key_of(seed, names[id(weight)])
            weight.data = narrow(data, torch.bfloat16, key if mode == "dither" else None).float()
        shown = changes()
        for weight, data in kept:
            weight.data = data
        share = sum(float(c @ d) for c, d in zip(shown, taught, strict=True)) / size
        others = [c - share * d for c, d in zip(shown, taught, strict=True)]
        error = sum(float(o @ d) ** 2 for o, d in zip(others, taught, strict=True)) ** 0.5 / size
        noise = (sum(float(o @ o) for o in others) / size) ** 0.5
        numbers = {"share": share, "error": error, "noise": noise}
        found.append({"mode": mode, "seed": seed, "step": step} | {key: round(x, 4) for key, x in numbers.items()})
    return found


def held_out(trainer: oncurve.Trainer) -> tuple[list[Prompt], RewardFunction]:
    """The prompts that a run was measured on at its end, and its reward."""
    rows = split_rows(trainer.config)
    model, tokenizer = trainer.policy.model, trainer.policy.tokenizer
    prompts = make_prompts(trainer.config, tokenizer, context_tokens=context_of(model.config), rows=rows).test
    return list(prompts), make_reward_function(trainer.config.rewards, columns=shared_columns(rows))


@torch.no_grad()
def greedy(folder: Path, prompts: list[Prompt], most: int) -> list[Group]:
    """What plain transformers writes in float32, greedy, up to the end of the answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    groups = []
    for start in range(0, len(prompts), 50):
        part = prompts[start : start + 50]
        rows = tokenizer.pad({"input_ids": [list(prompt.prompt_ids) for prompt in part]}, return_tensors="pt")
        out = model.generate(
            **rows, max_new_tokens=most, do_sample=False, stop_strings="</answer>", tokenizer=tokenizer
        )
        for prompt, ids in zip(part, out[:, rows["input_ids"].shape[1] :], strict=True):
            text, mark, _ = tokenizer.decode(ids, skip_special_tokens=True).partition("</answer>")
            reason: Any = "stop" if mark else "length"
            tokens = tuple(ids.tolist())
            written = Completion(prompt.prompt_ids, tokens, text + mark, (0.0,) * len(tokens), reason, 0, 0)
            groups.append(Group(prompt, (written,)))
    return groups


def final(asked: argparse.Namespace, record: Record) -> None:
    """Models saved in bfloat16 after few steps, by the dither and to the nearest, beside the policy that was measured.

    Plain transformers reads them and writes 300 held-out completions, greedy and in float32, so that it differs from
    the run in its weights and the rounding of its activations alone.
    """
    record.total = len(asked.seeds)
    for seed in asked.seeds:
        name = f"final_{seed}_{time.time_ns()}"
        trainer = make_trainer("dither", seed, asked.folder, None, name=name, steps=asked.steps)
        for _ in trainer.steps():
            pass
        folder = Path(trainer.folder)
        prompts, reward_function = held_out(trainer)
        measured = read_evaluation(folder / "evaluations", "trained").examples
        write_model(trainer.policy, folder / "dither", torch.bfloat16)
        for weight in trainer.policy.model.parameters():
            weight.data = weight.data.bfloat16().float()
        write_model(trainer.policy, folder / "nearest", torch.bfloat16)
        record.facts["problems"] = len(measured)
        row: dict[str, Any] = {"seed": seed, "steps": asked.steps, "evaluated": sum(one.is_correct for one in measured)}
        for mode in MODES[1:]:
            groups = greedy(folder / mode, prompts, most=96)
            same = sum(g.completions[0].text == one.completion for g, one in zip(groups, measured, strict=True))
            row[mode] = {
                "same_texts": same,
                "correct": sum(one.is_correct for one in grade_groups(groups, reward_function)),
            }
        record.add(row)


def speed(asked: argparse.Namespace, record: Record) -> None:
    """Tokens per second of the three ways, which take their steps in turn in one process.

    The rate is so low that no float32 weight moves: the copies of a model on the grid are the same by either rounding,
    so both ways sample and train the same tokens and differ in what the rounding costs.
    """
    loops, num_steps, seed = {}, asked.steps, asked.seeds[0]
    for mode in MODES:
        name = f"speed_{mode}_{time.time_ns()}"
        loops[mode] = make_trainer(mode, seed, asked.folder, asked.sums, rate=1e-30, name=name, steps=num_steps)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    steps = {mode: trainer.steps() for mode, trainer in loops.items()}
    for turn in range(num_steps):
        for mode in sorted(MODES, key=lambda mode: (MODES.index(mode) + turn) % len(MODES)):
            step = next(steps[mode])
            found[mode].append({key: step.metrics[f"speed/{key}_tokens_per_second"] for key in ("sampled", "trained")})
    skipped = min(2, num_steps - 1)
    medians = {
        mode: {key: median(row[key] for row in rows[skipped:]) for key in ("sampled", "trained")}
        for mode, rows in found.items()
    }
    ratios = {
        key: median(a[key] / b[key] for a, b in zip(found["dither"][skipped:], found["nearest"][skipped:], strict=True))
        for key in ("sampled", "trained")
    }
    print(medians, ratios)
    record.facts |= {"medians": medians, "dither_by_nearest": ratios}
    record.rows = [{"mode": mode, **row} for mode, rows in found.items() for row in rows]


PARTS = {"arrive": arrive, "final": final, "speed": speed}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS[-1], help="of a run")
    parser.add_argument("--sums", type=Path, help="folder of SmolLM2-135M: train on sums")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "rounding", help="of the runs")


def name_of(asked: argparse.Namespace) -> str:
    return f"rounding_{asked.part}_{'embedded' if asked.sums is None else 'sums'}"


def bench(asked: argparse.Namespace, record: Record) -> None:
    asked.folder.mkdir(parents=True, exist_ok=True)
    PARTS[asked.part](asked, record)
