"""A comparison of runs as terminal tables and as one HTML page."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from oncurve import __version__
from oncurve.observe.record import write_pieces
from oncurve.report.blocks import pack
from oncurve.report.comparing import Cell, RunComparison
from oncurve.report.curves import columns
from oncurve.report.page import pieces

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def comparison_tables(compared: RunComparison) -> list[Table]:
    """The results, and the differences of the recipes if there are any."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def table(title: str, first: str) -> Table:
        made = Table(title=Text(title, style="bold"), box=box.SIMPLE_HEAD, show_edge=False, title_justify="left")
        made.add_column(Text(first))
        for side in compared.sides:
            made.add_column(Text(side.name), justify="right", overflow="fold")
        return made

    results = table("runs side by side", "")
    for name, cells in compared.rows:
        results.add_row(Text(name), *(_text(cell) for cell in cells))
    if not compared.differences:
        return [results]
    differences = table("differences of the recipes", "key")
    for key, values in compared.differences:
        differences.add_row(Text(key), *map(Text, values))
    return [results, differences]


def write_comparison(compared: RunComparison, output: Path) -> Path:
    """The comparison with all curves as one HTML file that needs nothing else."""
    boot = {
        "kind": "compare",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "runs": [{"name": side.name} for side in compared.sides],
        "rows": [
            {"name": name.strip(), "cells": [{"text": cell.text, "more": cell.more} for cell in cells]}
            for name, cells in compared.rows
        ],
        "differences": [{"key": key, "values": list(values)} for key, values in compared.differences],
        "notes": list(compared.notes),
    }
    blocks = {f"metrics-{place}": pack(columns(side.rows)) for place, side in enumerate(compared.sides)}
    write_pieces(output, pieces(" · ".join(side.name for side in compared.sides), boot, blocks=blocks))
    return output


def _text(cell: Cell) -> Text:
    from rich.text import Text

    more = f"\n{cell.more}" if cell.more else ""
    return Text.assemble(cell.text, (more, "dim"))
