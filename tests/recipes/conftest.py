"""What tests of recipes share: processes that are forked and not started, and waiting for a run to get somewhere."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nursery import Child, Nursery


@pytest.fixture
def serve(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[[], Child]]:
    """``oncurve serve embedded``, which leaves its address in a registry of the test."""
    children: list[Child] = []

    def start() -> Child:
        child = nursery.start("serve", "embedded", "--port", 0, "--registry", tmp_path / "registry")
        children.append(child)
        wait_for(lambda: child.log.exists() and "serving on" in child.output, child)
        assert re.search(r"serving on (\S+)", child.output)
        return child

    yield start
    for child in children:
        if child.is_running():
            child.kill(signal.SIGKILL)
            child.wait()


def wait_for(is_so: Callable[[], Any], child: Any, seconds: float = 200.0) -> None:
    """Until something is so; fails with what the process said if it ends before."""
    end = time.monotonic() + seconds
    while not is_so():
        assert child.is_running() or is_so(), child.output
        assert time.monotonic() < end, child.output
        time.sleep(0.005)


def reaches(run: Path, step: int) -> bool:
    """The run has done so many steps and works on the next."""
    try:
        return json.loads((run / "status.json").read_text())["step"] >= step
    except (OSError, ValueError):
        return False


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run, after a look that it is whole: all steps once, measured twice, a page to look at."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == list(range(len(steps)))
    assert sum(row.get("policy/gradient_norm", 0) > 0 for row in rows) >= len(rows) // 2, "it hardly trained"
    page = (run / "report.html").read_text()
    assert page.startswith("<!doctype html>".upper()) or "<html" in page[:200]
    for name in ("base", "trained"):
        assert (run / "evaluations" / f"{name}.json").is_file()
    return rows


@pytest.fixture(name="wait_for", scope="session")
def _wait_for() -> Callable[..., None]:
    return wait_for


@pytest.fixture(name="reaches", scope="session")
def _reaches() -> Callable[[Path, int], bool]:
    return reaches


@pytest.fixture(name="rows_of", scope="session")
def _rows_of() -> Callable[[Path], list[dict[str, Any]]]:
    return rows_of
