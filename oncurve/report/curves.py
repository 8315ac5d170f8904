"""The curves of a page, with their order and names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oncurve.observe.metrics import GLOSSARY, explain
from oncurve.report.blocks import finite

PANELS: tuple[dict[str, Any], ...] = (
    {
        "title": "Reward",
        "lines": [
            {"key": "reward/mean", "name": "reward, training"},
            {
                "key": "evaluation/mean_reward",
                "name": "reward, held-out",
                "low": "evaluation/mean_reward_low",
                "high": "evaluation/mean_reward_high",
                "unless_equal_to": "evaluation/correct_fraction",
            },
            {"key": "reward/correct", "name": "correct, training"},
            {
                "key": "evaluation/correct_fraction",
                "name": "correct, held-out",
                "low": "evaluation/correct_low_fraction",
                "high": "evaluation/correct_high_fraction",
            },
        ],
        "note": "Held-out values with their 95% intervals. Training rising while held-out stays flat is overfitting or "
        "reward hacking.",
    },
    {
        "title": "KL and mismatch",
        "lines": [
            {"key": "policy/kl", "name": "KL to the reference"},
            {"key": "mismatch/kl", "name": "sampler against trainer"},
        ],
        "zero": True,
        "least": 0.001,
        "note": "In nats. The reference KL rises slowly in a healthy run; a mismatch above 0.001 means that sampler "
        "and trainer disagree about the same weights.",
    },
    {
        "title": "Completion length",
        "lines": [{"key": "completion/mean_tokens", "name": "mean tokens"}],
        "band": ["completion/min_tokens", "completion/max_tokens", "shortest to longest"],
        "zero": True,
        "note": "A jump to the token limit, or to a few tokens, is a collapse.",
    },
    {
        "title": "Gradient norm and loss",
        "lines": [
            {"key": "policy/gradient_norm", "name": "gradient norm"},
            {"key": "policy/loss", "name": "loss"},
            {"key": "sft/loss", "name": "loss on demonstrations"},
        ],
        "note": "Spikes of the norm ask for a lower learning rate. On policy the loss is about 0 whatever is learned: "
        "no measure of progress.",
    },
    {
        "title": "Signal in the groups",
        "lines": [
            {"key": "group/zero_signal_fraction", "name": "without signal"},
            {"key": "group/solved_fraction", "name": "all correct"},
            {"key": "group/unsolved_fraction", "name": "none correct"},
        ],
        "note": "Shares of the groups. Equal rewards teach nothing: near 1 the prompts are too easy or too hard.",
    },
    {
        "title": "Reward between and inside groups",
        "lines": [
            {"key": "reward/mean", "name": "mean"},
            {"key": "group/std_mean", "name": "deviation inside a group"},
        ],
        "band": ["group/mean_min", "group/mean_max", "group means, lowest to highest"],
        "note": "Advantages are made of the deviation inside a group, not of the spread of the batch.",
    },
    {
        "title": "Entropy",
        "lines": [{"key": "policy/entropy", "name": "nats per token"}],
        "zero": True,
        "note": "Falls slowly; near 0 the completions of a group have become the same.",
    },
    {
        "title": "Form, truncation, errors",
        "lines": [
            {"key": "reward/format", "name": "required form"},
            {"key": "completion/truncated_fraction", "name": "cut off"},
            {"key": "reward/error_fraction", "name": "not gradable"},
        ],
        "note": "Shares of the completions. Form alone rising means that only the form is learned.",
    },
    {
        "title": "Turns and calls",
        "lines": [
            {"key": "episode/turns", "name": "turns"},
            {"key": "episode/calls", "name": "calls of tools"},
        ],
        "zero": True,
        "note": "Means over the completions. No calls at all teach nothing about calling.",
    },
    {
        "title": "Calls and episodes that fail",
        "lines": [
            {"key": "episode/tool_errors", "name": "calls answered with an error"},
            {"key": "episode/malformed_calls", "name": "calls that cannot be read"},
            {"key": "episode/ended/turns", "name": "episodes out of turns"},
            {"key": "episode/failed_fraction", "name": "environments failed"},
        ],
        "zero": True,
        "note": "Shares of the calls, and of the completions. A failed environment leaves a completion ungraded.",
    },
    {
        "title": "Waiting for tools",
        "lines": [
            {"key": "time/tools_seconds", "name": "mean, seconds"},
            {"key": "time/tools_max_seconds", "name": "longest, seconds"},
        ],
        "zero": True,
        "note": "Per completion. Sampling of the others continues meanwhile; a step waits for its slowest completion.",
    },
    {
        "title": "Tokens per second",
        "lines": [
            {"key": "speed/sampled_tokens_per_second", "name": "sampling"},
            {"key": "speed/trained_tokens_per_second", "name": "training"},
            {"key": "speed/tokens_per_second", "name": "whole step"},
        ],
        "zero": True,
        "note": "Each over the seconds of its own phase.",
    },
)
"""The first four are what a run is judged by; the rest explains them."""


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Rows of ``read_metrics`` as one list per key, None where a step has no finite value; "step" is one of them."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return {key: [_short(row.get(key)) for row in rows] for key in keys}


def glossary(keys: Iterable[str]) -> dict[str, list[str]]:
    """Unit, meaning and healthy range of the keys that somebody has explained."""
    found = {key: explain(key) for key in keys if key != "step"}
    return {key: [metric.unit, metric.meaning, metric.healthy] for key, metric in found.items() if metric is not None}


def key_groups() -> list[str]:
    """The groups of keys, in the order of the glossary."""
    return list(dict.fromkeys(metric.key.split("/")[0] for metric in GLOSSARY))


def _short(value: Any) -> float | None:
    number = finite(value)
    return number if number is None or isinstance(number, int) else float(f"{number:.6g}")
