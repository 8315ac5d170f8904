"""May a module import what it imports?

    0  records   batch   errors   stats   section
    1  algorithm   sandbox   observe   recipes   tasks
    2  model   rewards
    3  rollouts   data
    4  policy   evaluate   doctor
    5  recipe
    6  plan   convert
    7  launch   report
    8  wiring   coldstart
    9  run
    10 commands   trl
    11 cli
    12 __main__

A module imports its own folder and lower layers. That no two modules import each other stands in test_rooms.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from offenders import assert_none
from source import imports, imports_with_lines, known, modules, place

LAYERS = (
    ("records", "batch", "errors", "stats", "section"),
    ("algorithm", "sandbox", "observe", "recipes", "tasks"),
    ("model", "rewards"),
    ("rollouts", "data"),
    ("policy", "evaluate", "doctor"),
    ("recipe",),
    ("plan", "convert"),
    ("launch", "report"),
    ("wiring", "coldstart"),
    ("run",),
    ("commands", "trl"),
    ("cli",),
    ("__main__",),
)
LAYER = {unit: layer for layer, units in enumerate(LAYERS) for unit in units}
TOGETHER = ()
NEVER = {
    ("rollouts", "rewards"),
    ("algorithm", "errors"),
}
"""Pairs that the layers would allow: sampling knows no rewards, and formulas no files."""
PLAIN = {("recipe", "run.settings"), ("plan", "run.settings")}
"""Plain data that a lower room may read: the settings that a room is given."""
TORCH_FREE = (
    "records", "errors", "stats", "section", "recipe", "rewards", "sandbox", "tasks", "observe", "recipes", "data",
    "doctor", "plan", "cli", "launch", "convert",
)  # fmt: skip
EXCEPT = ("data.collate",)
HEAVY = ("torch", "transformers", "datasets", "jaxtyping")


def unit(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def test_every_module_has_a_layer() -> None:
    assert {unit(module) for module in modules() if module} == set(LAYER)


def forbidden(module: str) -> Iterator[str]:
    """Every import of a module that its layer does not allow."""
    mine = unit(module)
    for name, line in imports_with_lines(modules()[module]):
        theirs = unit(known(name) or "")
        if not theirs or theirs == mine:
            continue
        lower = LAYER[theirs] < LAYER[mine] or LAYER[theirs] == LAYER[mine] in TOGETHER
        if not (lower and (mine, theirs) not in NEVER) and (mine, known(name)) not in PLAIN:
            yield f"{place(module, line)} {mine} may not import {theirs}: {name}"


def test_a_module_imports_its_own_folder_and_lower_layers() -> None:
    assert_none(line for module in modules() if module for line in forbidden(module))


def loaded_with(module: str) -> set[str]:
    """Names of other packages that importing a module imports, through whatever modules of oncurve."""
    seen, left, others = set(), [module], set()
    while left:
        current = left.pop()
        if current in seen:
            continue
        seen.add(current)
        left += [".".join(current.split(".")[:end]) for end in range(current.count(".") + 1)]
        for name in imports(modules()[current], when_loaded=True):
            inside = known(name)
            if inside is None:
                others.add(name.split(".")[0])
            else:
                left.append(inside)
    return others


def test_modules_without_tensors_never_load_torch() -> None:
    light = [module for module in modules() if unit(module) in TORCH_FREE and module not in EXCEPT]
    assert {unit(module) for module in light} == set(TORCH_FREE)
    heavy = {module: sorted(loaded_with(module) & set(HEAVY)) for module in light}
    assert_none(f"{place(module)} loads {', '.join(names)}" for module, names in heavy.items() if names)


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys, oncurve.cli.app; print(sorted({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_is_shown_without_torch() -> None:
    code = "import sys; sys.argv = ['oncurve', '--help']; from oncurve.cli.app import main; main()"
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    imported = {line.rsplit("|", maxsplit=1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "transformers", "datasets", "matplotlib"}
