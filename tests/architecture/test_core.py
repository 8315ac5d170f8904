"""The core stands alone: the loop and everything that it imports, inside functions too, is the folder ``core``."""

from __future__ import annotations

import sys

from source import PACKAGE, imports, known, modules

MAX_FILES, MAX_LINES = 16, 4000
ALLOWED = {"torch", "transformers", "numpy", "jaxtyping"}
"""Packages of others that the core may import."""


def closure(module: str) -> set[str]:
    """A module and everything of the package that it imports, wherever the import stands, with the folders above."""
    found: set[str] = set()
    left = [module]
    while left:
        current = left.pop()
        if current not in found:
            found.add(current)
            left += [current.rpartition(".")[0]] if "." in current else []
            left += [theirs for name in imports(modules()[current]) if (theirs := known(name))]
    return found


def test_the_loop_imports_the_core_and_nothing_else_of_the_package() -> None:
    found = closure("core.loop")
    assert {module.split(".")[0] for module in found} == {"core"}


def test_the_core_imports_few_packages_of_others() -> None:
    names = {name.split(".")[0] for module in core() for name in imports(modules()[module]) if known(name) is None}
    assert names - set(sys.stdlib_module_names) <= ALLOWED


def test_the_core_is_small() -> None:
    files = sorted(PACKAGE.joinpath("core").glob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert len(files) <= MAX_FILES, [path.name for path in files]
    assert lines <= MAX_LINES, lines


def test_every_module_of_the_core_imports_the_core_alone() -> None:
    assert {theirs for module in core() for theirs in closure(module)} == core()


def core() -> set[str]:
    """The modules of the core."""
    return {module for module in modules() if module.split(".")[0] == "core"}
