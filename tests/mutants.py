"""Random changes of one node of a room's code, and which of them its fast tests notice.

    python tests/mutants.py algorithm --seed 3 --count 10

Lines that the room's fast tests run are known by tracing them once. A mutant changes one node on such a line, drawn by
the seed, in a copy of the tree; the tests that run the line run against it. It is found if one of them fails, or if all
take ten times as long as they did. Each run of tests is a fork of a process that has imported torch already.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
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
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES: dict[str, tuple[str, ...]] = {
    "algorithm": ("algorithm", "core/algorithm.py", "core/formulas.py"),
    "data": ("data", "core/order.py", "core/batch.py"),
    "policy": ("policy", "core/policy.py"),
    "rewards": ("rewards", "core/grading.py"),
    "sample": ("sample", "core/decoder.py", "core/draw.py", "core/requests.py", "core/sampler.py", "core/scheduler.py"),
}
"""Files and folders of oncurve/ that the tests of a room hold, where that is more than the folder of its name."""
HEAVY = ("torch", "transformers", "peft", "numpy", "sympy", "pydantic", "datasets", "tokenizers", "safetensors", "rich")
"""Libraries whose modules are imported once, before the forks."""
LANE = "not slow and not nightly and not gpu"
Lines = dict[str, set[int]]


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the text between two offsets is replaced."""

    file: str
    line: int
    last_line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        """One line: where, what stood there, what stands there now."""
        return f"{self.file}:{self.line}  {' '.join(self.before.split())[:70]}  ->  {' '.join(self.after.split())[:70]}"


COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


def changes(node: ast.expr | ast.stmt) -> Iterator[ast.AST | str]:
    """What may stand in the place of a node."""
    match node:
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Name("min" | "max")):
            return  # of either order
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(one, ast.Starred) for one in node.args):
            yield ast.Call(node.func, [second, first, *rest], node.keywords)
        case ast.expr():
            yield from changed_operators(node)


def changed_operators(node: ast.expr) -> Iterator[ast.expr]:
    """Comparisons, sums, conditions."""
    match node:
        case ast.Compare(ops=[operator, *_]):
            for other in COMPARED[type(operator)]:
                yield ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)
        case ast.BinOp(op=operator) if type(operator) in COMPUTED and not is_text(node):
            yield ast.BinOp(node.left, COMPUTED[type(operator)](), node.right)
        case ast.BoolOp(op=operator):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)


def is_text(node: ast.BinOp) -> bool:
    """Texts are joined or filled in, which is no sum."""
    sides = (node.left, node.right)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides
    )


def mutable(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that decide what is computed: no annotations, no messages of errors, no assertions."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_left = name in ("annotation", "returns", "decorator_list") or isinstance(
                child, (ast.Raise, ast.Assert, ast.JoinedStr)
            )
            if isinstance(child, ast.AST) and not is_left:
                yield child
                yield from mutable(child)


def mutants_of(file: str, lines: set[int]) -> list[Mutant]:
    """All changes on the lines, which are counted from 1."""
    text = (ROOT / file).read_text(encoding="utf-8")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    for node in {inner: None for function in functions for inner in mutable(function)}:
        if not isinstance(node, (ast.expr, ast.stmt)) or node.lineno not in lines:
            continue
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = text.encode()[start:end].decode()
        for after in changes(node):
            written = after if isinstance(after, str) else f"({ast.unparse(after)})"
            found.append(Mutant(file, node.lineno, node.end_lineno, start, end, before, written))
    return found


def compiles(mutant: Mutant) -> bool:
    """A call may stand where only a name may, as in a pattern."""
    try:
        ast.parse(mutated((ROOT / mutant.file).read_text(encoding="utf-8"), mutant))
    except SyntaxError:
        return False
    return True


def mutated(text: str, mutant: Mutant) -> str:
    """The file with the change."""
    data = text.encode()
    return (data[: mutant.start] + mutant.after.encode() + data[mutant.end :]).decode()


class Tracer:
    """A plugin that notes which lines of some files each test runs, and how long it takes."""

    def __init__(self, tree: Path, files: Sequence[str]) -> None:
        self.names = {str(tree / file): file for file in files}
        self.lines: dict[str, Lines] = {}
        self.seconds: dict[str, float] = {}
        self.passed: set[str] = set()
        self.now: Lines = defaultdict(set)
        self.known: dict[CodeType, set[int] | None] = {}

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Of calls: whether their lines are looked at."""
        name = self.names.get(frame.f_code.co_filename)
        if name is None:
            return None
        seen = self.now[name]

        def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            seen.add(frame.f_lineno)
            return line

        return line

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.now, self.begun = defaultdict(set), time.monotonic()
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test ends."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.lines[nodeid], self.seconds[nodeid] = self.now, time.monotonic() - self.begun

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Tests that fail without a mutant say nothing about one."""
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def result(self) -> dict[str, Any]:
        """What goes to the process that draws mutants."""
        lines = {test: {file: sorted(at) for file, at in self.lines[test].items()} for test in sorted(self.passed)}
        modules = [name for name in sys.modules if name.split(".")[0] in HEAVY]
        return {"lines": lines, "seconds": self.seconds, "modules": modules}


