"""Random changes of one node of a room's code, and which of them its fast tests notice.

    python tests/mutants.py algorithm --seed 3 --count 10

Lines that the room's fast tests run are known by tracing them once. A mutant changes one node on such a line, drawn by
the seed, in a copy of the tree; the tests that run the line run against it, then the others of their files, as what a
fixture or a cache has computed is read by tests that never run the line. It is found if one of them fails, or takes ten
times as long as it did. What they do not find is shown to the room's slow tests in the gate, which train whole runs and
start processes. Each run is a fork of a process that has imported torch.

``--record`` keeps what was found in tests/mutants.jsonl and goes on where it stopped; ``--again`` runs what survived
there against today's tests; ``--page`` writes docs/decisions/0016-mutants.md from it. A survivor that changes nothing
that anybody can see gets the reason in its line of that file, as "equivalent".
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

from mutant_changes import ROOT, Mutant, compiles, mutants_of, mutated

SOURCES: dict[str, tuple[str, ...]] = {
    "algorithm": ("algorithm", "core/algorithm.py", "core/formulas.py"),
    "data": ("data", "core/order.py", "core/batch.py"),
    "policy": ("policy", "core/policy.py"),
    "rewards": ("rewards", "core/grading.py"),
    "sample": ("sample", "core/decoder.py", "core/draw.py", "core/requests.py", "core/sampler.py", "core/scheduler.py"),
}
"""Files and folders of oncurve/ that the tests of a room hold, where that is more than the folder of its name."""
TESTS: dict[str, tuple[str, ...]] = {
    "agents": ("episodes", "fleet/test_agents_over_servers.py"),
    "cli": (
        "cli",
        "doctor/test_doctor_command.py",
        "plan/test_plan_command.py",
        "plan/test_time_and_price.py",
        "report/test_report_commands.py",
        "data/test_check_without_answers.py",
    ),
    "core": ("algorithm", "sample", "policy", "rewards", "data", "run/test_run.py", "test_batch.py", "test_records.py"),
    "data": ("data", "test_batch.py"),
    "run": (
        "run",
        "resilience/test_saved_state.py",
        "resilience/test_guards.py",
        "interface/test_verbs.py",
        "policy/test_muon.py",
    ),
    "sample": ("sample", "episodes/test_waiting_rows.py"),
}
"""Folders and files of tests/ that hold a room, where that is not the folder of its name."""
SLOW_TESTS: dict[str, tuple[str, ...]] = {"core": ("interface",), "run": ("interface",)}
"""Folders and files of tests/ whose slow tests hold a room, beside those of ``TESTS``."""
KEPT = ROOT / ".pytest_cache" / "mutants"
"""Which lines the tests of a file run, until something of it changes."""
RECORD = ROOT / "tests" / "mutants.jsonl"
PAGE = ROOT / "docs" / "decisions" / "0016-mutants.md"
MEASURED = 307
"""From this seed on, mutants were drawn after the tests were written."""
INTRODUCTION = """# 0016 Random mutants say what the tests find

<!-- Written by `python tests/mutants.py --page` from tests/mutants.jsonl. -->

**Context.** Lines that run are not lines that are held: no fast test noticed 21 of 65 random changes of one node.

