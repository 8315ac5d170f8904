"""Pages that are made from code and results.

Run this after changing what they show: python docs/generate.py. With --outputs it also runs the code blocks of
all pages and writes what they print, which takes minutes; `make docs` does that.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from record import read_result
from tables.algorithms import algorithms_markdown
from tables.doctor import doctor_markdown
from tables.metrics import glossary_markdown
from tables.published_costs import renewed
from tables.templates import templates_markdown

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "benchmarks" / "results" / "demo.json"
DOCTOR = ROOT / "benchmarks" / "results" / "doctor_runs.json"
HOLES = ROOT / "benchmarks" / "results" / "reward_holes.json"


def readme() -> str:
    """The README with the figures as they were measured."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if DEMO.is_file():
        demo = read_result(DEMO, rows="seeds")
        text = _fill(text, "demo", f"```text\n{demo['seeds'][0]['table'].strip()}\n```")
        text = _fill(text, "results", _results(demo))
    return text


def loop() -> str:
    """The page on GRPO with the code of the loop as it is."""
    code = (ROOT / "oncurve" / "core" / "loop.py").read_text(encoding="utf-8")
    body = code[code.index("def train(") : code.index("@dataclass(eq=False)\nclass StepSchedule")].strip()
    return _fill((ROOT / "docs" / "grpo.md").read_text(encoding="utf-8"), "loop", f"```python\n{body}\n```")


def _results(demo: dict[str, Any]) -> str:
    lines = [
        "| seed | base | trained | control | right answer, any format: before, after | bad format: before, after "
        "| GRPO time | total time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for seed in demo["seeds"]:
        base, trained, control = seed["base"], seed["trained"], seed["control"]
        lines.append(
            f"| {seed['seed']} | {base['correct_fraction']:.1%} | **{trained['correct_fraction']:.1%}** "
            f"| {control['correct_fraction']:.1%} "
            f"| {base['any_format_fraction']:.1%}, {trained['any_format_fraction']:.1%} "
            f"| {base['bad_format_fraction']:.1%}, {trained['bad_format_fraction']:.1%} "
            f"| {seed['grpo_seconds']:.0f} s | {seed['whole_command_seconds']:.0f} s |"
        )
    hardware, code = demo["run"]["hardware"], demo["run"]["code"]
    count = demo["seeds"][0]["base"]["num_examples"]
    lines.append(
        f"\n{count:.0f} test problems, greedy decoding; {hardware['cpu_cores']} cores of {hardware['cpu']}; "
        f"commit {str(code['commit'])[:12]}."
    )
    return "\n".join(lines)


def _fill(text: str, name: str, content: str) -> str:
    """Replace what stands between the markers of a name."""
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    return pattern.sub(lambda match: match.group(1) + content + "\n" + match.group(2), text)


def _benchmark(name: str) -> Any:
    """A script of the benchmarks as a module."""
    folder, _, name = name.partition("/")
    return _neighbour(name, ROOT / "benchmarks" / folder)


def _neighbour(name: str, folder: Path = ROOT / "docs") -> Any:
    """A script of a folder as a module."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))  # scripts import their neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def performance() -> str:
    """The page on speed and memory with its tables."""
    return str(_benchmark("speed/chart").page())


def evidence() -> str:
    """The page of measurements with the published tables beside the planner's."""
    return renewed((ROOT / "benchmarks" / "results" / "evidence.md").read_text(encoding="utf-8"))


def doctor() -> str:
    """The page on the doctor's checks, with the runs made sick on purpose where they were measured."""
    found = (read_result(path, rows="runs") if path.is_file() else None for path in (DOCTOR, HOLES))
    return doctor_markdown(*found)


def api() -> str:
    """The page of the public interface."""
    return str(_neighbour("api_page").api_markdown())


def gpus() -> str:
    """The page of what fits on which GPU, with the planner's table."""
    return _fill((ROOT / "docs" / "gpus.md").read_text(encoding="utf-8"), "gpus", _neighbour("gpus_page").table())


def data() -> str:
    """The page on data, with the prompt templates as the code has them."""
    return _fill((ROOT / "docs" / "data.md").read_text(encoding="utf-8"), "templates", templates_markdown())


def keys() -> str:
    """The reference of a recipe's keys."""
    return str(_neighbour("keys_page").keys_markdown())


PAGES: dict[str, Callable[[], str]] = {
    "docs/api.md": api,
    "docs/metrics.md": glossary_markdown,
    "docs/algorithms.md": algorithms_markdown,
    "docs/doctor.md": doctor,
    "docs/performance.md": performance,
    "benchmarks/results/evidence.md": evidence,
    "docs/grpo.md": loop,
    "docs/gpus.md": gpus,
    "docs/keys.md": keys,
    "docs/data.md": data,
    "README.md": readme,
}


def stale() -> list[str]:
    """Pages that do not show what they are made from."""
    found: list[str] = []
    for name, make in PAGES.items():
        path = ROOT / name
        if not path.is_file() or path.read_text(encoding="utf-8") != make():
            found.append(name)
    return found


def renew_outputs() -> None:
    """Run the pages that show what their blocks print, and write it where it has changed."""
    from blocks import blocks_of  # the neighbour of this script

    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": programs}
    for page in sorted((ROOT / "docs").glob("*.md")):
        if any(block.is_output for block in blocks_of(page.read_text(encoding="utf-8"))):
            with TemporaryDirectory() as folder:
                command = [sys.executable, str(ROOT / "docs" / "blocks.py"), str(page), folder, "--write"]
                if subprocess.run(command, cwd=folder, env=environment).returncode:
                    raise SystemExit(1)  # it has said which block of the page fails


def main() -> None:
    """Write the pages that are out of date."""
    for name in stale():
        (ROOT / name).write_text(PAGES[name](), encoding="utf-8")
        sys.stdout.write(f"{name} written\n")
    if "--outputs" in sys.argv[1:]:
        renew_outputs()


if __name__ == "__main__":
    main()
