"""The benchmarks: one command, one form of result.

    python benchmarks/bench.py --list
    python benchmarks/bench.py vs_trl --model S --case ragged --steps 9
    python benchmarks/bench.py study presets --seeds 0 1 2 --detach
    python benchmarks/bench.py vs_trl --help

A result goes to build/benchmarks/ unless ``--output`` names a file or a folder; benchmarks/results/ holds those that
pages show. It has the keys what, command, commit, machine, settings, facts and rows, and is saved row by row: Ctrl-C
loses only the row that is under way.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE / name) for name in ("speed", "learning", "faults"))]

from record import ROOT, Record  # noqa: E402

INTERRUPTED = 130


@dataclass(frozen=True)
class Script:
    """What the driver knows of a file without importing it."""

    path: Path
    about: str
    """First line of its docstring."""
    is_ours: bool
    """It has ``bench(asked, record)``; else it is a program of its own."""


def scripts() -> dict[str, Script]:
    """Everything that can be run, by name."""
    found = {}
    for path in sorted(HERE.glob("*/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        is_program = any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)
        if "bench" in names or is_program:
            about = (ast.get_docstring(tree) or "").splitlines()[0]
            found[path.stem] = Script(path, about, "bench" in names)
    return found


def listing(known: dict[str, Script]) -> str:
    """A line for each, by folder."""
    lines = []
    for folder in dict.fromkeys(script.path.parent.name for script in known.values()):
        lines += ["", folder]
        lines += [f"  {name:18} {script.about}" for name, script in known.items() if script.path.parent.name == folder]
    return "\n".join(lines[1:])


def parser_of(what: str, module: Any) -> argparse.ArgumentParser:
    """The options of a benchmark and those that all have."""
    parser = argparse.ArgumentParser(
        prog=f"bench.py {what}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if hasattr(module, "options"):
        module.options(parser)
    parser.add_argument("--threads", type=int, default=None, help="of torch; as many as there are cores if not given")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="a .json file or a folder")
    parser.add_argument("--detach", action="store_true", help="go on in the background, with a log beside the result")
    return parser


def detach(path: Path, words: list[str]) -> None:
    """The same command in a process that outlives this terminal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.with_suffix(".log")
    again = [sys.executable, __file__, *(word for word in words if word != "--detach")]
    with log.open("a") as file:
        child = subprocess.Popen(again, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
    print(f"process {child.pid}; follow {log}")


def set_threads(threads: int | None) -> None:
    """Threads as given, of this process and of those that it starts. What needs no torch does not load it."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(threads)


def run(what: str, words: list[str]) -> int:
    """One benchmark of ours from its arguments to its file."""
    module = importlib.import_module(what)
    asked = parser_of(what, module).parse_args(words)
    name = module.name_of(asked) if hasattr(module, "name_of") else what
    path = asked.output if asked.output.suffix == ".json" else asked.output / f"{name}.json"
    if asked.detach:
        detach(path, [what, *words])
        return 0
    set_threads(asked.threads)
    settings = {key: value for key, value in vars(asked).items() if key not in ("output", "detach", "child")}
    record = Record(what, settings, path, command=["python", "benchmarks/bench.py", what, *words])
    try:
        module.bench(asked, record)
    except KeyboardInterrupt:
        if record.rows or record.facts:
            record.save()
        print(f"\nstopped; {len(record.rows)} rows are in {path}", file=sys.stderr)
        return INTERRUPTED
    if record.rows or record.facts:
        record.save()
        print(f"written: {path}")
    return 0


def main(words: list[str]) -> int:
    """List, or run what is named."""
    known = scripts()
    if not words or words[0] in ("-h", "--help", "--list"):
        print(listing(known) if words == ["--list"] else f"{__doc__}\n{listing(known)}")
        return 0
    what, *rest = words
    if what not in known:
        print(f"there is no benchmark {what!r}; `bench.py --list` names them", file=sys.stderr)
        return 2
    if known[what].is_ours:
        return run(what, rest)
    sys.argv = [str(known[what].path), *rest]
    sys.path.insert(0, str(known[what].path.parent))
    runpy.run_path(str(known[what].path), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