**Decision.** `tests/mutants.py` draws changes by a seed and runs the fast tests of the room. Of those that anybody can
see, 85 of 100 are to be found in every room, 90 in core, algorithm, sample, policy and rewards. A survivor is mended by
an assertion in a test that is there, or said to be equivalent with a reason. Seeds of a measurement are drawn after the
tests were written, so that they measure the suite and not the mending: "found at first" is the measurement, "found now"
counts what was mended since. What the fast tests of a room leave is shown to its slow tests in the gate. Seeds from 310
on are unused."""
HEAVY = ("torch", "transformers", "peft", "numpy", "sympy", "pydantic", "datasets", "tokenizers", "safetensors", "rich")
"""Libraries whose modules are imported once, before the forks."""
IDLE_CALLS = 30
"""A function that was called as often in a test without a new line is traced no more there."""
GATE = "not nightly and not gpu"
UNHEARD = ("-p", "no:unraisableexception")
"""What a test leaves open is no verdict on a mutant: pytest would end with it and without an answer."""
ONLY_SLOW = ("tests/history",)
"""Folders whose tests all replay whole runs: their room is tried with tests marked slow."""
Lines = dict[str, set[int]]


class Timed:
    """A plugin that notes which tests pass, and their seconds."""

    def __init__(self) -> None:
        self.begun, self.seconds, self.passed = 0.0, {}, set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.begun = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test ends."""
        self.seconds[nodeid] = time.monotonic() - self.begun

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Tests that fail without a mutant say nothing about one."""
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def result(self) -> dict[str, Any]:
        """What goes to the process that waits."""
        return {"seconds": {test: self.seconds[test] for test in sorted(self.passed)}}


class Tracer(Timed):
    """A plugin that notes which lines of some files each test runs, and how long it takes."""

    def __init__(self, tree: Path, files: Sequence[str]) -> None:
        self.names = {str(tree / file): file for file in files}
        self.lines: dict[str, Lines] = {}
        self.seconds: dict[str, float] = {}
        self.passed: set[str] = set()
        self.now: Lines = defaultdict(set)
        self.idle: dict[int, int] = {}

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Of calls: whether their lines are looked at."""
        name = self.names.get(frame.f_code.co_filename)
        if name is None:
            return None
        idle, code = self.idle, id(frame.f_code)
        calls = idle.get(code, 0)
        if calls >= IDLE_CALLS:
            return None
        idle[code] = calls + 1
        seen = self.now[name]

        def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            if frame.f_lineno not in seen:
                seen.add(frame.f_lineno)
                idle[code] = 0
            return line

        return line

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        super().pytest_runtest_logstart(nodeid)
        self.now, self.idle = defaultdict(set), {}
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test ends."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.lines[nodeid] = self.now
        super().pytest_runtest_logfinish(nodeid)

    def result(self) -> dict[str, Any]:
        """What goes to the process that draws mutants."""
        lines = {test: {file: sorted(at) for file, at in self.lines[test].items()} for test in sorted(self.passed)}
        modules = [name for name in sys.modules if name.split(".")[0] in HEAVY]
        return {"lines": lines, "seconds": self.seconds, "modules": modules}


