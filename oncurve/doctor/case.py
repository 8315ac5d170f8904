"""The input of the checks, a run's curves, recipe and evaluations, read from its folder, complete or not; and what
they give, findings with evidence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, get_args

import yaml

from oncurve.core.errors import DataError
from oncurve.observe.columns import Columns, read_columns
from oncurve.observe.record import (
    METRICS,
    nearest_runs,
    parse_yaml,
    read_json,
    read_rows,
    recorded_steps,
    rollouts_path,
)
from oncurve.rewards.settings import Reward as AnyReward

Severity = Literal["severe", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("severe", "warning", "note")
"""Worst first: severe spoils the run, a warning costs something, a note is worth knowing."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that a finding rests on.

    Example: ``Evidence("group/zero_signal_fraction", 0.94, (10, 12))``
    """

    key: str
    """A metric of the glossary, or a key of the recipe."""
    value: float | str
    """The mean of the metric over the steps, or the key's value."""
    steps: tuple[int, int] | None = None
    """First and last step, counted as steps done; None for what does not belong to steps."""

    def __str__(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else self.value
        if self.steps is None:
            return f"{self.key} = {value}"
        first, last = self.steps
        return f"{self.key} = {value} ({f'step {last}' if first == last else f'steps {first} to {last}'})"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a person should know about a run.

    Example: ``Finding(severity="severe", what="Every completion earns the same reward, so nothing can be learned",
    evidence=(Evidence("reward/std", 0.0, (1, 12)),), do="Look at the reward function.", check="reward_constant")``
    """

    severity: Severity
    what: str
    """The state of affairs, in one sentence without its full stop."""
    evidence: tuple[Evidence, ...]
    do: str
    """The remedy."""
    check: str = ""
    """Name of the check, filled in by the diagnosis."""
    follows: str | None = None
    """Name of the finding that probably causes this one; None if it is on its own."""

    def as_json(self) -> dict[str, Any]:
        """The finding as one JSON object."""
        evidence = [
            {"key": item.key, "value": item.value, "steps": None if item.steps is None else list(item.steps)}
            for item in self.evidence
        ]
        plain = {"check": self.check, "severity": self.severity, "what": self.what, "evidence": evidence}
        return {**plain, "do": self.do, "follows": self.follows}


MIN_WINDOW_STEPS, MAX_WINDOW_STEPS = 3, 20
"""Start and end of a curve are a fifth of its steps, but at least and at most so many."""


@dataclass(frozen=True)
class Curve:
    """The finite values of one metric, in the order of the steps."""

    key: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def window(self) -> int:
        """Number of values in the start and in the end of a curve."""
        return min(max(MIN_WINDOW_STEPS, len(self) // 5), MAX_WINDOW_STEPS, len(self))

    @property
    def has_two_ends(self) -> bool:
        """Start and end have no step in common."""
        return len(self) >= 2 * self.window and len(self) > MIN_WINDOW_STEPS

    @property
    def start(self) -> float:
        """Mean over the first window; NaN for an empty curve."""
        return fmean(self.values[: self.window]) if self.values else math.nan

    @property
    def end(self) -> float:
        """Mean over the last window; NaN for an empty curve."""
        return fmean(self.values[-self.window :]) if self.values else math.nan

    @property
    def mean(self) -> float:
        """Mean over all steps; NaN for an empty curve."""
        return fmean(self.values) if self.values else math.nan

    @property
    def median(self) -> float:
        """Median over all steps; NaN for an empty curve."""
        return median(self.values) if self.values else math.nan

    @property
    def best(self) -> tuple[int, float]:
        """Place and value of the highest mean over a window; (0, NaN) for an empty curve."""
        width = self.window
        means = [(fmean(self.values[k : k + width]), -k) for k in range(len(self) - width + 1)] if width else []
        value, index = max(means, default=(math.nan, 0))
        return -index, value

    def at_start(self) -> Evidence:
        """The start as evidence."""
        return Evidence(self.key, self.start, (self.steps[0], self.steps[self.window - 1]))

    def at_end(self) -> Evidence:
        """The end as evidence."""
        return Evidence(self.key, self.end, (self.steps[-self.window], self.steps[-1]))

    def over_all(self) -> Evidence:
        """The whole curve as evidence."""
        return Evidence(self.key, self.mean, (self.steps[0], self.steps[-1]))

    def both_ends(self) -> tuple[Evidence, ...]:
        """Start and end as evidence; the whole curve where they overlap."""
        return (self.at_start(), self.at_end()) if self.has_two_ends else (self.over_all(),)

    def on(self, index: int) -> Evidence:
        """One value as evidence."""
        return Evidence(self.key, self.values[index], (self.steps[index], self.steps[index]))


@dataclass(frozen=True)
class Case:
    """Everything the doctor may look at; every part may be missing or incomplete."""

    metrics: Columns | Sequence[Mapping[str, Any]]
    """Columns of a file, or rows of ``read_metrics``; step 0 is the model before training."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved recipe; without it, checks that need a setting say nothing."""
    examples: Sequence[Mapping[str, Any]] = ()
    """Graded completions with their ``completion``, ``answer`` (the reference) and ``reward``, as evaluations keep."""
    between: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    """Reads the same of some steps between the first and the last of ``examples``."""
    compared: Mapping[str, Any] = field(default_factory=dict)
    """The comparison of base and trained model on the test problems (``comparison.json``); empty before the end."""
    lags: Mapping[int, int] = field(default_factory=dict)
    """Step to how many steps its oldest completion's weights lag behind; synchronous sampling has 0."""

    def curve(self, key: str) -> Curve:
        """A metric of the training steps; empty if it was never measured."""
        return self._curve(key, 1)

    def curves(self, prefix: str) -> list[Curve]:
        """All metrics of the training steps whose keys start so, by key."""
        curves = (self.curve(key) for key in sorted(self.columns.keys) if key.startswith(prefix))
        return [curve for curve in curves if curve]

    def validation(self, key: str) -> Curve:
        """A metric of the evaluations, the one before training included."""
        return self._curve(key, 0)

    def setting(self, key: str) -> Any:
        """A value of the recipe by its key with dots; None if it is not there."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    @property
    def pays_answers(self) -> bool:
        """Some reward of the recipe may look at answers; without a recipe, one may."""
        sections = get_args(get_args(AnyReward)[0])
        blind = {
            section.model_fields["type"].default for section in sections if section.is_form or section.is_of_episode
        }
        return any(reward.get("type") not in blind for reward in self.config.get("rewards") or [{}])

    def number(self, key: str) -> float:
        """A number of the recipe; NaN if it is not there or no number."""
        value = self.setting(key)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan

    def configured(self, key: str) -> tuple[Evidence, ...]:
        """A value of the recipe as evidence; nothing if it is not there."""
        value = self.setting(key)
        if value is None:
            return ()
        return (Evidence(key, float(value) if isinstance(value, float) else str(value)),)

    @cached_property
    def columns(self) -> Columns:
        """The metrics by key."""
        return self.metrics if isinstance(self.metrics, Columns) else Columns(self.metrics)

    @cached_property
    def _read(self) -> dict[tuple[str, int], Curve]:
        return {}

    def _curve(self, key: str, first_step: int) -> Curve:
        if (key, first_step) not in self._read:
            steps, values = self.columns.finite(key)
            start = bisect_left(steps, first_step)
            self._read[key, first_step] = Curve(key, tuple(steps[start:]), tuple(values[start:]))
        return self._read[key, first_step]


_EVALUATIONS = ("base", "trained")
_MAX_BYTES = 8 * 2**20
"""A larger file of completions is passed over: the doctor should answer at once."""
BETWEEN = 8
"""About so many steps between the first and the last are looked at, to see where something began."""


def read_case(run: str | Path) -> Case:
    """The case of a run folder, or of a file of metrics alone; also while the run continues.

    Completions are those of the evaluations before and after, and of the first and last step that were kept.

    Raises DataError if there are no metrics, or if a file that is there is broken.
    """
    folder = Path(run)
    if not folder.is_file() and not (folder / METRICS).is_file():
        raise DataError(f"{folder}: is no run folder, {METRICS} is missing. {nearest_runs(folder)}")
    if folder.is_file() and folder.suffix != ".jsonl":
        raise DataError(f"{folder}: is no run. {nearest_runs(folder)}")
    metrics = read_columns(folder)
    if not folder.is_dir():
        return Case(metrics)
    examples = [row for name in _EVALUATIONS for row in _rows(folder / "evaluations" / f"{name}.jsonl")]
    measured = set(metrics.steps)
    recorded = [(step, rollouts_path(folder, step)) for step in recorded_steps(folder) if step in measured]
    lags: dict[int, int] = {}
    for step, path in dict([*recorded[:1], *recorded[-1:]]).items():
        rolled = [{**row, "step": step} for row in _completions(path)]
        examples += rolled
        versions = [row["policy_version"] for row in rolled if isinstance(row["policy_version"], int)]
        if versions:  # a step, counted as done, trains weights that have seen one step less
            lags[step] = max(0, step - 1 - min(versions))

    def between() -> list[dict[str, Any]]:
        middle = recorded[1:-1][:: max(1, len(recorded) // BETWEEN)]
        return [{**row, "step": step} for step, path in middle for row in _completions(path)]

    path = folder / "comparison.json"
    compared = read_json(path) if path.is_file() else {}
    if not isinstance(compared.get("rows", []), list):
        raise DataError(f"{path}: its rows are no list. Restore or remove it.")
    config = read_config(folder)
    return Case(metrics, config=config, examples=examples, between=between, compared=compared, lags=lags)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return []
    return read_rows(path, may_be_torn=False)


def _completions(path: Path) -> Iterator[dict[str, Any]]:
    """The completions of a step in the shape of evaluation examples."""
    for group in _rows(path):
        answer = group.get("answer")
        for completion in group.get("completions") or ():
            reward, version = completion.get("reward"), completion.get("policy_version")
            example = {"completion": completion.get("text"), "answer": answer, "reward": reward}
            yield {**example, "prompt": group.get("prompt"), "policy_version": version}


def read_config(run: Path) -> Mapping[str, Any]:
    """The resolved recipe of a run as plain data, empty if it is not there; it was checked when the run started.

    Raises DataError if it cannot be read.
    """
    path = run / "config.yaml"
    if not path.is_file():
        return {}
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(
            f"{path}: cannot be read as YAML ({' '.join(str(error).split())}). Restore or remove it."
        ) from error
    return tree if isinstance(tree, dict) else {}
