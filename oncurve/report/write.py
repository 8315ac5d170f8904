"""Contents of a report, test examples among them, and writing it as one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oncurve import __version__
from oncurve.doctor.case import read_case
from oncurve.observe.columns import Columns
from oncurve.observe.record import read_json, read_rows, write_pieces
from oncurve.report.curves import PANELS, CurveTable, block_size, glossary, key_groups
from oncurve.report.overview import overview, state
from oncurve.report.page import (
    TEXT_BUDGET,
    TOKEN_BUDGET,
    Blocks,
    episode_texts,
    finite,
    make_blocks,
    pack,
    pieces,
    shorten,
)

BUDGET = 3 * 2**20
"""Bytes of the packed examples in a page; the last ones are left out, and the page says so."""


def example_groups(run: Path) -> list[dict[str, Any]]:
    """One group per test problem, its completions labelled by the measurement, earlier ones first.

    Raises DataError if a file is broken.
    """
    groups: dict[tuple[Any, str], dict[str, Any]] = {}
    for name in _names(run):
        for row in read_rows(run / "evaluations" / f"{name}.jsonl", may_be_torn=False):
            key = (row.get("index"), str(row.get("question")))
            group = groups.setdefault(key, _group(row))
            group["completions"].append(_completion(name, row))
    return list(groups.values())


def packed_examples(groups: list[dict[str, Any]], *, budget: int = BUDGET) -> tuple[str, int]:
    """The packed groups and how many of them fitted."""
    count = len(groups)
    packed = pack(groups)
    while len(packed) > budget and count > 1:
        count = max(1, min(count - 1, int(count * budget / len(packed))))
        packed = pack(groups[:count])
    return packed, count


def _names(run: Path) -> list[str]:
    """Measurements whose examples are there, in the order of their steps."""
    summaries = [(path.stem, read_json(path)) for path in sorted((run / "evaluations").glob("*.json"))]
    with_rows = [(summary.get("step") or 0, name) for name, summary in summaries if _rows_of(run, name).is_file()]
    return [name for _, name in sorted(with_rows)]


def _rows_of(run: Path, name: str) -> Path:
    return run / "evaluations" / f"{name}.jsonl"


def _group(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": row.get("index"),
        "prompt": shorten(row.get("question")),
        "answer": shorten(row.get("answer")),
        "completions": [],
    }


def _completion(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    sample = row.get("sample") or 0
    fields = {
        "label": name if not sample else f"{name} {sample + 1}",
        "text": shorten(row.get("completion")),
        "tokens": row.get("num_tokens"),
        "end": row.get("finish_reason"),
        "reward": finite(row.get("reward")),
        "category": row.get("category"),
        "detail": shorten(row.get("detail"), 500),
        **episode_texts(row.get("episode") or {}),
    }
    return {key: value for key, value in fields.items() if value not in (None, "")}


REPORT = "report.html"
"""The name of the report in a run folder."""


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of writing a report."""

    path: Path
    num_bytes: int
    recorded_steps: int
    """Steps whose rollouts are in the run folder."""
    steps_in_page: int
    """Number of these steps that are in the page."""


def write_report(
    run: Path,
    output: Path | None = None,
    *,
    read: Reading | None = None,
    text_budget: int = TEXT_BUDGET,
    token_budget: int = TOKEN_BUDGET,
) -> Written:
    """The report of a run as one HTML file that needs nothing else; ``report.html`` in its folder by default. The
    budgets, and what was ``read`` already, are those of ``report_page``.

    Raises DataError if there is no run or a file of it is broken; OSError if the page cannot be written.
    """
    parts, blocks = report_page(run, read=read, text_budget=text_budget, token_budget=token_budget)
    path = output if output is not None else run / REPORT
    write_pieces(path, parts)
    return Written(path, path.stat().st_size, len(blocks.recorded), len(blocks.texts))


@dataclass(frozen=True, slots=True)
class Reading:
    """All that a page says of a run besides its completions."""

    facts: dict[str, Any]
    """The facts of ``overview``."""
    columns: Columns
    table: CurveTable
    config: Mapping[str, Any]
    """The resolved recipe."""


def read_run(run: Path, *, usd_per_hour: float | None = None) -> Reading:
    """A run's folder, its metrics read once. Raises DataError if there is no run, or a file of it is broken."""
    now = state(run)  # before its numbers: a run that ends meanwhile is finished only with its last ones
    case = read_case(run)
    table = CurveTable(case.columns, block_size([case.columns]))
    facts = {**overview(run, case, usd_per_hour=usd_per_hour), "state": now}
    return Reading(facts, case.columns, table, case.config)


def report_page(
    run: Path,
    *,
    read: Reading | None = None,
    usd_per_hour: float | None = None,
    text_budget: int = TEXT_BUDGET,
    token_budget: int = TOKEN_BUDGET,
    live: Mapping[str, Any] | None = None,
) -> tuple[Iterator[str], Blocks]:
    """The report of a run in parts of HTML, and its completions. What does not fit into the budgets is left out evenly,
    and the page says what. ``read`` is what ``read_run`` has found already.

    ``live`` is for a page of the dashboard, which loads itself again: its stamp, where the list of runs is, how often
    to ask, and the pages of other runs by their folders.
    """
    read = read or read_run(run, usd_per_hour=usd_per_hour)
    facts, table = read.facts, read.table
    if live is not None:
        pages = live["pages"]
        for stage in facts["stages"]:
            stage["href"] = None if stage["is_own"] else pages.get(stage["path"])
    blocks = make_blocks(run, text_budget=text_budget, token_budget=token_budget)
    groups = example_groups(run)
    embedded = {"metrics": pack(table.as_json())}
    left_out = _left_out(blocks)
    if groups:
        embedded["examples"], fitted = packed_examples(groups)
        if fitted < len(groups):
            left_out.append(f"{len(groups) - fitted:,} of {len(groups):,} test examples")
    embedded |= {f"step-{step}": packed for step, packed in blocks.texts.items()}
    embedded |= {f"tokens-{step}": packed for step, packed in blocks.tokens.items()}
    boot = {
        "kind": "run",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "live": live and {key: live[key] for key in ("stamp", "home", "every_seconds")},
        "overview": facts,
        "steps": sorted(blocks.texts),
        "token_steps": sorted(blocks.tokens),
        "recorded": len(blocks.recorded),
        "num_examples": len(groups),
        "left_out": left_out,
        "panels": PANELS,
        "glossary": glossary(table.keys),
        "key_groups": key_groups(),
    }
    title = f"{facts['name']} · oncurve"
    return pieces(title, boot, blocks=embedded, live=live is not None), blocks


def _left_out(blocks: Blocks) -> list[str]:
    """Parts that a reader might miss, in words."""
    left_out: list[str] = []
    if missing := len(blocks.recorded) - len(blocks.texts):
        left_out.append(f"completions of {missing:,} of {len(blocks.recorded):,} recorded steps (evenly chosen)")
    if missing := blocks.with_tokens - len(blocks.tokens):
        left_out.append(f"log-probabilities of tokens of {missing:,} of {blocks.with_tokens:,} steps")
    return left_out
