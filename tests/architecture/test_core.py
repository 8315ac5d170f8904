"""The core stands alone: the loop and everything that it imports, inside functions too, is the folder ``core``."""

from __future__ import annotations

import pytest
from source import imports, known, modules

MAX_FILES, MAX_LINES = 16, 4000
ALLOWED = {"torch", "transformers", "numpy", "jaxtyping", "safetensors"}
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


@pytest.mark.xfail(strict=True, reason="the loop imports most of the package")
def test_the_loop_imports_the_core_and_nothing_else() -> None:
    assert {module.split(".")[0] for module in closure("core.loop")} == {"core"}
