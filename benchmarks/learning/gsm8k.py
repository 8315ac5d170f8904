"""GSM8K with Qwen2.5-Coder-0.5B-Instruct: the cells of the study, and what is measured of each trained model.

    python benchmarks/bench.py study gsm8k --seeds 0 1 --threads 2 --detach
    python benchmarks/bench.py study gsm8k --seeds 0 --cells float32 LoRA --threads 2

Rows are those of `gsm8k_train.jsonl`, `gsm8k_test.jsonl` and `math500.jsonl` in the folder of the variable
ONCURVE_BENCHMARK_DATA, or in shared/data beside the repository. The weights come from `bench.py fetch_models`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fetch_models import PLACE
from real_model import answers_of, difference, evaluation_of, run_record
from record import ROOT
from study import Cell, Runs, Study, oncurve, shares

DATA = Path(os.environ.get("ONCURVE_BENCHMARK_DATA", ROOT.parent / "shared" / "data"))
MODEL = PLACE / "qwen2.5-coder-0.5b-instruct"
TOKENS = "rollouts.max_completion_tokens=400"
TRAINING = (
    f"model={MODEL}", f"data.path={DATA / 'gsm8k_train.jsonl'}", f"evaluation.data.path={DATA / 'gsm8k_test.jsonl'}",
    "evaluation.num_prompts=8", TOKENS,
)  # fmt: skip
"""Rows of this disk in the place of the hub's. What a model learned is measured by ``measured``."""
CONTROL = ("run.save_every_steps=20", "sft.epochs=null", "run.steps={updates}", *TRAINING)
TESTS = {"gsm8k": "gsm8k_test.jsonl", "math500": "math500.jsonl"}
IN_TYPES = {
    "float32": ("policy.compute_type=float32",),
    "dither": ("policy={compute_type: bfloat16, rounding: dither}",),
    "nearest": ("policy={compute_type: bfloat16, rounding: nearest}",),
}


def measured(runs: Runs, model: Path, name: str) -> dict[str, Any]:
    """Base and model on all problems of both tests, greedy, and the change on the same problems."""
    found: dict[str, Any] = {}
    for test, rows in TESTS.items():
        places = {
            "base": runs.folder / "evaluations" / f"base-{test}",
            "trained": runs.folder / "evaluations" / f"{name}-{test}",
        }
        for place, asked in zip(places.values(), (MODEL, model), strict=True):
            if not evaluation_of(place).is_file():
                words = ("--benchmark", test, "--output", str(place), f"data.path={DATA / rows}", TOKENS)
                oncurve(runs.folder, runs.threads, "evaluate", str(asked), *words, *runs.overrides)
        answers = (answers_of(evaluation_of(place)) for place in places.values())
        found[test] = {side: shares(place, "evaluation") for side, place in places.items()} | difference(*answers)
    tested, other = (found[test] for test in TESTS)
    return {**tested, "transfer": other}


def course(run: Path) -> dict[str, Any]:
    """The course of a run, its seconds and tokens; the driver reads the seconds of its steps by their name."""
    record = run_record(run)
    return {**record, "grpo_seconds": record["seconds"]}


def study() -> Study:
    """All weights in three types, LoRA, best of n by the reward, and supervised training for as many seconds."""
    cells = [Cell(name, words, recipe="gsm8k_qwen") for name, words in IN_TYPES.items()]
    cells[0] = replace(cells[0], control="gsm8k_qwen/sft")
    cells[2] = replace(cells[2], seeds=1)
    cells.append(Cell("LoRA", ("policy.compute_type=float32",), recipe="gsm8k_qwen/lora", seeds=1))
    best = ("policy.compute_type=float32", "algorithm.type=rft", "optimizer.learning_rate=1e-5")
    cells.append(Cell("best of 8", best, recipe="gsm8k_qwen", seeds=1))
    about = (
        "GRPO on GSM8K with a model of 0.5B, beside supervised training and best of n; on GSM8K's test and MATH-500."
    )
    return Study(
        about, tuple(cells), (course,), TRAINING, control_settings=CONTROL, measure=measured,
        facts={"model": "Qwen2.5-Coder-0.5B-Instruct from weights of 5 to 8 bits"},
    )  # fmt: skip
