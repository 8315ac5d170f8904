"""Metrics of completions in which tools or environments answered."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from oncurve.core.records import Completion, Group
from oncurve.observe.metric import Metric

NOT_READ = ("malformed",)
"""Errors of calls that never reached a tool."""

EPISODE = (
    Metric(
        "episode/turns",
        "turns",
        "mean over completions of how often the policy wrote",
        "-",
        label="turns of an episode",
    ),
    Metric("episode/max_turns", "turns", "most turns of a completion", "below rollouts.episodes.max_turns"),
    Metric("episode/rows", "rows", "mean over completions of their rows: conversations and forks of an agent", "-"),
    Metric(
        "episode/calls",
        "calls",
        "calls by the policy, mean over completions that have something to call",
        "above 0",
        label="calls of tools",
    ),
    Metric(
        "episode/calling_fraction",
        "fraction",
        "completions with a call, of those that have something to call",
        "above 0; rises where a tool helps",
    ),
    Metric(
        "episode/tool_errors",
        "fraction",
        "calls that were answered with an error: wrong names or arguments, exceptions, timeouts, unreadable calls",
        "falls; staying high means that the tool is called wrongly, or is broken",
        label="calls that failed",
    ),
    Metric(
        "episode/malformed_calls",
        "fraction",
        "calls that could not be read; part of tool_errors",
        "falls; staying high means that the model does not know the form",
    ),
    Metric(
        "episode/tool_timeouts", "fraction", "calls over rollouts.episodes.tool_seconds; part of tool_errors", "near 0"
    ),
    Metric("episode/answer_tokens", "tokens", "mean over completions of tokens that the policy did not write", "-"),
    Metric(
        "episode/failed_fraction",
        "fraction",
        "completions whose environment crashed, hung or died: they have no reward",
        "0; part of reward/error_fraction",
    ),
    Metric(
        "episode/ended/<reason>",
        "fraction",
        "completions that ended for this reason: stop, length, done, turns, context, seconds, malformed, failed",
        "mostly stop or done",
    ),
)
"""Glossary of what a run with tools or environments writes besides."""
EPISODE_TIME = (
    Metric(
        "time/tools_seconds",
        "seconds",
        "mean time that a completion waited for tools and its environment",
        "-",
        label="waiting for tools, seconds",
    ),
    Metric(
        "time/tools_max_seconds",
        "seconds",
        "longest time that a completion waited for tools and its environment",
        "a few times time/tools_seconds; one slow call delays the whole step",
    ),
)
"""The same for the time that they take."""


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
