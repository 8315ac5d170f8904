"""Metrics of one step's rollouts, before any loss: rewards, groups, advantages, lengths, tools and environments."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from oncurve.core.records import EQUAL_WITHIN, NOT_APPLICABLE, Completion, Group, Mean, Reward

NOT_READ = ("malformed",)
"""Errors of calls that never reached a tool."""


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The ``episode/`` metrics of a step; nothing where no completion is an episode."""
    episodes = [
        completion
        for group in groups
        for completion in group.completions
        if completion.segments or completion.failure is not None
    ]
    if not episodes:
        return {}
    turns = [completion.num_turns for completion in episodes]
    callers = [completion for completion in episodes if completion.may_call]
    calls = [call for completion in callers for row in (completion, *completion.branches) for call in row.calls]
    reasons = [completion.finish_reason for completion in episodes]
    measured = {
        "episode/turns": statistics.fmean(turns),
        "episode/max_turns": float(max(turns)),
        "episode/answer_tokens": statistics.fmean(
            len(row.token_ids) - len(row.written_ids)
            for completion in episodes
            for row in (completion, *completion.branches)
        ),
        "episode/rows": 1 + statistics.fmean(len(completion.branches) for completion in episodes),
        "time/tools_seconds": statistics.fmean(completion.waiting_seconds for completion in episodes),
        "time/tools_max_seconds": max(completion.waiting_seconds for completion in episodes),
        "episode/failed_fraction": sum(completion.failure is not None for completion in episodes) / len(episodes),
    }
    if callers:
        measured["episode/calls"] = len(calls) / len(callers)
        num_calling = sum(any(row.calls for row in (completion, *completion.branches)) for completion in callers)
        measured["episode/calling_fraction"] = num_calling / len(callers)
    if calls:
        errors = [call.error for call in calls]
        measured["episode/tool_errors"] = sum(error is not None for error in errors) / len(calls)
        measured["episode/malformed_calls"] = sum(error in NOT_READ for error in errors) / len(calls)
        measured["episode/tool_timeouts"] = errors.count("timeout") / len(calls)
    return measured | {
        f"episode/ended/{reason}": reasons.count(reason) / len(reasons) for reason in sorted(set(reasons))
    }


def episode_row(completion: Completion) -> dict[str, object]:
    """The record of an episode besides its text; empty for a plain completion.

    ``segments`` are [whether the policy wrote it, text, tokens]; ``turn`` of a call counts from 0.
    """
    if not completion.segments and completion.failure is None:
        return {}
    fields = {
        "turns": completion.num_turns,
        "calls": [
            {
                "name": call.name,
                "arguments": call.arguments,
                "answer": call.answer[:2000],
                "error": call.error,
                "turn": call.turn,
                "seconds": round(call.seconds, 4),
            }
            for call in completion.calls
        ],
        "segments": _written(completion),
        "waiting_seconds": round(completion.waiting_seconds, 4),
        "own_prompt": completion.own_prompt,
        "failure": completion.failure,
        "branches": [{"prompt": row.own_prompt, "segments": _written(row)} for row in completion.branches] or None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _written(row: Completion) -> list[list[object]]:
    """The parts of an episode: writer, and number of tokens."""
    return [[part.is_policy, part.text, part.end - part.start] for part in row.segments]


OF_SAMPLING = (
    "reward/", "group/", "advantage/", "mismatch/", "policy/ratio", "tokens/sampled", "tokens/mean_age",
    "tokens/max_age", "tokens/newest", "tokens/mixed", "completion/mean_staleness",
    "completion/max_staleness", "completion/truncated", "time/sample", "time/grade", "memory/sample", "memory/grade",
)  # fmt: skip
"""Prefixes of metrics that mean nothing without sampling and grading."""


def rollout_metrics(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[Reward]],
    advantages: Sequence[Sequence[float]] | None = None,
) -> dict[str, float]:
    """The metrics of a step: ``reward/``, ``group/``, ``advantage/``, ``prompt/``, ``completion/``, ``tokens/sampled``.

    Measured on everything that was sampled, so call it before groups are filtered. A quantity without a single value
    (no completion was graded) is left out rather than given as 0. ``rewards[p][g]`` and ``advantages[p][g]`` belong
    to completion g of group p.

    Raises ValueError if the shapes differ.
    """
    shapes = [[len(row) for row in rewards], *([] if advantages is None else [[len(row) for row in advantages]])]
    expected = [len(group.completions) for group in groups]
    if any(shape != expected for shape in shapes):
        raise ValueError(f"completions per group {expected} do not match rewards and advantages {shapes}")
    measured = _reward_metrics([reward for row in rewards for reward in row])
    measured |= _group_metrics(rewards)
    if advantages is not None:
        flat = [float(value) for row in advantages for value in row]
        measured |= {"advantage/mean": statistics.fmean(flat), "advantage/std": _std(flat)} if flat else {}
    return measured | _completion_metrics(groups) | episode_metrics(groups)