class Chosen:
    """A plugin that runs some tests, notes the first that fails, and ends its process if one takes too long."""

    def __init__(self, running: set[str], seconds: dict[str, float], answer: Path) -> None:
        self.running, self.seconds, self.finders, self.ran = running, seconds, [], 0
        self.answer, self.end = answer, math.inf

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins, and has a limit."""
        if self.end == math.inf:
            threading.Thread(target=self.watch, daemon=True).start()
        self.end = time.monotonic() + 20.0 + 10.0 * self.seconds.get(nodeid, 0.0)

    def watch(self) -> None:
        """What waits for ever is found."""
        while time.monotonic() < self.end:
            time.sleep(0.2)
        self.answer.write_text(json.dumps({"status": 1, "finders": ["the limit of time"], "ran": self.ran}))
        os._exit(0)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Those that run the line, then those beside them in their files; the files with the quickest first."""
        files: dict[str, float] = defaultdict(float)
        for test, seconds in self.seconds.items():
            files[test.split("::")[0]] += seconds
        items[:] = [item for item in items if item.nodeid in self.seconds]
        items.sort(key=lambda item: (item.nodeid not in self.running, files[item.nodeid.split("::")[0]]))
        self.ran = len(items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """The finder."""
        if report.failed:
            self.finders.append(report.nodeid)

    def result(self) -> dict[str, Any]:
        """What goes to the process that waits."""
        return {"finders": self.finders, "ran": self.ran}


def in_a_fork(
    tree: Path, words: Sequence[str], plugin: Any, seconds: float, *, slow: bool = False
) -> dict[str, Any] | None:
    """What a plugin saw of a pytest in a process of its own, with its exit status; None if it took too long.

    Fast tests run, or ``slow`` ones.
    """
    answer = tree.parent / "answer.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            answer.write_text(json.dumps(run_tests(tree, words, plugin, slow=slow)))
        except (Exception, SystemExit):  # noqa: BLE001  a fork never goes on with what is below
            traceback.print_exc()
        finally:
            os._exit(0)
    end = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # whoever the tests left
    if not answer.is_file():  # the interpreter was ended, or the machinery failed: no verdict on a mutant
        sys.exit(f"a process that ran tests left no answer:\n{(tree.parent / 'log.txt').read_text()[-3000:]}")
    return json.loads(answer.read_text())


def run_tests(tree: Path, words: Sequence[str], plugin: Any, *, slow: bool) -> dict[str, Any]:
    """In the process that was forked for it."""
    os.setsid()
    os.chdir(tree)
    with (tree.parent / "log.txt").open("ab", 0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(place for place in sys.path if Path(place or ".").resolve() != ROOT / "tests")]
    import pytest

    known = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that what is imported before has imported
    has_both = any(word.startswith(ONLY_SLOW) for word in words)
    lane = GATE if has_both else f"slow and {GATE}" if slow else f"not slow and {GATE}"
    status = pytest.main([*words, "-q", "-p", "no:cacheprovider", *UNHEARD, "-W", known, "-m", lane], plugins=[plugin])
    return {"status": int(status), **plugin.result()}


def copy_tree(folder: Path) -> Path:
    """Everything that git knows or does not ignore."""
    tree = folder / "tree"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def traces(tree: Path, tests: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What each file of tests runs; from an earlier call where neither it nor what it imports has changed."""
    places = [ROOT / test for test in tests]
    files = [path for place in places for path in (sorted(place.rglob("test_*.py")) if place.is_dir() else [place])]
    package = sorted((ROOT / "oncurve").rglob("*.py"))
    shared = sha256(sys.version.encode())
    for path in [*package, *sorted(p for p in (ROOT / "tests").rglob("*.py") if not p.name.startswith("test_"))]:
        shared.update(b"" if path == Path(__file__) else path.read_bytes())
    kept = {}
    for path in files:
        key = shared.copy()
        key.update(path.read_bytes())
        kept[path.relative_to(ROOT).as_posix()] = KEPT / f"{path.stem}-{key.hexdigest()[:20]}.json"
    fresh = [file for file, answer in kept.items() if not answer.exists()]
    if fresh:
        tracer = Tracer(tree, [path.relative_to(ROOT).as_posix() for path in package])
        traced = in_a_fork(tree, fresh, tracer, 3600.0)
        assert traced is not None
        KEPT.mkdir(parents=True, exist_ok=True)
        for file in fresh:
            own = {
                key: {t: v for t, v in traced[key].items() if t.split("::")[0] == file} for key in ("lines", "seconds")
            }
            kept[file].write_text(json.dumps(own | {"modules": traced["modules"]}), encoding="utf-8")
    return {file: json.loads(answer.read_text(encoding="utf-8")) for file, answer in kept.items()}


class Room:
    """A room's sources in a copy, the lines that its fast tests run, and its slow tests."""

    def __init__(self, name: str, folder: Path, tests: Sequence[str]) -> None:
        self.tree = copy_tree(folder)
        self.slow_places = [*tests, *(f"tests/{place}" for place in SLOW_TESTS.get(name, ()))]
        places = [ROOT / "oncurve" / part for part in SOURCES.get(name, (name,))]
        found = [path for place in places for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
        self.files = [path.relative_to(ROOT).as_posix() for path in found]
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, Lines] = {}
        modules: set[str] = set()
        for traced in traces(self.tree, tests).values():
            self.seconds |= traced["seconds"]
            modules |= set(traced["modules"])
            for test, lines in traced["lines"].items():
                self.lines[test] = {file: set(at) for file, at in lines.items() if file in self.files}
        if not self.lines:
            sys.exit(f"no test of {' '.join(tests)} passes:\n{(folder / 'log.txt').read_text()[-2000:]}")
        for module in sorted(modules):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)

    def draw(self, seed: int, count: int) -> list[Mutant]:
        """``count`` mutants of distinct lines, each with a test that runs it; the same for the same code and tests."""
        run: Lines = defaultdict(set)
        for lines in self.lines.values():
            for file, at in lines.items():
                run[file] |= at
        every = [mutant for file in self.files for mutant in mutants_of(file, run[file])]
        random.Random(seed).shuffle(every)
        drawn: dict[tuple[str, int], Mutant] = {}
        for mutant in every:
            if len(drawn) < count and (mutant.file, mutant.line) not in drawn and compiles(mutant):
                drawn[mutant.file, mutant.line] = mutant
        return list(drawn.values())

    def finders(self, mutant: Mutant, *, every: bool) -> tuple[list[str], int]:
        """The first test that fails (or all of its kind), and how many ran; nobody if the mutant is not found."""
        running = {test for test, lines in self.lines.items() if mutant.line in lines.get(mutant.file, ())}
        files = {test.split("::")[0] for test in running}
        seconds = {test: self.seconds[test] for test in self.lines if test.split("::")[0] in files}
        with self.with_mutant(mutant):
            finders = self.failing(running, seconds, every=every)
        if finders or not self.slow_seconds:
            return finders, len(seconds)
        with self.with_mutant(mutant):
            finders = self.failing(set(), self.slow_seconds, every=every, slow=True)
        return finders, len(seconds) + len(self.slow_seconds)

    @contextlib.contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        """The copy of the tree with one change."""
        path = self.tree / mutant.file
        whole = path.read_text(encoding="utf-8")
        for old in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            old.unlink()
        path.write_text(mutated(whole, mutant), encoding="utf-8")
        sys.dont_write_bytecode = True
        try:
            yield
        finally:
            path.write_text(whole, encoding="utf-8")

    @cached_property
    def slow_seconds(self) -> dict[str, float]:
        """The room's slow tests that pass without a mutant, with their seconds."""
        if all(place.startswith(ONLY_SLOW) for place in self.slow_places):
            return {}  # they are asked with the fast ones
        passed = in_a_fork(self.tree, self.slow_places, Timed(), 3600.0, slow=True)
        assert passed is not None
        return passed["seconds"]

    def failing(self, running: set[str], seconds: dict[str, float], *, every: bool, slow: bool = False) -> list[str]:
        """Which of these tests fail: first those that run the line themselves, then the others."""
        chosen = Chosen(running, seconds, self.tree.parent / "answer.json")
        files = sorted({test.split("::")[0] for test in seconds})
        found = in_a_fork(self.tree, [*files, *([] if every else ["-x"])], chosen, 3600.0, slow=slow)
        if found is None:
            return ["the limit of time"]
        if found["status"] not in (0, 1) and not found["finders"]:
            return ["nothing can be imported or collected"]
        return found["finders"]


def recorded() -> list[dict[str, Any]]:
    """The rows of the record: room, seed, the mutant, who found it."""
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.exists() else []


def record(row: dict[str, Any]) -> None:
    """A row in the place of an earlier one of the same mutant, or at the end."""
    rows = recorded()
    same = next((old for old in rows if all(old[key] == row[key] for key in ("room", "seed", "mutant"))), None)
    if same is None:
        rows.append(row | {"at_first": row["finder"] is not None})
    else:
        same |= row
    RECORD.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows), encoding="utf-8")


