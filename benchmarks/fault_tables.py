"""What does the committed record of faults say? The table of docs/reliability.md.

python benchmarks/fault_tables.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pages import filled

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs" / "reliability.md", ROOT / "benchmarks" / "results" / "faults.json"
GROUPS: tuple[tuple[str, str], ...] = (
    (r"SIGKILL before .* of a checkpoint", "SIGKILL before the data, the manifest, the rename of a checkpoint"),
    (r"SIG(TERM|INT|USR1) ", "SIGTERM, SIGINT, SIGUSR1 in each phase; SIGTERM twice"),
    (r"(SIGKILL in .*), \d+ of \d+", r"\1"),
    (r"newest checkpoint: ", "newest checkpoint damaged in five ways"),
    (r"resumed with another ", "resumed with another group size, data set, rate, number of processes: refused"),
    (r"\d+ losses that are not finite", "one loss that is no number; many of them"),
)


def group_of(name: str) -> str:
    """The row of the table to which a scenario belongs."""
    for pattern, row in GROUPS:
        if found := re.match(pattern, name):
            return found.expand(row).replace("in between", "between")
    return name


def noticed(found: Iterable[float | None]) -> str:
    values = [value for value in found if value is not None]
    return f"{max(values):.1f}" if values else "-"


def recovered(found: Iterable[float | None]) -> str:
    values = [value for value in found if value is not None]
    return f"{median(values):.1f}, {max(values):.1f}" if values else "-"


def line(row: str, scenarios: Sequence[dict[str, Any]]) -> str:
    """One row: all scenarios of a group together."""
    compared = [one["is_bitwise_equal"] for one in scenarios if one["is_bitwise_equal"] is not None]
    cells = (
        row,
        f"{len(scenarios)} ({sum('two processes' in one['variant'] for one in scenarios)})",
        str(sum(one["has_passed"] for one in scenarios)),
        f"{sum(compared)} of {len(compared)}" if compared else "-",
        noticed(one["detect_seconds"] for one in scenarios),
        recovered(one["recover_seconds"] for one in scenarios),
        str(max(one["steps_redone"] for one in scenarios)),
    )
    return f"| {' | '.join(cells)} |\n"


def table(scenarios: Sequence[dict[str, Any]]) -> str:
    """All scenarios, kinds of the same together, in the order in which they first came."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in scenarios:
        rows.setdefault(group_of(one["scenario"]), []).append(one)
    head = (
        "| struck | times (two processes) | passed | bitwise equal | noticed within, s "
        "| works again after, s: median, longest | steps redone, at most |\n|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(line(row, members) for row, members in rows.items())


def main() -> None:
    scenarios = json.loads(RECORD.read_text(encoding="utf-8"))["scenarios"]
    PAGE.write_text(filled(PAGE, {"faults": table(scenarios)}), encoding="utf-8")


if __name__ == "__main__":
    main()
