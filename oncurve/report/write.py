"""Contents of a report, and writing it as one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oncurve import __version__
from oncurve.doctor.read import read_case
from oncurve.observe.columns import Columns
from oncurve.observe.record import write_pieces
from oncurve.report.blocks import TEXT_BUDGET, TOKEN_BUDGET, Blocks, make_blocks, pack
from oncurve.report.curves import PANELS, CurveTable, block_size, glossary, key_groups
from oncurve.report.examples import example_groups, packed_examples
from oncurve.report.overview import overview
from oncurve.report.page import pieces

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
    case = read_case(run)
    table = CurveTable(case.columns, block_size([case.columns]))
    return Reading(overview(run, case, usd_per_hour=usd_per_hour), case.columns, table, case.config)


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
            left_out.append(f"{len(groups) - fitted:,} of {len(groups):,} held-out examples")
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
