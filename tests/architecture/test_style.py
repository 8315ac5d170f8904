"""Can every file be read at one sitting, and does it say what it is for?"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from source import files, module_name, modules

MAX_LINES, MAX_FUNCTION_LINES = 400, 60
MAX_GUESSES = 25
"""Calls of getattr and hasattr in the whole package: each is a place that does not know what it was given."""

every_module = pytest.mark.parametrize("module", list(modules()))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def public(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """Functions, classes and methods that others may use, with the names under which they do."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                yield from ((f"{node.name}.{name}", method) for name, method in public(node))


def test_no_file_is_longer_than_a_sitting() -> None:
    lengths = {module_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@every_module
def test_no_function_is_longer_than_a_screen(module: str) -> None:
    lengths = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions(modules()[module])}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


@every_module
def test_everything_public_says_what_it_is(module: str) -> None:
    tree = modules()[module]
    assert ast.get_docstring(tree), f"{module} has no docstring"
    assert [name for name, node in public(tree) if not ast.get_docstring(node)] == []  # type: ignore[arg-type]


@every_module
def test_every_function_has_types(module: str) -> None:
    for function in functions(modules()[module]):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        bare = [argument.arg for argument in arguments if argument.annotation is None]
        assert set(bare) <= {"self", "cls", "ctx"}, f"{function.name}: {bare}"
        assert function.returns is not None, f"{function.name} does not say what it returns"


@every_module
def test_every_exception_is_caught_at_one_boundary_only(module: str) -> None:
    """Elsewhere a handler names what it expects, or cleans up and raises again."""
    for node in ast.walk(modules()[module]):
        if not isinstance(node, ast.ExceptHandler):
            continue
        is_broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
        raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        assert not is_broad or raises_again or module == "rewards.base", f"line {node.lineno} catches everything"


def test_objects_are_known_and_not_guessed_at() -> None:
    calls = [node for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    guesses = [call for call in calls if ast.unparse(call.func) in ("getattr", "hasattr")]
    assert len(guesses) <= MAX_GUESSES


def test_no_file_is_named_after_nothing() -> None:
    names = {path.stem for path in files()}
    assert not names & {"utils", "util", "helpers", "misc", "common", "manager"}
