"""Following a run's folder as it grows, on this machine or a shared disk, without writing to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oncurve.errors import ConfigError
from oncurve.observe.record import METRICS, read_rows, step_of
from oncurve.report.blocks import recorded_steps
from oncurve.report.curves import plain_row

Row = dict[str, float | None]


def read_news(run: Path, sent: Sequence[Row]) -> tuple[bool, list[Row]]:
    """The rows of metrics behind those that were ``sent``; with True, all rows: the file begins in another way.

    That is so at the start, and where a resumed run has rewritten it.

    Raises DataError if the file is missing or a whole line of it is no JSON object.
    """
    path = run / METRICS
    found = read_rows(path)
    for row in found:
        step_of(row, path)
    rows = [plain_row(row) for row in found]
    is_more = bool(sent) and rows[: len(sent)] == sent
    return not is_more, rows[len(sent) :] if is_more else rows


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
