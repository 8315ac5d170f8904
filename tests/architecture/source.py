"""The source of oncurve as syntax trees, for the tests of this folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "oncurve"


@cache
def modules() -> dict[str, ast.Module]:
    """Every module by its name without ``oncurve.``; the package itself is "". Files beside a recipe are none."""
    inside = (path for path in files() if (path.parent / "__init__.py").is_file())
    return {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in inside}


@cache
def files() -> tuple[Path, ...]:
    """Every Python file of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


def place(module: str, line: int = 1) -> str:
    """File and line of something in a module, as an editor opens them."""
    stem = PACKAGE.joinpath(*filter(None, module.split(".")))
    path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
    return f"{path.relative_to(PACKAGE.parent)}:{line}"


def module_name(path: Path) -> str:
    """``sample.draw`` for the file of that name, ``sample`` for the ``__init__.py`` of a folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, *, when_loaded: bool = False) -> Iterator[str]:
    """What a module imports, with dots; ``when_loaded`` leaves out what is imported inside functions or for types.

    A text that goes to ``import_module`` counts too.
    """
    return (name for name, _ in imports_with_lines(tree, when_loaded=when_loaded))


@cache
def imports_with_lines(tree: ast.AST, *, when_loaded: bool = False) -> tuple[tuple[str, int], ...]:
    """The same, each with its line."""
    return tuple(_imports(tree, when_loaded=when_loaded))


def _imports(tree: ast.AST, *, when_loaded: bool) -> Iterator[tuple[str, int]]:
    left = [tree]
    while left:
        node = left.pop()
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if when_loaded and (is_for_types or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and is_import_module(node.func):
            names = (each.value for each in node.args if isinstance(each, ast.Constant))
            yield from ((str(name), node.lineno) for name in names)
        left += ast.iter_child_nodes(node)


def is_import_module(function: ast.expr) -> bool:
    """``import_module`` or ``importlib.import_module``."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name == "import_module"


@cache
def known(name: str) -> str | None:
    """The module of oncurve behind an import such as ``oncurve.core.batch.Batch``; None for other packages."""
    parts = name.split(".")
    if parts[0] != "oncurve":
        return None
    return next((found for end in range(len(parts), 1, -1) if (found := ".".join(parts[1:end])) in modules()), "")
