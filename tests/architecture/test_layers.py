"""May a module import what it imports?

    0  core
    1  chat_messages   version_spans   wording   run_errors   constants   stats   tables   section   extensions
    2  algorithm   sandbox   observe   recipes   user_code
    3  model   rewards   tasks
    4  sample   data
    5  episodes   policy   evaluate   doctor
    5  recipe
    6  plan
    7  report
    8  run   coldstart
    9  history
    10 cli
    11 __main__

    extensions, each of which may import those before it, and the core below ``cli``: agents   fleet   trl

A module imports its own folder and lower layers, wherever in it the import stands. The core imports no extension: what
one adds is named in ``oncurve/extensions.py``. That no two modules import each other stands in test_rooms.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from offenders import assert_none
from source import files, imports, imports_with_lines, known, modules, place

from oncurve.extensions import TABLE

LAYERS = (
    ("core",),
    (
        "chat_messages",
        "version_spans",
        "wording",
        "run_errors",
        "constants",
        "stats",
        "tables",
        "section",
        "extensions",
    ),
    ("algorithm", "sandbox", "observe", "recipes", "user_code"),
    ("model", "rewards", "tasks"),
    ("sample", "data"),
    ("episodes", "policy", "evaluate", "doctor"),
    ("recipe",),
    ("plan",),
    ("report",),
    ("run", "coldstart"),
    ("history",),
    ("cli",),
    ("__main__",),
)
EXTENSIONS = ("agents", "fleet", "trl")
LAYER = {unit: layer for layer, units in enumerate(LAYERS) for unit in units}
NEVER = {
    ("sample", "rewards"),
    ("episodes", "rewards"),
    ("sample", "sandbox"),
}
"""Pairs that the layers would allow: sampling knows no rewards, and formulas no files."""
PLAIN = ("run.settings", "fleet.settings")
"""Settings of rooms above the recipe, which lists them."""
TORCH_FREE = (
    "core.records", "core.errors", "core.grading", "stats", "tables", "section", "user_code", "recipe", "rewards",
    "sandbox", "tasks", "observe", "recipes", "data", "doctor", "plan", "cli", "fleet.launch", "trl.conversion",
)  # fmt: skip
HEAVY = ("torch", "transformers", "datasets", "jaxtyping")


def unit(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def test_every_module_has_a_layer() -> None:
    assert {unit(module) for module in modules() if module} == {*LAYER, *EXTENSIONS}


def may_import(mine: str, theirs: str) -> bool:
    """By the layers of the core and the order of the extensions."""
    if mine in EXTENSIONS:
        before = EXTENSIONS[: EXTENSIONS.index(mine)]
        return theirs in before or (theirs in LAYER and LAYER[theirs] < LAYER["cli"])
    return theirs in LAYER and LAYER[theirs] < LAYER[mine] and (mine, theirs) not in NEVER


def forbidden(module: str) -> Iterator[str]:
    """Every import of a module that its layer does not allow."""
    mine = unit(module)
    for name, line in imports_with_lines(modules()[module]):
        theirs = unit(known(name) or "")
        if theirs and theirs != mine and known(name) not in PLAIN and not may_import(mine, theirs):
            yield f"{place(module, line)} {mine} may not import {theirs}: {name}"


def named_extensions(module: str) -> Iterator[str]:
    """Texts that name a module of an extension, by which it could be imported."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            inside = re.match(r"oncurve\.(\w+)\.\w+(:|\.|$)", node.value)
            if inside and inside[1] in EXTENSIONS:
                yield f"{place(module, node.lineno)} names {node.value}: put it into oncurve/extensions.py"


def test_a_module_imports_its_own_folder_and_lower_layers() -> None:
    assert_none(line for module in modules() if module for line in forbidden(module))


def test_the_core_names_extensions_in_one_table_alone() -> None:
    core = [module for module in modules() if module and unit(module) not in {*EXTENSIONS, "extensions"}]
    assert_none(line for module in core for line in named_extensions(module))
    assert list(named_extensions("extensions")), "the table is there"


@pytest.mark.parametrize("name", TABLE)
def test_every_extension_is_there_and_used(name: str) -> None:
    place, _, attribute = TABLE[name].partition(":")
    tree = modules()[place.removeprefix("oncurve.")]
    assert attribute in {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    asked = [text for path in files() if f'extension("{name}")' in (text := path.read_text(encoding="utf-8"))]
    assert asked


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


@pytest.mark.proves("F156")
def test_modules_without_tensors_never_load_torch() -> None:
    rooms = {room: [module for module in modules() if f"{module}.".startswith(f"{room}.")] for room in TORCH_FREE}
    assert all(rooms.values())
    light = [module for found in rooms.values() for module in found]
    heavy = {module: sorted(loaded_with(module) & set(HEAVY)) for module in light}
    assert_none(f"{place(module)} loads {', '.join(names)}" for module, names in heavy.items() if names)


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("oncurve.cli.app", ("torch", "transformers", "numpy", "pydantic")),
        ("oncurve.recipe.load", ("torch", "transformers", "numpy", "jsonschema", "httpx", "openai")),
    ],
)
def test_commands_and_recipes_are_read_without_slow_libraries(module: str, slow: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(sorted({set(slow)!r} & set(sys.modules)))"
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
