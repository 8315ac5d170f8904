"""The curves of a page, with their order and names."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from statistics import fmean
from typing import Any

from oncurve.observe.columns import Columns
from oncurve.observe.metrics import GLOSSARY, explain

PANELS: tuple[dict[str, Any], ...] = (
    {
        "title": "Reward",
        "lines": [
            {"key": "reward/mean", "name": "reward, training"},
            {
                "key": "evaluation/mean_reward",
                "name": "reward, validation",
                "low": "evaluation/mean_reward_low",
                "high": "evaluation/mean_reward_high",
                "unless_equal_to": "evaluation/correct_fraction",
            },
            {"key": "reward/correct", "name": "correct, training"},
            {
                "key": "evaluation/correct_fraction",
                "name": "correct, validation",
                "low": "evaluation/correct_low_fraction",
                "high": "evaluation/correct_high_fraction",
            },
        ],
        "note": "Validation with its 95% intervals. Training rising while validation stays flat is overfitting or "
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


MOST_POINTS = 2000
"""More steps than this are drawn in blocks: no screen is as wide."""
ALONG = {"hours": (("time/step_seconds", "time/evaluate_seconds"), 3600), "M tokens": (("tokens/sampled",), 1e6)}
"""Horizontal axes besides steps: sums of metrics, and their unit."""


class CurveTable:
    """The metrics of a run as a page draws them: one value per step or, of a long run, per block of steps.

    A block ends with a step that ``size`` divides; the first step, 0, is one of its own. Of its values a page gets the
    mean, the lowest and the highest.
    """

    def __init__(self, columns: Columns, size: int) -> None:
        self.size, self.keys = size, columns.keys
        ends = sorted({-(-step // size) * size for step in columns.steps})
        self._last_steps = [min(end, columns.steps[-1]) for end in ends]
        self._drawn: dict[str, array[float]] = {}
        self._spread: dict[str, tuple[array[float], array[float]]] = {}
        self._ends: dict[str, tuple[float, float]] = {}
        for key in columns.keys:
            parts = self._parts(columns, key)
            self._drawn[key] = _per_run(fmean, parts)
            if size > 1:
                self._spread[key] = _per_run(min, parts), _per_run(max, parts)
            if there := [part for part in parts if part]:
                self._ends[key] = there[0][0], there[-1][-1]
        self._along: dict[str, array[float]] = {}
        for name, (keys, unit) in ALONG.items():
            by_block = zip(*(self._parts(columns, key) for key in keys), strict=True)
            self._along[name] = array("d", accumulate(math.fsum(chain(*values)) / unit for values in by_block))

    def _parts(self, columns: Columns, key: str) -> list[list[float]]:
        """The finite values of a metric by block."""
        steps, values = columns.finite(key)
        ends = [bisect_right(steps, last) for last in self._last_steps]
        return [values[start:end] for start, end in pairwise([0, *ends])]

    def curve(self, key: str) -> list[float]:
        """A metric as it is drawn, without gaps."""
        return [value for value in self._drawn.get(key, ()) if not math.isnan(value)]

    def last(self, key: str) -> float | None:
        """The last finite value of a metric."""
        return self._ends[key][1] if key in self._ends else None

    def as_json(self) -> dict[str, Any]:
        """The data of the page: None where a block has no value, about six digits of the others."""
        return {
            "size": self.size,
            "step": self._last_steps,
            "along": {name: _short(values) for name, values in self._along.items()},
            "columns": {key: _short(values) for key, values in self._drawn.items()},
            "spread": {key: [_short(end) for end in ends] for key, ends in self._spread.items()},
            "ends": {key: _short(values) for key, values in self._ends.items()},
        }


def block_size(runs: Iterable[Columns]) -> int:
    """Steps per point, the same for all runs of a page: 1, or a round number that leaves them about 2,000."""
    long = [columns.steps[-1] for columns in runs if len(columns.steps) > MOST_POINTS]
    sizes = (digit * 10**power for power in range(18) for digit in (1, 2, 5))
    return next(size for size in sizes if max(long, default=0) / size <= MOST_POINTS)


def glossary(keys: Iterable[str]) -> dict[str, list[str]]:
    """Unit, meaning and healthy range of the keys that somebody has explained."""
    metrics = {key: explain(key) for key in keys if key != "step"}
    return {key: [metric.unit, metric.meaning, metric.healthy] for key, metric in metrics.items() if metric is not None}


def key_groups() -> list[str]:
    """The groups of keys, in the order of the glossary."""
    return list(dict.fromkeys(metric.key.split("/")[0] for metric in GLOSSARY))


def _per_run(measure: Callable[[Sequence[float]], float], parts: Iterable[Sequence[float]]) -> array[float]:
    return array("d", [measure(part) if part else math.nan for part in parts])


def _short(values: Iterable[float]) -> list[float | None]:
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values]
