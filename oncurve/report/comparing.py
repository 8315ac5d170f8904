"""Comparison of runs: their numbers with intervals, and the differences between their recipes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from oncurve import __version__
from oncurve.observe.record import json_if_there, write_pieces
from oncurve.report.curves import CurveTable, block_size
from oncurve.report.page import pack, pieces

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from oncurve import tables
from oncurve.core.errors import ConfigError, DataError
from oncurve.doctor.case import read_case
from oncurve.evaluate.compare import compare
from oncurve.evaluate.evaluation import Evaluation, RewardChange, read_evaluation
from oncurve.observe.columns import Columns
from oncurve.observe.manifest import commit_text
from oncurve.observe.metrics import metric
from oncurve.recipe.load import flat
from oncurve.report.overview import overview
from oncurve.stats import bootstrap_interval
from oncurve.wording import decimals, duration, interval, p_text, percent, points, signed_decimals, signed_points, whole

OWN_KEYS = ("run.name", "run.folder")
"""Keys in which two runs always differ."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of one run, with its interval or what else belongs to it."""

    text: str
    more: str = ""


@dataclass(frozen=True)
class Side:
    """One of the runs."""

    name: str
    path: Path
    metrics: Columns
    facts: Mapping[str, Any]
    """Its facts from ``overview``."""
    config: Mapping[str, str]
    """The resolved recipe, flat: key with dots to value."""
    evaluations: Mapping[str, Evaluation]
    """The evaluations of "base" and "trained" that exist."""


Row = tuple[str, Callable[[Side], Cell]]
"""A number of every run: its name, and how it is found."""


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side; the first is the one that the others are measured against."""

    sides: Sequence[Side]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    differences: Sequence[tuple[str, Sequence[str]]]
    """Keys of the recipe and the value that each run has."""
    notes: Sequence[str] = field(default=())
    """Notes on the numbers for the reader."""


def compare_runs(runs: Sequence[Path], *, usd_per_hour: float | None = None) -> RunComparison:
    """The runs side by side.

    Accuracies have the intervals of their measurement; the difference from the first run is paired, since both answered
    the same problems, and is not given where they did not. Raises ConfigError for fewer than two runs; DataError if
    one of them is none.
    """
    if len(runs) < 2:
        raise ConfigError("compare: name at least two run folders, such as `oncurve compare runs/a runs/b`.")
    if again := [
        run for index, run in enumerate(runs) if run.resolve() in [earlier.resolve() for earlier in runs[:index]]
    ]:
        raise ConfigError(f"compare: {again[0]} is named twice.")
    sides = [_side(run, name, usd_per_hour) for run, name in zip(runs, _names(runs), strict=True)]
    notes = [
        "Test problems: 95% intervals. The difference from the first run is paired (McNemar's exact test, or sign "
        "flips over prompts with several completions each).",
        "Last tenth: mean over the last tenth of the steps. Its interval takes steps as independent, which they are "
        "not quite, and says nothing about other seeds: compare several seeds before believing a small difference.",
    ]
    rows = [(name, [cell(side) for side in sides]) for name, cell in _ROWS]
    reasons: dict[str, list[str]] = {}
    rows[3:3] = [("  difference from the first", [_against(sides[0], side, reasons) for side in sides])]
    notes += [f"Not compared with {sides[0].name}: {', '.join(names)}. {why}" for why, names in reasons.items()]
    filled = [(name, cells) for name, cells in rows if any(cell.text not in ("", "-") for cell in cells)]
    return RunComparison(sides, filled, _differences(sides), tuple(notes))


def _names(runs: Sequence[Path]) -> list[str]:
    """The folders' names; with their parents' where two are the same."""
    short = [run.resolve().name for run in runs]
    if len(set(short)) == len(short):
        return short
    return ["/".join(run.resolve().parts[-2:]) for run in runs]


def _side(run: Path, name: str, usd_per_hour: float | None) -> Side:
    case = read_case(run)
    facts = overview(run, case, usd_per_hour=usd_per_hour)
    folder = run / "evaluations"
    names = [kind for kind in ("base", "trained") if (folder / f"{kind}.json").is_file()]
    config = {key: _written(value) for key, value in flat(case.config)}
    return Side(name, run, case.columns, facts, config, {kind: read_evaluation(folder, kind) for kind in names})


def _state(side: Side) -> Cell:
    planned = side.facts["steps_planned"]
    return Cell(f"{side.facts['steps_done']}{f' of {planned:.0f}' if planned else ''}", side.facts["state"]["name"])


def _measured(name: str) -> Callable[[Side], Cell]:
    def cell(side: Side) -> Cell:
        if name not in side.evaluations:
            return Cell("-")
        if not side.evaluations[name].is_binary:
            mean = side.evaluations[name].mean_reward
            return Cell(f"reward {decimals(mean.value)}", interval(mean.low, mean.high, decimals))
        share = side.evaluations[name].correct
        return Cell(percent(share.fraction), interval(share.low, share.high, points))

    return cell


def _against(first: Side, side: Side, reasons: dict[str, list[str]]) -> Cell:
    if side is first or "trained" not in side.evaluations or "trained" not in first.evaluations:
        return Cell("-")
    try:
        before, after = (_without_seed(pair_side.evaluations["trained"]) for pair_side in (first, side))
        compared = compare(before, after)
    except DataError as error:
        reasons.setdefault(f"They cannot be paired: {error}", []).append(side.name)
        return Cell("-")
    if not compared.is_binary and rewards_of(first) != rewards_of(side):
        reasons.setdefault("They have other rewards, so that means say nothing.", []).append(side.name)
        return Cell("-")
    row = compared.rows[0] if compared.is_binary else compared.reward
    is_reward = isinstance(row, RewardChange)
    form = signed_decimals if is_reward else signed_points
    change, ends = form(row.change), interval(row.low, row.high, form)
    return Cell(f"reward {change}" if is_reward else f"{change} points", f"{ends} {p_text(row.p_value, before='p')}")


def rewards_of(side: Side) -> dict[str, str]:
    """The recipe's section on rewards, flat."""
    return {key: value for key, value in side.config.items() if key.split(".")[0] == "rewards"}


