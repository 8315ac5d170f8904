"""Synthetic runs: a healthy one, and what makes it sick in one respect."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from oncurve.doctor.case import Case

Curve = Callable[[float], float]
"""A metric as a function of progress: 0 at the first step, 1 at the last."""

STEPS = 40
CONFIG: dict[str, Any] = {
    "data": {"template": "think_answer"},
    "algorithm": {"group_size": 8, "kl_coef": 0.01, "entropy_coef": 0.0, "clip_low": 0.2, "clip_high": 0.2},
    "rollouts": {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_completion_tokens": 100,
        "min_completion_tokens": 0,
    },
    "optimizer": {"learning_rate": 1e-5},
    "evaluation": {"temperature": 0.0},
    "run": {"prompts_per_step": 16, "completions_per_update": None},
}
HEALTHY: dict[str, Curve | float] = {
    "reward/mean": lambda x: 0.2 + 0.5 * x,
    "reward/correct": lambda x: 0.2 + 0.5 * x,
    "reward/format": lambda x: 0.7 + 0.28 * x,
    "reward/std": 0.45,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/error_fraction": 0.0,
    "reward/timeout_fraction": 0.0,
    "group/zero_signal_fraction": lambda x: 0.2 + 0.1 * x,
    "group/std_mean": 0.35,
    "group/solved_fraction": lambda x: 0.2 * x,
    "group/unsolved_fraction": lambda x: 0.2 * (1 - x),
    "completion/mean_tokens": lambda x: 30 + 10 * x,
    "completion/min_tokens": 12.0,
    "completion/truncated_fraction": 0.02,
    "policy/loss": 0.0,
    "policy/entropy": lambda x: 0.3 - 0.15 * x,
    "policy/kl": lambda x: 0.05 * x,
    "policy/ratio_mean": 1.0,
    "policy/gradient_norm": lambda x: 0.3 + 0.05 * math.sin(40 * x),
    "policy/clip_fraction": 0.02,
    "policy/skipped_updates": 0.0,
    "mismatch/kl": 1e-5,
    "mismatch/effective_sample_fraction": 0.999,
    "mismatch/max_ratio": 1.1,
    "time/step_seconds": 10.0,
    "time/sample_seconds": 6.0,
    "time/grade_seconds": 0.5,
    "time/train_seconds": 3.5,
    "memory/process_gib": 2.0,
}
HELD_OUT: dict[str, Curve | float] = {
    "evaluation/correct_fraction": lambda x: 0.25 + 0.5 * x,
    "evaluation/any_format_fraction": lambda x: 0.4 + 0.4 * x,
    "evaluation/mean_tokens": lambda x: 31 + 8 * x,
    "evaluation/error_fraction": 0.0,
    "evaluation/num_examples": 500.0,
}
EVALUATED_EVERY = 10


def example(number: int, *, is_right: bool, reward: float) -> dict[str, Any]:
    """A graded completion about problem ``number``, whose answer is its number."""
    stated = number if is_right else number + 1
    return {"completion": f"{number} </think> <answer> {stated} </answer>", "answer": str(number), "reward": reward}


def paid(*, right: float, wrong: float, count: int = 40) -> list[dict[str, Any]]:
    """Right and wrong completions with the same reward for each kind, and unformatted ones that earn 0."""
    rows = [example(k, is_right=k % 2 == 0, reward=right if k % 2 == 0 else wrong) for k in range(count)]
    return [*rows, {"completion": "no idea", "answer": "3", "reward": 0.0}]


def case(
    changes: Mapping[str, Curve | float | None] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    steps: int = STEPS,
    examples: list[dict[str, Any]] | None = None,
    lags: dict[int, int] | None = None,
) -> Case:
    """The healthy run with some curves (None: not measured) and settings (by key with dots) changed."""
    curves = {**HEALTHY, **HELD_OUT, **(changes or {})}
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        progress = max(step - 1, 0) / (steps - 1)
        row: dict[str, Any] = {"step": step}
        for key, curve in curves.items():
            is_due = step % EVALUATED_EVERY == 0 if key in HELD_OUT else step > 0
            if is_due and curve is not None:
                row[key] = curve(step / steps if key in HELD_OUT else progress) if callable(curve) else curve
        rows.append(row)
    config = copy.deepcopy(CONFIG)
    for key, value in (settings or {}).items():
        section, name = key.split(".")
        config[section][name] = value
    graded = paid(right=1.0, wrong=0.0) if examples is None else examples
    return Case(rows, config=config, examples=graded, lags={} if lags is None else lags)