def age_metrics(step: int, groups: Sequence[Group]) -> dict[str, float]:
    """The age of the weights that sampled the tokens of a step, token by token."""
    completions = [row for group in groups for main in group.completions for row in (main, *main.branches)]
    counts: dict[int, int] = {}
    for completion in completions:
        for version, count in _tokens_by_version(completion).items():
            counts[step - version] = counts.get(step - version, 0) + count
    total = max(1, sum(counts.values()))
    return {
        "tokens/mean_age_steps": sum(age * count for age, count in counts.items()) / total,
        "tokens/max_age_steps": float(max(counts, default=0)),
        "tokens/newest_fraction": counts.get(0, 0) / total,
        "tokens/mixed_fraction": sum(bool(main.versions) for main in completions) / max(1, len(completions)),
    }


def supervised_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step that learned demonstrations: without those of rewards, groups and sampling.

    sft/loss    mean of -log p over the tokens of the step's demonstrations, in nats
    """
    rest = {key: value for key, value in metrics.items() if not key.startswith(OF_SAMPLING)}
    return {"sft/loss": metrics["policy/loss"], **rest}


def _reward_metrics(rewards: Sequence[Reward]) -> dict[str, float]:
    measured: dict[str, float] = {}
    if rewards:
        measured["reward/error_fraction"] = sum(r.is_failure for r in rewards) / len(rewards)
        if skipped := sum(r.error == NOT_APPLICABLE for r in rewards):
            measured["reward/not_applicable_fraction"] = skipped / len(rewards)
        measured["reward/timeout_fraction"] = sum(r.error == "timeout" for r in rewards) / len(rewards)
    values = [reward.value for reward in rewards if reward.value is not None]
    if values:
        measured |= {"reward/mean": statistics.fmean(values), "reward/std": _std(values)}
        measured |= {"reward/min": min(values), "reward/max": max(values)}
    parts: dict[str, Mean] = {}
    for reward in rewards:
        if reward.error is None:
            for name, value in reward.parts.items():
                parts[name] = parts.get(name, Mean(0.0, 0.0)) + Mean(float(value), 1.0)
    return measured | {f"reward/{name}": mean.value for name, mean in parts.items()}


def _group_metrics(rewards: Sequence[Sequence[Reward]]) -> dict[str, float]:
    graded = [[reward.value for reward in row if reward.value is not None] for row in rewards]
    if not graded:
        return {}
    flat = sum(len(row) < 2 or max(row) - min(row) < EQUAL_WITHIN for row in graded)
    measured = {"group/zero_signal_fraction": flat / len(graded)}
    if spreads := [_std(row) for row in graded if len(row) > 1]:
        measured["group/std_mean"] = statistics.fmean(spreads)
    if means := [statistics.fmean(row) for row in graded if row]:
        measured |= {"group/mean_min": min(means), "group/mean_max": max(means)}
    correct = [[r.parts["correct"] >= 1.0 for r in row if r.error is None and "correct" in r.parts] for row in rewards]
    if judged := [row for row in correct if row]:
        measured["group/solved_fraction"] = sum(all(row) for row in judged) / len(judged)
        measured["group/unsolved_fraction"] = sum(not any(row) for row in judged) / len(judged)
    return measured


def _completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    completions = [completion for group in groups for completion in group.completions]
    if not completions:
        return {}
    lengths = [completion.num_tokens for completion in completions]
    return {
        "prompt/mean_tokens": statistics.fmean(len(group.prompt.prompt_ids) for group in groups),
        "completion/mean_tokens": statistics.fmean(lengths),
        "completion/min_tokens": float(min(lengths)),
        "completion/max_tokens": float(max(lengths)),
        "completion/truncated_fraction": sum(c.is_truncated for c in completions) / len(completions),
        "tokens/sampled": float(sum(lengths)),
    }


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def _tokens_by_version(completion: Completion) -> dict[int, int]:
    """Number of tokens that each version sampled."""
    counts: dict[int, int] = {}
    spans = completion.versions or ((0, completion.policy_version),)
    ends = [*(start for start, _ in spans[1:]), len(completion.token_ids)]
    for (start, version), end in zip(spans, ends, strict=True):
        counts[version] = counts.get(version, 0) + sum(completion.written[start:end])
    return counts