def _without_seed(evaluation: Evaluation) -> Evaluation:
    """Runs of several seeds are measured with other random numbers, which is no other way of decoding."""
    return replace(evaluation, params={key: value for key, value in evaluation.params.items() if key != "seed"})


def _held_out(side: Side) -> Cell:
    keys = [f"evaluation/correct_{name}fraction" for name in ("", "low_", "high_")]
    ends, lows, highs = (dict(zip(*side.metrics.finite(key), strict=True)) for key in keys)
    measured = ends.keys() & lows.keys() & highs.keys()
    step = max(measured, default=0)
    if step == 0:  # what the base could do is another row
        return Cell("-")
    return Cell(percent(ends[step]), f"{interval(lows[step], highs[step], points)} at step {step}")


def _last_tenth(key: str, *, name: str = "", form: Callable[[float], str] | None = None) -> Row:
    """The row of a metric, under its label in the glossary and in its form there unless others are given."""
    entry = metric(key)
    form = form or entry.text

    def cell(side: Side) -> Cell:
        values = side.metrics.values(key)
        if not values:
            return Cell("-")
        tail = values[-max(1, len(values) // 10) :]
        if len(tail) < 3:
            return Cell(form(fmean(tail)), "")
        low, high = bootstrap_interval(tail, seed=0)
        return Cell(form(fmean(tail)), interval(low, high, form))

    return f"{name or entry.label.partition(',')[0]}, last tenth", cell


def _seconds_per_step(side: Side) -> Cell:
    values = side.metrics.values("time/step_seconds")
    if not values:
        return Cell("-")
    low, high = bootstrap_interval(values, seed=0)
    return Cell(f"{fmean(values):.3g}", f"[{low:.3g}, {high:.3g}]")


def _memory(side: Side) -> Cell:
    most = [(max(v), name) for name in ("gpu", "process") if (v := side.metrics.values(f"memory/{name}_gib"))]
    return Cell(f"{most[0][0]:.2f} GiB", most[0][1]) if most else Cell("-")


def _cost(side: Side) -> Cell:
    usd = side.facts["spent"]["usd"]
    return Cell("-") if usd is None else Cell(f"{usd:.2f} USD")


def _doctor(side: Side) -> Cell:
    severities = [finding["severity"] for finding in side.facts["findings"]]
    counted = [f"{count} {name}" for name in ("severe", "warning") if (count := severities.count(name))]
    return Cell(", ".join(counted) or "nothing severe")


def _code(side: Side) -> Cell:
    commit, _, changes = commit_text(json_if_there(side.path / "manifest.json")).partition(" ")
    return Cell(commit or "-", changes)


_ROWS: tuple[Row, ...] = (
    ("steps done", _state),
    ("test problems, before", _measured("base")),
    ("test problems, after", _measured("trained")),
    ("validation, last measurement", _held_out),
    _last_tenth("reward/mean"),
    _last_tenth("reward/correct"),
    _last_tenth("completion/mean_tokens"),
    _last_tenth("completion/truncated_fraction"),
    _last_tenth("group/zero_signal_fraction"),
    _last_tenth("policy/entropy", name="entropy in nats"),
    _last_tenth("policy/kl"),
    _last_tenth("mismatch/kl"),
    ("seconds per step", _seconds_per_step),
    _last_tenth("speed/tokens_per_second", form=whole),
    ("time in all", lambda side: Cell(duration(side.facts["spent"]["elapsed_seconds"]))),
    ("tokens sampled", lambda side: Cell(f"{side.facts['spent']['sampled_tokens']:,.0f}")),
    ("most memory", _memory),
    ("cost", _cost),
    ("doctor", _doctor),
    ("device", lambda side: Cell(str(side.facts["spent"]["device"]))),
    ("commit", _code),
)


def _differences(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    keys = sorted({key for side in sides for key in side.config} - set(OWN_KEYS))
    values_by_key = [(key, [side.config.get(key, "not there") for side in sides]) for key in keys]
    return [(key, values) for key, values in values_by_key if len(set(values)) > 1]


def _written(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


MOST_COLUMNS = 6
"""More runs than this stand below each other, with the rows that fit."""
_IN_SHORT = (
    "test problems, before",
    "test problems, after",
    "difference from the first",
    "reward, last tenth",
    "doctor",
)


def comparison_tables(compared: RunComparison, width: int) -> Iterator[Table]:
    """The results, and the differences of the recipes if there are any; many runs stand below each other.

    What is wider than a terminal of ``width`` characters comes in parts, each with the first run.
    """
    if len(compared.sides) > MOST_COLUMNS:
        yield from _short_table(compared, width)
        return
    names = [side.name for side in compared.sides]
    rows = [(name, *map(_text, cells)) for name, cells in compared.rows]
    differences = [(key, *values) for key, values in compared.differences]
    yield from tables.in_parts("runs side by side", ["", *names], rows, width, num_fixed=2)
    if differences:
        yield from tables.in_parts("differences of the recipes", ["key", *names], differences, width, num_fixed=2)


def _short_table(compared: RunComparison, width: int) -> Iterator[Table]:
    """A row per run, with what matters most and the keys in which the recipes differ."""
    rows = {name.strip(): cells for name, cells in compared.rows}
    names = [name for name in _IN_SHORT if name in rows]
    heads = ["run", *names, *(key for key, _ in compared.differences)]
    cells = (
        [side.name, *(rows[name][index].text for name in names), *(values[index] for _, values in compared.differences)]
        for index, side in enumerate(compared.sides)
    )
    return tables.in_parts("runs", heads, cells, width, num_fixed=1, right=False)


def comparison_page(
    compared: RunComparison, *, home: str | None = None, recipes: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """The comparison with all curves as one page that needs nothing else, in parts; ``home`` is where it leads back.

    ``recipes`` is what ``seeds.recipes_block`` says of runs that differ in their seed alone.
    """
    boot = {
        "kind": "compare",
        "home": home,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "runs": [{"name": side.name} for side in compared.sides],
        "rows": [
            {
                "name": name.strip(),
                "is_short": name.strip() in _IN_SHORT,
                "cells": [{"text": cell.text, "more": cell.more} for cell in cells],
            }
            for name, cells in compared.rows
        ],
        "differences": [{"key": key, "values": list(values)} for key, values in compared.differences],
        "notes": list(compared.notes),
        "recipes": recipes,
    }
    size = block_size(side.metrics for side in compared.sides)
    curves = (CurveTable(side.metrics, size).as_json() for side in compared.sides)
    blocks = {f"metrics-{index}": pack(curve) for index, curve in enumerate(curves)}
    return pieces(" · ".join(side.name for side in compared.sides), boot, blocks=blocks)


def write_comparison(compared: RunComparison, output: Path, *, recipes: Mapping[str, Any] | None = None) -> Path:
    """That page as a file."""
    write_pieces(output, comparison_page(compared, recipes=recipes))
    return output


def _text(cell: Cell) -> Text:
    from rich.text import Text

    more = f"\n{cell.more}" if cell.more else ""
    return Text.assemble(cell.text, (more, "dim"))
