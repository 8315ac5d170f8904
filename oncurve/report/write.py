"""Contents of a report, and writing it as one file."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oncurve import __version__
from oncurve.observe.record import read_metrics, write_pieces
from oncurve.report.blocks import TEXT_BUDGET, TOKEN_BUDGET, Blocks, make_blocks, pack
from oncurve.report.curves import PANELS, columns, glossary, key_groups
from oncurve.report.examples import example_groups, packed_examples
from oncurve.report.overview import overview
from oncurve.report.page import pieces

REPORT = "report.html"
"""The name of the report in a run folder."""


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a report."""

    path: Path
    num_bytes: int
    recorded_steps: int
    """Steps whose rollouts are in the run folder."""
    shown_steps: int
    """Of these, the steps that are in the page."""


def write_report(
    run: Path,
    output: Path | None = None,
    *,
    usd_per_hour: float | None = None,
    text_budget: int = TEXT_BUDGET,
    token_budget: int = TOKEN_BUDGET,
) -> Written:
    """The report of a run as one HTML file that needs nothing else; ``report.html`` in its folder if not told where.

    What does not fit into the budgets is left out evenly, and the page says what.

    Raises DataError if there is no run or a file of it is broken; OSError if the page cannot be written.
    """
    told = overview(run, usd_per_hour=usd_per_hour)
    rows = read_metrics(run)
    table = columns(rows)
    blocks = make_blocks(run, text_budget=text_budget, token_budget=token_budget)
    groups = example_groups(run)
    embedded = {"metrics": pack(table)}
    left_out = _left_out(blocks)
    if groups:
        embedded["examples"], fitted = packed_examples(groups)
        if fitted < len(groups):
            left_out.append(f"{len(groups) - fitted:,} of {len(groups):,} held-out examples")
    embedded |= {f"step-{step}": packed for step, packed in blocks.texts.items()}
    embedded |= {f"tokens-{step}": packed for step, packed in blocks.tokens.items()}
    boot = {
        "kind": "run",
        "mode": "file",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "overview": told,
        "steps": sorted(blocks.texts),
        "token_steps": sorted(blocks.tokens),
        "recorded": len(blocks.recorded),
        "num_examples": len(groups),
        "left_out": left_out,
        **page_constants(list(table)),
    }
    path = output if output is not None else run / REPORT
    write_pieces(path, pieces(f"{told['name']} · oncurve", boot, blocks=embedded))
    return Written(path, path.stat().st_size, len(blocks.recorded), len(blocks.texts))


def page_constants(keys: list[str]) -> dict[str, Any]:
    """What every page with curves needs to know about its metrics."""
    return {
        "panels": PANELS,
        "glossary": glossary(keys),
        "key_groups": key_groups(),
    }


def _left_out(blocks: Blocks) -> list[str]:
    """What a reader might miss, in words."""
    told: list[str] = []
    if missing := len(blocks.recorded) - len(blocks.texts):
        told.append(f"completions of {missing:,} of {len(blocks.recorded):,} recorded steps (evenly chosen)")
    if missing := blocks.with_tokens - len(blocks.tokens):
        told.append(f"log-probabilities of tokens of {missing:,} of {blocks.with_tokens:,} steps")
    return told
