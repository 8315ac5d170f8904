"""Metrics of a step under the names that TRL logs them by."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from oncurve.records import Group, Reward
from oncurve.run.step_log import Step

SAME = {
    "policy/loss": "loss",
    "sft/loss": "loss",
    "policy/gradient_norm": "grad_norm",
    "policy/learning_rate": "learning_rate",
    "policy/kl": "kl",
    "policy/entropy": "entropy",
    "policy/clip_fraction": "clip_ratio/region_mean",
    "time/step_seconds": "step_time",
}
"""Ours to theirs, where both are the same number."""


def step_logs(step: Step, names: Sequence[str]) -> dict[str, Any]:
    """What TRL would log of a step, and beside it our own metrics."""
    logs = {theirs: step.metrics[ours] for ours, theirs in SAME.items() if ours in step.metrics}
    return {**logs, **rollout_logs(step.groups, step.rewards, names), **step.metrics}


def rollout_logs(
    groups: Sequence[Group], rewards: Sequence[Sequence[Reward]], names: Sequence[str]
) -> dict[str, float]:
    """Rewards and lengths of some groups."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    ended = [len(completion.token_ids) for completion in completions if not completion.is_truncated] or [0]
    logs: dict[str, float] = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": fmean(completion.is_truncated for completion in completions),
        "completions/mean_terminated_length": fmean(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }
    graded = [[reward.value for reward in row if reward.value is not None] for row in rewards]
    if values := [value for row in graded for value in row]:
        spreads = [_spread(row) for row in graded]
        logs["reward"] = fmean(values)
        logs["reward_std"] = fmean(spreads)
        logs["frac_reward_zero_std"] = fmean(spread == 0 for spread in spreads)
    for name in names:
        if parts := [reward.parts[name] for row in rewards for reward in row if name in reward.parts]:
            logs |= {f"rewards/{name}/mean": fmean(parts), f"rewards/{name}/std": _spread(parts)}
    return logs


def num_tokens(groups: Sequence[Group]) -> int:
    """Tokens of prompts and completions together, each prompt as often as it was completed."""
    return sum(len(c.prompt_ids) + len(c.token_ids) for group in groups for c in group.completions)


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
