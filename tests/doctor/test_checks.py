"""Does every check speak on a sick run, and stay silent on a healthy one and on one that is nearly sick?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from doctor_cases import HEALTHY, case, example, paid

from oncurve.doctor.case import Case, Finding
from oncurve.doctor.diagnose import CHECKS, check_names, diagnose


def said(given: Case) -> dict[str, Finding]:
    return {finding.check: finding for finding in diagnose(given)}


def spikes(height: float, count: int = 1, *, low: float = 0.3) -> Any:
    return lambda x: height if x > 0.5 and round(x * 39) < 20 + count else low


def late(before: float, after: float) -> Any:
    """One value in the first half, another in the second."""
    return lambda x: before if x < 0.5 else after


def swing(size: float) -> Any:
    return lambda x: 0.5 + size * (1 if round(x * 39) % 2 else -1)


def hacked(before: float, after: float, *, count: int = 40) -> list[dict[str, Any]]:
    """A first and a last step in which these shares of the completions state several answers and are rewarded."""
    rows = []
    for step, share in ((1, before), (30, after)):
        for k in range(count):
            row = example(k, is_right=True, reward=1.0) | {"step": step, "prompt": f"How much is {k}?"}
            several = f"so </think> <answer> {k} {k + 1} {k + 2} </answer>"
            rows.append(row | ({"completion": several} if k < share * count else {}))
        rows.append({**row, "completion": "no", "reward": 0.0})
    return rows


def unchanged(count: int, *, temperature: float = 0.0) -> dict[str, Any]:
    """A comparison in which so many of 500 completions are those of the base."""
    return {"num_unchanged": count, "num_examples": 500, "params": {"temperature": temperature}}


FLAT = {"evaluation/correct_fraction": 0.25, "evaluation/any_format_fraction": 0.4}
COIN = [example(k, is_right=k % 2 == 0, reward=float(k % 4 < 2)) for k in range(80)]

SICK: dict[str, list[Case]] = {
    "environments_fail": [case({"episode/failed_fraction": 0.2})],
    "grader_errors": [case({"reward/error_fraction": 0.02}), case({"evaluation/error_fraction": 0.06})],
    "reward_constant": [
        case({"reward/min": 1.0, "reward/max": 1.0, "reward/std": 0.0, "reward/correct": None, "reward/format": None}),
        case({"reward/min": 0.0, "reward/max": 1e-9, "reward/std": 0.0, "reward/correct": None, "reward/format": None}),
    ],
    "grader_inverted": [case(examples=paid(right=0.0, wrong=1.0))],
    "reward_blind": [case(examples=paid(right=1.0, wrong=1.0)), case(examples=COIN)],
    "reward_exploited": [case(examples=hacked(0.0, 0.8)), case(examples=hacked(0.1, 0.5))],
    "entropy_bonus": [
        case({"policy/entropy": lambda x: 0.3 + 2 * x}, {"algorithm.entropy_coef": 0.5}),
        case({"reward/mean": late(0.6, 0.05), "reward/correct": late(0.6, 0.05)}, {"algorithm.entropy_coef": 0.5}),
    ],
    "stale_weights": [case(lags={40: 3}), case({}, {"rollouts.staleness": 4}, lags={40: 5})],
    "too_far_ahead": [case({"mismatch/effective_sample_fraction": lambda x: 1 - 0.5 * x}, {"rollouts.staleness": 4})],
    "mismatch": [case({"mismatch/kl": 0.02}), case({"mismatch/effective_sample_fraction": 0.7})],
    "clipping": [
        case({"policy/clip_fraction": 0.25}),
        case({"policy/clip_fraction": 0.09}, {"algorithm.clip_low": 1e-4, "algorithm.clip_high": 1e-4}),
    ],
    "learning_rate_high": [
        case({"reward/mean": late(0.6, 0.05), "reward/correct": late(0.6, 0.05)}),
        case({"evaluation/any_format_fraction": lambda x: 0.4 - 0.3 * x, "evaluation/correct_fraction": None}),
    ],
    "not_finite": [
        case({"policy/loss": late(0.0, math.nan)}),
        case({"policy/gradient_norm": late(0.3, math.inf)}),
        case({"policy/nonfinite_updates": spikes(1.0, low=0.0)}),
    ],
    "no_format": [case({"reward/format": 0.0, "reward/correct": 0.0, "reward/mean": 0.0, "reward/max": 0.0})],
    "minimum_length": [
        case(
            {"completion/min_tokens": 90.0, "completion/truncated_fraction": 0.6},
            {"rollouts.min_completion_tokens": 90},
        )
    ],
    "truncation": [case({"completion/truncated_fraction": 0.15}), case({"completion/truncated_fraction": 0.9})],
    "tools_unused": [
        case({"episode/calls": 0.001}, {"rollouts.tools": ["calculator"]}),
        case({"episode/calls": 0.0, "episode/turns": 1.0}, {"rollouts.environments": {"a": "b.py:C"}}),
    ],
    "calls_malformed": [case({"episode/malformed_calls": 0.5, "episode/tool_errors": 0.6, "episode/calls": 1.0})],
    "tools_broken": [case({"episode/malformed_calls": 0.01, "episode/tool_errors": 0.7, "episode/calls": 1.0})],
    "turns_at_limit": [case({"episode/ended/turns": 0.4})],
    "sampling_narrow": [
        case({"group/zero_signal_fraction": 0.7}, {"rollouts.temperature": 0.1}),
        case({"group/zero_signal_fraction": 0.7}, {"rollouts.top_p": 0.2}),
        case({"group/zero_signal_fraction": 0.7}, {"rollouts.top_k": 1}),
        case({"group/zero_signal_fraction": 0.7}, {"rollouts.min_p": 0.9}),
    ],
    "kl_too_strong": [
        case({"policy/kl": 0.001, "reward/mean": 0.2, "reward/correct": 0.2}, {"algorithm.kl_coef": 10.0})
    ],
    "lost_to_rounding": [case({"policy/arrived": lambda x: 0.1 + 0.5 * x}), case({"policy/arrived": 0.8})],
    "learning_rate_low": [case({**FLAT, "evaluation/mean_tokens": 31.0}), replace(case(), compared=unchanged(489))],
    "too_easy": [case({"group/solved_fraction": 0.9}), case({"group/solved_fraction": lambda x: x})],
    "too_hard": [
        case({"group/unsolved_fraction": 0.95, "group/zero_signal_fraction": 0.95}),
        case({"group/unsolved_fraction": 0.7, "group/zero_signal_fraction": 0.7}),
    ],
    "reward_hacking": [
        case({**FLAT, "reward/correct": 0.2}),
        case({"reward/held_out/brevity": lambda x: 0.9 - 0.6 * x}),
    ],
    "overfitting": [case(FLAT)],
    "entropy_collapse": [
        case(
            {
                "policy/entropy": lambda x: 0.3 * math.exp(-6 * x),
                "group/zero_signal_fraction": lambda x: 0.1 + 0.6 * x,
            }
        )
    ],
    "dead_groups": [case({"group/zero_signal_fraction": 0.7})],
    "kl_growth": [case({"policy/kl": lambda x: 0.5 * x**4}), case({"policy/kl": 1.2})],
    "format_only": [
        case({"reward/format": lambda x: 0.5 + 0.5 * x, "evaluation/any_format_fraction": 0.4, "reward/correct": 0.3})
    ],
    "length_explosion": [
        case(
            {
                "completion/mean_tokens": lambda x: 30 + 60 * x,
                "completion/truncated_fraction": lambda x: 0.4 * x,
            }
        )
    ],
    "length_collapse": [case({"completion/mean_tokens": lambda x: 30 - 25 * x, "reward/correct": 0.3})],
    "entropy_explosion": [case({"policy/entropy": lambda x: 0.3 + 2 * x})],
    "oscillation": [case({"reward/mean": swing(0.4), "reward/correct": 0.5})],
    "gradient_spikes": [case({"policy/gradient_norm": spikes(9.0)}), case({"policy/gradient_norm": spikes(9.0, 4)})],
    "not_learning": [case({**FLAT, "reward/mean": 0.3, "reward/correct": 0.3})],
    "skipped_updates": [case({"policy/skipped_updates": 0.2})],
    "validation_higher": [
        case(
            {"reward/correct": 0.3, "reward/mean": 0.3, "evaluation/correct_fraction": 0.6},
            {"evaluation.temperature": 1.0},
        )
    ],
    "grading_bound": [case({"time/grade_seconds": 4.0})],
    "slow_link": [
        case({"weights/sync_seconds": 4.0, "weights/late_servers": 0.0}),
        case({"weights/sync_seconds": 0.5, "weights/late_servers": 1.0}),
    ],
    "slowing": [case({"time/step_seconds": lambda x: 10 + 20 * x})],
    "memory_growth": [case({"memory/process_gib": lambda x: 2 + 3 * x}, steps=60)],
    "not_ahead_enough": [case({"time/sample_seconds": 4.0, "speed/server_idle_fraction": 0.4})],
    "rollout_bound": [case({"time/sample_seconds": 9.0})],
    "trainer_bound": [case({"time/train_seconds": 9.0})],
    "evaluation_small": [case({"evaluation/num_examples": 30.0})],
}
"""For each check, runs on which it must speak."""

TESTED = {"name": "correct", "change": 0.48, "p_value": 1e-9}
"""The row of a comparison in which the test problems are answered better than before."""
AT_ONCE = [
    0.16, 0.31, 0.41, 0.44, 0.61, 0.88, 0.86, 0.83, 0.69, 0.73, 0.8, 0.52, 0.45, 0.48, 0.52, 0.72, 0.62, 0.59, 0.64,
    0.77, 0.61, 0.81, 0.66, 0.73, 0.48, 0.78, 0.53, 0.53, 0.47, 0.77,
]  # fmt: skip
"""Rewards of a run that learned in its first steps, and then varied."""
BROKEN = "s: " + ", ".join(f"not a finite number @{step}-{step}" for step in range(21, 26))
TOLD: dict[str, list[str]] = {
    "environments_fail": ["s: 0.2 @1-8, 0.2 @33-40"],
    "grader_errors": ["w: 0.02 @1-40", "s: 0.06 @0-40"],
    "reward_constant": ["s: 1 @1-40, 1 @1-40", "s: 0 @1-40, 1e-09 @1-40"],
    "grader_inverted": ["s: 0, 1"],
    "reward_blind": ["s: 1, 1", "s: 0.5, 0.5"],
    "reward_exploited": [
        "w: 0.8, 0, 30, states '0 1 2', the reference is '0'", "w: 0.5, 0.1, 30, states '0 1 2', the reference is '0'",
    ],
    "entropy_bonus": ["s: 0.3 @1-1, 2.121 @33-40, 0.5", "s: 0.3 @1-1, 0.1635 @33-40, 0.6 @1-8, 0.05 @33-40, 0.5"],
    "stale_weights": ["w: 3 @40-40", "s: 5 @40-40"],
    "too_far_ahead": ["w: 0.9551 @1-8, 0.5449 @33-40, 4"],
    "mismatch": ["w: 0.02 @1-40, 0.999 @1-40, 1.1 @1-40", "w: 1e-05 @1-40, 0.7 @1-40, 1.1 @1-40"],
    "clipping": ["w: 0.25 @1-40, 0.2, 0.2", "w: 0.09 @1-40, 0.0001, 0.0001"],
    "learning_rate_high": [
        "s: 0.6 @1-8, 0.05 @33-40, 0.3023 @1-40, 0.225 @1-40, 1e-05",
        "s: 0.4 @0-0, 0.1 @40-40, 0.3023 @1-40, 0.225 @1-40, 1e-05",
    ],
    "not_finite": [
        BROKEN,
        BROKEN,
        "s: 1 @21-21",
    ],
    "no_format": ["s: 0 @1-40, think_answer"],
    "minimum_length": ["s: 90, 100, 90 @1-40, 0.6 @1-40"],
    "truncation": ["w: 0.15 @1-1, 0.15 @33-40, 100", "s: 0.9 @1-1, 0.9 @33-40, 100"],
    "tools_unused": ["s: 0.001 @1-8, 0.001 @33-40, ['calculator']", "s: 0 @1-8, 0 @33-40"],
    "calls_malformed": ["w: 0.5 @1-8, 0.5 @33-40"],
    "tools_broken": ["w: 0.7 @1-8, 0.7 @33-40"],
    "turns_at_limit": ["w: 0.4 @1-8, 0.4 @33-40"],
    "sampling_narrow": [
        "s: 0.1, 0.7 @1-40, 0.35 @33-40", "s: 0.2, 0.7 @1-40, 0.35 @33-40", "s: 1, 0.7 @1-40, 0.35 @33-40",
        "s: 0.9, 0.7 @1-40, 0.35 @33-40",
    ],
    "kl_too_strong": ["w: 0.001 @1-40, 0.2 @1-8, 0.2 @33-40, 10"],
    "lost_to_rounding": ["w: 0.1449 @1-8, 0.5551 @33-40, 1e-05", "w: 0.8 @1-8, 0.8 @33-40, 1e-05"],
    "learning_rate_low": ["s: 31 @0-40, 0.4 @0-40, 1e-05", "w: 0.978, 0.35 @1-40, 1e-05"],
    "too_easy": ["s: 0.9 @33-40, 0.291 @33-40, 8", "n: 0.9103 @33-40, 0.291 @33-40, 8"],
    "too_hard": ["s: 0.95 @1-8, 0.95 @33-40, 0.95 @33-40", "w: 0.7 @1-8, 0.7 @33-40, 0.7 @33-40"],
    "reward_hacking": [
        "s: 0.2449 @1-8, 0.6551 @33-40, 0.4 @0-0, 0.4 @40-40",
        "s: 0.2449 @1-8, 0.6551 @33-40, 0.8462 @1-8, 0.3538 @33-40",
    ],
    "overfitting": ["w: 0.2449 @1-8, 0.6551 @33-40, 0.4 @0-0, 0.4 @40-40"],
    "entropy_collapse": ["w: 0.1862 @1-8, 0.001355 @33-40, 0.1538 @1-8, 0.6462 @33-40"],
    "dead_groups": ["w: 0.7 @33-40, 0.35 @33-40, 0.45 @33-40"],
    "kl_growth": ["w: 0.1751 @29-33, 0.4051 @36-40, 0.01", "w: 1.2 @29-33, 1.2 @36-40, 1.2 @33-40, 0.01"],
    "format_only": ["w: 0.5449 @1-8, 0.9551 @33-40, 0.4 @0-0, 0.4 @40-40"],
    "length_explosion": ["s: 30 @1-1, 84.62 @33-40, 0.3641 @33-40"],
    "length_collapse": ["w: 27.76 @1-8, 7.244 @33-40"],
    "entropy_explosion": ["w: 0.3 @1-1, 2.121 @33-40"],
    "oscillation": ["w: 0.5 @1-40, 0.5655, 0.1125"],
    "gradient_spikes": ["n: 0.3, 9 @21-21", "w: 0.3, 9 @21-21, 9 @22-22, 9 @23-23"],
    "not_learning": ["w: 0.3 @1-8, 0.3 @33-40, 0.03977, 0, 0.25 @1-40, 1e-05"],
    "skipped_updates": ["w: 0.2 @1-40, 0.291 @33-40"],
    "validation_higher": ["w: 0.3 @33-40, 0.6 @40-40"],
    "grading_bound": ["w: 4 @1-40, 10 @1-40"],
    "slow_link": ["w: 4 @1-40, 10 @1-40", "w: 0.5 @1-40, 1 @1-40"],
    "slowing": ["w: 11.79 @1-8, 28.21 @33-40"],
    "memory_growth": ["w: 2.28 @1-12, 4.72 @49-60"],
    "not_ahead_enough": ["n: 4 @1-40, 10 @1-40, 0.4 @1-40"],
    "rollout_bound": ["n: 9 @1-40, 10 @1-40"],
    "trainer_bound": ["n: 9 @1-40, 10 @1-40"],
    "evaluation_small": ["n: 30 @40-40, 0.75 @40-40"],
}  # fmt: skip
"""What its finding says on each of them: severity, then every number with the first and the last step it is of."""

NEARLY: dict[str, list[Case]] = {
    "environments_fail": [case({"episode/failed_fraction": 0.005})],
    "grader_errors": [case({"reward/error_fraction": 0.009})],
    "reward_constant": [
        case({"reward/min": 0.0, "reward/max": lambda x: 0.0 if x < 0.8 else 1.0}),
        case({"reward/min": 0.0, "reward/max": 1e-6, "reward/correct": None, "reward/format": None}),
    ],
    "grader_inverted": [
        replace(case(examples=paid(right=0.0, wrong=1.0)), config={"rewards": [{"type": "environment"}]}),
        case(examples=paid(right=0.8, wrong=1.0)),
        case(examples=paid(right=0.0, wrong=1.0, count=8)),
    ],
    "reward_blind": [case(examples=paid(right=1.0, wrong=0.6)), case(examples=paid(right=1.0, wrong=1.0, count=8))],
    "reward_exploited": [
        case(examples=hacked(0.7, 0.8)),  # a habit that it had before
        case(examples=hacked(0.0, 0.2)),
        case(examples=hacked(0.0, 1.0, count=15)),
        case(examples=[{**row, "reward": 0.0} for row in hacked(0.0, 1.0)]),
    ],
    "entropy_bonus": [
        case({"policy/entropy": lambda x: 0.3 + 0.5 * x}, {"algorithm.entropy_coef": 0.5}),
        case({"reward/mean": late(0.6, 0.05), "reward/correct": late(0.6, 0.05)}, {"algorithm.entropy_coef": 0.01}),
    ],
    "stale_weights": [case(lags={40: 1}), case({}, {"rollouts.staleness": 4}, lags={40: 4})],
    "too_far_ahead": [
        case({"mismatch/effective_sample_fraction": lambda x: 1 - 0.25 * x}, {"rollouts.staleness": 4}),
        case({"mismatch/effective_sample_fraction": 0.5}),
    ],
    "mismatch": [case({"mismatch/kl": 0.009}), case({"mismatch/effective_sample_fraction": 0.85})],
    "clipping": [
        case({"policy/clip_fraction": 0.19}),
        case(
            {"policy/clip_fraction": 0.15},
            {"algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4, "algorithm.type": "gspo"},
        ),
    ],
    "learning_rate_high": [
        case({"reward/mean": late(0.6, 0.4), "reward/correct": late(0.6, 0.4)}),
        case({"evaluation/any_format_fraction": lambda x: 0.4 - 0.04 * x}),
    ],
    "not_finite": [case({"group/std_mean": math.nan}), case({"policy/nonfinite_updates": 0.0})],
    "no_format": [
        case({"reward/format": 0.03}),
        case({"reward/format": 0.0, "reward/correct": 0.0, "completion/truncated_fraction": 0.95}),
    ],
    "minimum_length": [
        case({"completion/truncated_fraction": 0.3}, {"rollouts.min_completion_tokens": 90}),
        case({"completion/min_tokens": 50.0, "completion/mean_tokens": 80.0}, {"rollouts.min_completion_tokens": 50}),
    ],
    "truncation": [
        case({"completion/truncated_fraction": 0.5, "episode/ended/failed": 0.45}),  # by crashes, not by the limit
        case({"completion/truncated_fraction": 0.09}),
        case({"completion/truncated_fraction": late(0.0, 0.5)}),
    ],
    "tools_unused": [
        case({"episode/turns": 1.0}, {"rollouts.environments": {"a": "b.py:C"}}),
        case({"episode/calls": 0.001}),
        case({"episode/calls": 0.1}, {"rollouts.tools": ["calculator"]}),
    ],
    "calls_malformed": [case({"episode/malformed_calls": lambda x: 0.6 - 0.6 * x, "episode/tool_errors": 0.6})],
    "tools_broken": [case({"episode/malformed_calls": 0.6, "episode/tool_errors": 0.7})],
    "turns_at_limit": [case({"episode/ended/turns": lambda x: 0.5 - 0.4 * x})],
    "sampling_narrow": [
        case({}, {"rollouts.temperature": 0.1}),
        case({"group/zero_signal_fraction": 0.7}, {"rollouts.temperature": 0.6}),
    ],
    "kl_too_strong": [case({"policy/kl": 0.001}, {"algorithm.kl_coef": 10.0})],
    "lost_to_rounding": [case({"policy/arrived": lambda x: 1.05 - 0.05 * x})],
    "learning_rate_low": [
        case({**FLAT, "evaluation/mean_tokens": lambda x: 31 + 0.01 * x}),
        case({**FLAT, "evaluation/mean_tokens": 31.0, "group/std_mean": 0.0}),
        replace(case(), compared=unchanged(440)),
        replace(case(), compared=unchanged(489, temperature=1.0)),
        replace(case({"reward/correct": 0.95}), compared=unchanged(489)),  # right already
        replace(case(), compared={"num_examples": 500, "params": {"temperature": 0.0}}),  # of an older version
    ],
    "too_easy": [case({"group/solved_fraction": 0.55})],
    "too_hard": [
        case({"group/unsolved_fraction": lambda x: 0.9 - 0.4 * x, "group/zero_signal_fraction": 0.9}),
        case({"group/unsolved_fraction": 1.0, "group/zero_signal_fraction": 0.0}),
    ],
    "reward_hacking": [
        case({**FLAT, "reward/mean": 0.2, "reward/correct": 0.2}),
        case({"reward/held_out/brevity": 0.9}),
    ],
    "overfitting": [
        case({"evaluation/any_format_fraction": 0.4}),
        case({**FLAT, "reward/correct": lambda x: 0.1 + 0.28 * x}),  # never above what is right on validation prompts
    ],
    "entropy_collapse": [case({"policy/entropy": lambda x: 0.3 * math.exp(-6 * x)})],
    "dead_groups": [case({"group/zero_signal_fraction": 0.55, "reward/std": 0.01})],
    "kl_growth": [case({"policy/kl": lambda x: 0.09 * x**4}), case({"policy/kl": 0.5})],
    "format_only": [case({"reward/format": lambda x: 0.5 + 0.5 * x})],
    "length_explosion": [case({"completion/mean_tokens": lambda x: 30 + 60 * x})],
    "length_collapse": [case({"completion/mean_tokens": lambda x: 30 - 25 * x})],
    "entropy_explosion": [case({"policy/entropy": lambda x: 0.3 + 0.5 * x})],
    "oscillation": [case({"reward/mean": swing(0.1), "reward/correct": 0.5})],
    "gradient_spikes": [case({"policy/gradient_norm": spikes(2.9)})],
    "not_learning": [
        case({**FLAT, "reward/mean": 0.3, "reward/correct": 0.3}, steps=19),
        case({"reward/mean": 0.3, "reward/correct": 0.3}),  # validation rises
        case({**FLAT, "reward/mean": 0.91, "reward/correct": 0.85}),  # no room
        replace(case({**FLAT, "reward/mean": 0.3, "reward/correct": 0.3}), compared={"rows": [TESTED]}),
        case({**FLAT, "reward/mean": lambda x: 0.3 + 0.05 * x, "reward/std": 2.0, "reward/correct": 0.3}),  # a trend
        case(
            {**FLAT, "reward/mean": lambda x: AT_ONCE[round(29 * x)], "reward/std": 0.646, "reward/correct": 0.5},
            steps=30,
        ),
    ],
    "skipped_updates": [case({"policy/skipped_updates": 0.09})],
    "validation_higher": [
        case({"reward/correct": 0.3, "evaluation/correct_fraction": 0.6}),
        case({"reward/correct": 0.5, "evaluation/correct_fraction": 0.6}, {"evaluation.temperature": 1.0}),
    ],
    "grading_bound": [case({"time/grade_seconds": 2.9})],
    "slow_link": [case({"weights/sync_seconds": 2.9, "weights/late_servers": late(0.0, 1.0)})],
    "slowing": [
        case({"time/step_seconds": lambda x: 10 + 8 * x}),
        case({"time/step_seconds": lambda x: 10 + 20 * x, "completion/mean_tokens": lambda x: 30 + 60 * x}),
    ],
    "memory_growth": [
        case({"memory/process_gib": lambda x: 2 + 0.8 * x}, steps=60),
        case({"memory/process_gib": late(2.0, 4.0)}, steps=60),
    ],
    "not_ahead_enough": [
        case({"time/sample_seconds": 4.0, "speed/server_idle_fraction": 0.1}),
        case({"time/sample_seconds": 3.0, "speed/server_idle_fraction": 0.9}),
        case({"time/sample_seconds": 4.0, "speed/server_idle_fraction": 0.4}, {"rollouts.staleness": 8}),
    ],
    "rollout_bound": [case({"time/sample_seconds": 8.4})],
    "trainer_bound": [case({"time/train_seconds": 8.4})],
    "evaluation_small": [case({"evaluation/num_examples": 200.0})],
}
"""For each check, runs that come near to it, on which it must be silent."""


def test_every_check_has_its_sick_and_nearly_sick_runs() -> None:
    assert list(SICK) == list(NEARLY) == list(check_names())


@pytest.mark.proves("F135")
def test_nothing_is_found_on_a_healthy_run() -> None:
    assert diagnose(case()) == []


@pytest.mark.proves("F131", "F132", "F135")
@pytest.mark.parametrize(
    ("name", "given", "told"),
    [(name, *row) for name, all_ in SICK.items() for row in zip(all_, TOLD[name], strict=True)],
)
def test_a_check_speaks_on_a_sick_run(name: str, given: Case, told: str) -> None:
    finding = said(given)[name]
    numbers = [
        (f"{item.value:.4g}" if isinstance(item.value, float) else str(item.value))
        + (f" @{item.steps[0]}-{item.steps[1]}" if item.steps else "")
        for item in finding.evidence
    ]
    assert f"{finding.severity[0]}: {', '.join(numbers)}" == told
    assert finding.do.endswith(".")
    assert not finding.what.endswith(".")
    steps = [item.steps for item in finding.evidence if item.steps is not None]
    assert all(0 <= first <= last <= len(given.metrics) for first, last in steps)


@pytest.mark.proves("F132")
@pytest.mark.parametrize(("name", "given"), [(name, given) for name, all_ in NEARLY.items() for given in all_])
def test_a_check_is_silent_on_a_run_that_is_nearly_sick(name: str, given: Case) -> None:
    assert name not in said(given)


@pytest.mark.parametrize("name", [name for name in SICK if name not in ("gradient_spikes",)])
def test_the_worst_sick_run_of_a_check_has_the_check_first_or_explained(name: str) -> None:
    findings = diagnose(SICK[name][0])
    place = next(k for k, finding in enumerate(findings) if finding.check == name)
    before = [finding.check for finding in findings[:place]]
    assert findings[place].follows is not None or len(before) <= 1, before


@pytest.mark.proves("D24")
def test_loss_is_no_diagnosis() -> None:
    falling = case({"policy/loss": lambda x: 1 - x})
    rising = case({"policy/loss": lambda x: x})
    assert diagnose(falling) == diagnose(rising) == []


@pytest.mark.proves("D23")
def test_batch_spread_is_no_group_spread() -> None:
    """Rewards that differ between prompts and not inside groups carry no signal, however large their spread."""
    wide = said(case({"reward/std": 0.5, "group/zero_signal_fraction": 0.95, "group/std_mean": 0.01}))
    assert wide["dead_groups"].severity == "severe"
    assert diagnose(case({"reward/std": 0.05})) == []


@pytest.mark.parametrize(
    ("change", "is_binary", "is_said"),
    [(-0.2, False, True), (-0.2, True, False), (-0.03, False, False), (0.2, False, False)],
)
def test_test_problems_that_are_answered_worse_than_by_the_base_are_a_collapse(
    change: float, *, is_binary: bool, is_said: bool
) -> None:
    """The paired difference on the test problems shows it where the few validation ones between steps do not."""
    reward = {"before": {"value": 0.8}, "after": {"value": 0.8 + change}, "change": change, "p_value": 1e-4}
    shares = {"before": {"successes": 30, "total": 100}, "after": {"successes": 29, "total": 100}}
    rows = [{"name": "correct", **shares, "change": -0.01, "p_value": 1.0}]
    found = said(replace(case(), compared={"is_binary": is_binary, "reward": reward, "rows": rows}))
    assert ("learning_rate_high" in found) == is_said
    assert not is_said or str(found["learning_rate_high"].evidence[1]) == "mean reward on test problems, after = 0.6"


def test_rewards_that_differ_by_too_little_are_to_be_scaled() -> None:
    remedies = [said(given)["reward_constant"].do.split()[0] for given in SICK["reward_constant"]]
    assert remedies == ["Correct", "Scale"]


@pytest.mark.proves("D22")
def test_growth_of_the_kl_asks_for_a_higher_coefficient() -> None:
    remedy = said(SICK["kl_growth"][0])["kl_growth"].do
    assert remedy.startswith("Raise algorithm.kl_coef")


def test_one_step_of_anything_is_too_little_for_a_trend() -> None:
    trends = {"learning_rate_high", "reward_hacking", "overfitting", "length_collapse", "length_explosion", "kl_growth"}
    assert not trends & set(said(Case(case({"reward/mean": late(0.6, 0.0)}).metrics[:3])))


def test_a_metric_that_is_missing_silences_only_its_checks() -> None:
    given = case({**dict.fromkeys(HEALTHY), "time/grade_seconds": 4.0, "time/step_seconds": 10.0})
    assert set(said(given)) == {"grading_bound"}


def test_every_check_says_what_it_looks_for() -> None:
    for check in CHECKS:
        assert len(check.symptom) > 20
        assert check.symptom.endswith(".")


def test_a_task_that_is_not_known_to_be_unequal_is_not_called_constant() -> None:
    always = {"reward/min": 0.0, "reward/max": 0.0, "reward/std": 0.0, "reward/mean": 0.0, "reward/correct": 0.0}
    assert "reward_constant" not in said(case(always))
    assert "reward_constant" in said(case(always, examples=paid(right=0.0, wrong=0.0)))


def test_few_groups_are_not_called_most() -> None:
    few = {"run.prompts_per_step": 4}
    for key, name in (("group/unsolved_fraction", "too_hard"), ("group/solved_fraction", "too_easy")):
        values = {key: 0.65, "group/zero_signal_fraction": 0.65}
        assert name in said(case(values))
        assert name not in said(case(values, few))


def test_a_single_high_kl_is_no_growth() -> None:
    assert "kl_growth" not in said(case({"policy/kl": spikes(0.3, low=0.05)}))
    assert "kl_growth" not in said(case({"policy/kl": lambda x: 0.3 if x == 1 else 0.05}))


@pytest.mark.parametrize(("timeouts", "is_slow"), [(0.0, False), (0.02, False), (0.04, True)])
def test_time_is_the_remedy_where_most_failures_are_timeouts(timeouts: float, is_slow: bool) -> None:
    found = said(case({"reward/error_fraction": 0.06, "reward/timeout_fraction": timeouts}))["grader_errors"]
    assert any("timeout" in str(one) for one in found.evidence) == (timeouts > 0)
    assert ("more time" in found.do) == is_slow
