"""Items of a first hour on a GPU, each run in a process of its own with a time limit, and their table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_first_items import Item

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TAIL = 4000
"""Characters of an item's output that are kept in the record of the stage."""


@dataclass(frozen=True)
class Result:
    """What became of an item."""

    name: str
    outcome: str
    """passed, failed, timed out, absent (what it needs is not there) or left (no time for it in this call)."""
    seconds: float = 0.0
    said: str = ""
    """The figure or the reason, in one line."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""
    """The end of what it printed, unless it passed."""


@dataclass(frozen=True)
class Place:
    """Where items work, on what, and with which packages."""

    work: Path
    device: str = "cuda"
    tiny: bool = False
    patience: float = 1.0
    """Limits are so many times as long."""
    packages: str | None = None
    """A folder that goes onto the path of every process."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further variables of every process."""

    def result(self, item: Item) -> Path:
        """Where the record of an item lies."""
        return self.work / "items" / f"{item.name}.json"

    def environment(self) -> dict[str, str]:
        """Variables of an item's process: offline, and with this project on the path."""
        added = [part for part in (self.variables.get("PYTHONPATH"), str(ROOT), self.packages) if part]
        path = [*added, *filter(None, [os.environ.get("PYTHONPATH")])]
        fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "TERM": "dumb"}
        return {**os.environ, **fixed, **self.variables, "PYTHONPATH": os.pathsep.join(path)}


def run_all(items: Sequence[Item], place: Place, *, jobs: int, seconds: float, again: bool) -> list[Result]:
    """Run items that have no result yet, ``jobs`` at a time, as long as there is time for them."""
    end, lock = time.monotonic() + seconds, threading.Lock()
    place.result(items[0]).parent.mkdir(parents=True, exist_ok=True)

    def one(item: Item) -> Result:
        kept = None if again else read(place.result(item))
        if kept is not None and kept.outcome == "passed":
            return kept
        left = end - time.monotonic()
        limit = item.seconds * place.patience
        if left < min(limit, 30):
            return kept or Result(item.name, "left", said="no time left in this call; call again, and it goes on here")
        with lock:
            print(f"{item.name}: {item.what} ...", flush=True)
        result = run(item, place, within=min(limit, left))
        place.result(item).write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
        with lock:
            print(f"{item.name}: {result.outcome} after {result.seconds:.0f} s. {result.said}", flush=True)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, items))


def run(item: Item, place: Place, *, within: float) -> Result:
    """Run an item in a process of its own, which is ended with all its children when its time is up."""
    folder = place.work / "items" / item.name
    folder.mkdir(parents=True, exist_ok=True)
    answer, log = folder / "answer.json", folder / "output.txt"
    answer.unlink(missing_ok=True)
    asked = {"work": str(place.work), "folder": str(folder), "device": place.device, "tiny": place.tiny}
    command = [sys.executable, str(HERE / "gpu_first_probe.py"), item.probe, str(answer)]
    command.append(json.dumps({**asked, "options": dict(item.options)}))
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=place.environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(within)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    seconds = round(time.monotonic() - started, 1)
    printed = log.read_text(encoding="utf-8", errors="replace")
    if code is None:
        return Result(item.name, "timed out", seconds, f"ended after {within:.0f} s", output=printed[-TAIL:])
    if code != 0 or not answer.is_file():
        lines = [line for line in printed.splitlines() if line.strip()]
        return Result(item.name, "failed", seconds, lines[-1][:300] if lines else f"exit code {code}", {},
                      printed[-TAIL:])  # fmt: skip
    found = json.loads(answer.read_text(encoding="utf-8"))
    output = "" if found["outcome"] == "passed" else printed[-TAIL:]
    return Result(item.name, found["outcome"], seconds, found["said"], found["figures"], output)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):  # it ended, and all its children did
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read(path: Path) -> Result | None:
    """The record of an item; None if there is none."""
    return Result(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def table(items: Sequence[Item], results: Sequence[Result]) -> str:
    """Item, what it proves, result, figure, seconds, as a table of Markdown."""
    lines = ["| item | what | proves | result | figure or reason | seconds |", "|---|---|---|---|---|---|"]
    for item, result in zip(items, results, strict=True):
        cells = (item.name, item.what, item.proves, result.outcome, result.said, f"{result.seconds:.0f}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def summary(results: Sequence[Result]) -> str:
    """How many of each outcome there are."""
    outcomes = [result.outcome for result in results]
    return ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
