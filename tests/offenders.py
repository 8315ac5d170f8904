"""One assertion for a rule that many files must keep, with a message that lists everything that breaks it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def assert_none(offenders: Iterable[str]) -> None:
    """Fail with every offender on a line of its own, which begins with file and line."""
    found = list(offenders)
    assert not found, f"{len(found)} found:\n" + "\n".join(found)


def line_of(text: str, place: int) -> int:
    """The line of a character of a text, counted from 1."""
    return text.count("\n", 0, place) + 1


def at(path: Path, line: int = 1) -> str:
    """File and line as an editor opens them, seen from the top of the project where the file is in it."""
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"
