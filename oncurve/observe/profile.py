"""Profile of a step: the time of each phase and of its parts, kept in ``profile.jsonl`` of the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from oncurve.observe.record import read_rows

PROFILE = "profile.jsonl"
"""In the run folder: a row for each step."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "sample": ("load", "prefill", "decode"),
    "grade": (),
    "refill": (),
    "train": ("old_reference", "forward", "backward", "optimizer"),
}
"""The phases of the loop, and the parts of them that are measured inside."""


@dataclass(frozen=True)
class Spent:
    """What a phase took."""

    seconds: float
    calls: int = 1
    tokens: int = 0


@dataclass(frozen=True)
class ProfileRow:
    """A phase over the steps of a run."""

    name: str
    is_part: bool
    """Of the phase above it."""
    spent: Spent
    """Medians over the steps."""
    share: float
    """Of the time of all phases."""


def write_step(run: Path, step: int, spent: Mapping[str, Spent]) -> None:
    """One step: what each phase and part took."""
    row = {"step": step, "phases": {name: asdict(each) for name, each in spent.items()}}
    with (run / PROFILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_profile(run: Path) -> list[ProfileRow]:
    """The phases; empty for a run without a profile.

    Medians leave out the first step of the run where there are three or more: it allocates and compiles. Of a step that
    was done twice, the later time counts.

    Raises DataError for a broken file.
    """
    if not (run / PROFILE).is_file():
        return []
    steps = {row["step"]: row["phases"] for row in read_rows(run / PROFILE) if "step" in row}
    kept = [steps[step] for step in sorted(steps)][1 if len(steps) > 2 else 0 :]
    found: dict[str, Spent] = {}
    for name in (name for phase, parts in PARTS.items() for name in (phase, *parts)):
        if values := [step[name] for step in kept if name in step]:
            seconds, calls, tokens = (median(value[key] for value in values) for key in ("seconds", "calls", "tokens"))
            found[name] = Spent(seconds, int(calls), int(tokens))
    whole = sum(found[name].seconds for name in PARTS if name in found)
    return [ProfileRow(name, name not in PARTS, each, each.seconds / (whole or 1.0)) for name, each in found.items()]


def profile_text(run: Path) -> str:
    """The profile of a run as a table for a terminal; empty if there is none."""
    rows = read_profile(run)
    if not rows:
        return ""
    lines = ["profile of a step", f"  {'phase':17s} {'seconds':>9s} {'share':>7s} {'calls':>7s} {'tokens':>9s}"]
    for row in rows:
        name, spent = f"  {row.name}" if row.is_part else row.name, row.spent
        tokens = f"{spent.tokens:,}" if spent.tokens else ""
        lines.append(f"  {name:17s} {spent.seconds:9.4f} {row.share:7.1%} {spent.calls:7d} {tokens:>9s}".rstrip())
    return "\n".join(lines)