class Chosen:
    """A plugin that runs some tests and notes the first that fails."""

    def __init__(self, tests: set[str]) -> None:
        self.tests, self.finders, self.ran = tests, [], 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Those that run the line."""
        items[:] = [item for item in items if item.nodeid in self.tests]
        self.ran = len(items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """The finder."""
        if report.failed:
            self.finders.append(report.nodeid)

    def result(self) -> dict[str, Any]:
        """What goes to the process that waits."""
        return {"finders": self.finders, "ran": self.ran}


def in_a_fork(tree: Path, words: Sequence[str], plugin: Any, seconds: float) -> dict[str, Any] | None:
    """What a plugin saw of a pytest in a process of its own, with its exit status; None if it took too long."""
    answer = tree.parent / "answer.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            answer.write_text(json.dumps(run_tests(tree, words, plugin)))
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


def run_tests(tree: Path, words: Sequence[str], plugin: Any) -> dict[str, Any]:
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
    status = pytest.main([*words, "-q", "-p", "no:cacheprovider", "-W", known, "-m", LANE], plugins=[plugin])
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


class Room:
    """A room's sources in a copy, and the lines that its fast tests run."""

    def __init__(self, name: str, folder: Path, tests: Sequence[str]) -> None:
        self.tree = copy_tree(folder)
        places = [ROOT / "oncurve" / part for part in SOURCES.get(name, (name,))]
        found = [path for place in places for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
        self.files = [path.relative_to(ROOT).as_posix() for path in found]
        traced = in_a_fork(self.tree, tests, Tracer(self.tree, self.files), 3600.0)
        assert traced is not None
        if not traced["lines"]:
            sys.exit(f"no test of {' '.join(tests)} passes:\n{(folder / 'log.txt').read_text()[-2000:]}")
        self.seconds: dict[str, float] = traced["seconds"]
        self.lines: dict[str, Lines] = {
            test: {file: set(at) for file, at in lines.items()} for test, lines in traced["lines"].items()
        }
        for module in traced["modules"]:
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
        """The first test that fails (or all), and how many ran; nobody if the mutant is not found."""
        tests = {test for test, lines in self.lines.items() if mutant.line in lines.get(mutant.file, ())}
        path = self.tree / mutant.file
        whole = path.read_text(encoding="utf-8")
        for old in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            old.unlink()
        path.write_text(mutated(whole, mutant), encoding="utf-8")
        sys.dont_write_bytecode = True
        words = [*sorted({test.split("::")[0] for test in tests}), *([] if every else ["-x"])]
        try:
            limit = 60.0 + 10.0 * sum(self.seconds[test] for test in tests)
            found = in_a_fork(self.tree, words, Chosen(tests), limit)
        finally:
            path.write_text(whole, encoding="utf-8")
        if found is None:
            return ["the limit of time"], len(tests)
        if found["status"] not in (0, 1) and not found["finders"]:
            return ["nothing can be imported or collected"], len(tests)
        return found["finders"], found["ran"]


def main() -> None:
    """Plant, run, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room")
    parser.add_argument("--tests", nargs="*", help="files and folders; tests/ROOM without it")
    parser.add_argument("--seed", type=int, nargs="*", default=[0])
    parser.add_argument("--count", type=int, default=10, help="mutants for each seed")
    parser.add_argument("--every-finder", action="store_true", help="all tests that fail, not the first alone")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        room = Room(chosen.room, folder, chosen.tests or [f"tests/{chosen.room}"])
        total = found = 0
        for seed in chosen.seed:
            for mutant in room.draw(seed, chosen.count):
                finders, ran = room.finders(mutant, every=chosen.every_finder)
                total, found = total + 1, found + bool(finders)
                who = f"{len(finders)} finders, {finders[0]}" if len(finders) > 1 else (*finders, "NOBODY")[0]
                print(f"seed {seed}  {mutant}\n    {who} (of {ran})", flush=True)
        print(f"{chosen.room}: {found} of {total} found, seeds {' '.join(map(str, chosen.seed))}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