def moved(mutant: Mutant) -> Mutant | None:
    """The same change where its text stands today, on the nearest line; None where the file has it no more."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8") if (ROOT / mutant.file).exists() else ""
    if text.encode()[mutant.start : mutant.end] == mutant.before.encode():
        return mutant
    every = mutants_of(mutant.file, set(range(1, text.count("\n") + 2))) if text else []
    same = [one for one in every if (one.before, one.after) == (mutant.before, mutant.after)]
    return min(same, key=lambda one: abs(one.line - mutant.line), default=None)


def survivors_today(room: str) -> Iterator[tuple[int, Mutant]]:
    """What survived in a room, written down anew where it stands in the code of today."""
    rows = recorded()
    for row in rows:
        if row["room"] == room and row in survivors(rows):
            today = moved(Mutant(**row["mutant"]))
            if today is None:
                print(f"seed {row['seed']}  {Mutant(**row['mutant'])}\n    GONE: the file has it no more")
                continue
            row["mutant"] = asdict(today)
            yield row["seed"], today
    RECORD.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Plant, run, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", nargs="?")
    parser.add_argument("--tests", nargs="*", help="files and folders; the room's without it")
    parser.add_argument("--seed", type=int, nargs="*", default=[0])
    parser.add_argument("--count", type=int, default=10, help="mutants for each seed")
    parser.add_argument("--every-finder", action="store_true", help="all tests that fail, not the first alone")
    parser.add_argument("--record", action="store_true", help="keep what was found in tests/mutants.jsonl")
    parser.add_argument("--again", action="store_true", help="what survived there, in place of mutants of seeds")
    parser.add_argument("--page", action="store_true", help="write the page from the record, and no more")
    chosen = parser.parse_args()
    if chosen.page:
        PAGE.write_text(page(recorded()), encoding="utf-8")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        room = Room(chosen.room, folder, chosen.tests or [f"tests/{t}" for t in TESTS.get(chosen.room, (chosen.room,))])
        total = found = 0
        known = [(row["room"], row["seed"], row["mutant"]) for row in recorded()] if chosen.record else []
        for seed, mutant in planted(room, chosen):
            if (chosen.room, seed, asdict(mutant)) in known:
                continue
            finders, ran = room.finders(mutant, every=chosen.every_finder)
            total, found = total + 1, found + bool(finders)
            who = f"{len(finders)} finders, {finders[0]}" if len(finders) > 1 else (*finders, "NOBODY")[0]
            print(f"seed {seed}  {mutant}\n    {who} (of {ran})", flush=True)
            if chosen.record or chosen.again:
                record({"room": chosen.room, "seed": seed, "mutant": asdict(mutant), "finder": (*finders, None)[0]})
        print(f"{chosen.room}: {found} of {total} found")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def planted(room: Room, chosen: argparse.Namespace) -> Iterator[tuple[int, Mutant]]:
    """Mutants of the seeds, or those that survived before and are judged no equivalent."""
    if not chosen.again:
        yield from ((seed, mutant) for seed in chosen.seed for mutant in room.draw(seed, chosen.count))
        return
    yield from list(survivors_today(chosen.room))


def page(rows: list[dict[str, Any]]) -> str:
    """The decision's page: a table for those seeds that tests were written from, one for those that nobody used."""
    parts = [INTRODUCTION]
    for title, count, chosen in (
        ("Seeds that tests were written from", "N", [row for row in rows if row["seed"] < MEASURED]),
        ("The last measurement", "2", [row for row in rows if row["seed"] >= MEASURED]),
    ):
        seeds = " ".join(map(str, sorted({row["seed"] for row in chosen})))
        parts.append(
            f"## {title}\n\n`python tests/mutants.py ROOM --record --count {count} --seed {seeds}`\n\n{table(chosen)}"
        )
        for name, left in (("Survivors", survivors(chosen)), ("Equivalent", equivalents(chosen))):
            said = [
                f"- {row['room']} {row['seed']}: `{Mutant(**row['mutant'])}`"
                + f"; {row.get('equivalent', '')}".rstrip("; ")
                for row in left
            ]
            parts.append(f"### {name}\n\n" + ("\n".join(said) or "None."))
    return "\n\n".join(parts) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    """A line a room, and one for all."""
    lines = ["| room | mutants | found at first | found now | equivalent | survive | found of those that matter |"]
    lines.append("|---|---|---|---|---|---|---|")
    for room in [*sorted({row["room"] for row in rows}), "all"]:
        of = [row for row in rows if room in (row["room"], "all")]
        found, equal, left = sum(bool(row["finder"]) for row in of), len(equivalents(of)), len(survivors(of))
        share = f"{100 * found / max(1, found + left):.0f} %"
        first = sum(row["at_first"] for row in of)
        lines.append(f"| {room} | {len(of)} | {first} | {found} | {equal} | {left} | {share} |")
    return "\n".join(lines)


def survivors(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Found by nobody, though somebody can see them."""
    return [row for row in rows if row["finder"] is None and "equivalent" not in row]


def equivalents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Found by nobody, as nobody can see them."""
    return [row for row in rows if row["finder"] is None and "equivalent" in row]


if __name__ == "__main__":
    main()
