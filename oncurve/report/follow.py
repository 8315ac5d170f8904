"""Following a run's folder as it grows, on this machine or a shared disk, without writing to it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncurve.errors import ConfigError, DataError
from oncurve.observe.record import METRICS, step_of
from oncurve.report.blocks import recorded_steps
from oncurve.report.curves import plain_row

_MARK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class News:
    """Rows of metrics that a reader has not seen."""

    is_reset: bool
    """The file was rewritten, as a resumed run does: forget what was read before."""
    rows: list[dict[str, float | None]]
    position: str
    """Where to go on, to be handed in the next time, also by another process."""


def read_news(run: Path, position: str = "") -> News:
    """The whole rows that stand after a position; everything if what stood before it is no longer there.

    A position is the number of bytes read and a checksum of the last of them, so that a file that was cut back to an
    earlier step and has grown again is noticed.

    Raises DataError if the file is missing or a whole line of it is no JSON object.
    """
    path = run / METRICS
    try:
        with path.open("rb") as file:
            start = _verified(file, position)
            file.seek(start)
            fresh = file.read()
            end = start + fresh.rfind(b"\n") + 1
            mark = _mark(file, end)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Name the folder of a run.") from error
    lines = fresh[: end - start].decode("utf-8", errors="replace").split("\n")
    rows = [_row(line, path) for line in lines if line.strip()]
    return News(start == 0, rows, f"{end}-{mark:x}")


def _verified(file: Any, position: str) -> int:
    """Bytes before a position that are still what they were; 0 if they are not."""
    offset, _, mark = position.partition("-")
    if not offset.isdecimal() or int(offset) == 0:
        return 0
    return int(offset) if f"{_mark(file, int(offset)):x}" == mark else 0


def _mark(file: Any, end: int) -> int:
    start = max(0, end - _MARK_BYTES)
    file.seek(start)
    found = file.read(end - start)
    return zlib.crc32(found, end) if len(found) == end - start else -1


def _row(line: str, path: Path) -> dict[str, float | None]:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise TypeError(f"a {type(row).__name__}")
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: a line is no JSON object ({error}). Restore or remove it.") from error
    step_of(row, path)
    return plain_row(row)


def find_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name: the given ones, and those inside a given folder that is none itself, newest first.

    Raises ConfigError for a path that is no folder.
    """
    found: dict[str, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path}: there is no such folder. Name run folders, or a folder that holds some.")
        inside = [path] if (path / METRICS).is_file() else [file.parent for file in path.glob(f"*/{METRICS}")]
        for run in sorted(inside, key=_age):
            name = plain = run.resolve().name
            number = 1
            while name in found and found[name] != run:
                number += 1
                name = f"{plain}-{number}"
            found[name] = run
    return found


def fingerprint(run: Path) -> tuple[Any, ...]:
    """Something that changes when there is anything new to say about a run."""
    names = (METRICS, "status.json", "config.yaml", "comparison.json", "log.txt", ".lock", "evaluations")
    return tuple(_stamp(run / name) for name in names)


def has_examples(run: Path) -> bool:
    """Whether a measurement of held-out problems is finished."""
    return any((run / "evaluations").glob("*.json"))


def step_list(run: Path) -> dict[str, Any]:
    """Which steps can be looked at."""
    return {"steps": recorded_steps(run), "num_examples": int(has_examples(run))}


def _age(run: Path) -> tuple[int, str]:
    """What sorts runs by when they began, the newest first: their recipe is written once."""
    stamp = _stamp(run / "recipe.yaml")
    return (-stamp[0] if stamp else 0, run.name)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
