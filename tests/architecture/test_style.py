"""Can every function be read on a screen, and does it say what it is for?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from offenders import assert_none, at
from source import files, modules, place

MAX_FUNCTION_LINES = 60
MAX_GUESSES = 1
"""Attributes asked for by a text, in a thousand lines: each is a place that does not know what it was given."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def all_functions() -> Iterator[tuple[str, Function]]:
    """Every function of the package with the module that it stands in."""
    nodes = ((module, node) for module, tree in modules().items() for node in ast.walk(tree))
    return ((module, node) for module, node in nodes if isinstance(node, Function))


def public(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Functions, classes and methods that others may use, with the names under which they do."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                yield from ((f"{node.name}.{name}", method) for name, method in public(node))


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = [(module, f, (f.end_lineno or 0) - f.lineno + 1) for module, f in all_functions()]
    assert len(lengths) > 1000
    assert_none(
        f"{place(module, f.lineno)} {f.name} has {length} lines, of {MAX_FUNCTION_LINES}"
        for module, f, length in lengths
        if length > MAX_FUNCTION_LINES
    )


def test_everything_public_says_what_it_is() -> None:
    silent = [place(module) for module, tree in modules().items() if not ast.get_docstring(tree)]
    nodes = [(module, name, node) for module, tree in modules().items() for name, node in public(tree)]
    silent += [f"{place(module, node.lineno)} {name}" for module, name, node in nodes if not ast.get_docstring(node)]
    assert_none(f"{where} has no docstring" for where in silent)


VAGUE = re.compile(r"(What|Who|Whoever|Whom|Whose|Of|Those|Since)\b")
"""First words of a sentence without a noun: ``Of the longest prompt`` does not say that it is about tokens."""


def test_docstrings_begin_with_the_thing_that_they_describe() -> None:
    texts = [
        (place(module, node.lineno), node.value.value)
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert len(texts) > 3000
    assert_none(f"{where}: {text.strip()[:60]}" for where, text in texts if VAGUE.match(text.strip()))


def untyped(function: Function) -> Iterator[str]:
    """What a function does not say about its types."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    bare = [argument.arg for argument in arguments if argument.annotation is None]
    yield from (f"the type of {name}" for name in bare if name not in ("self", "cls", "ctx"))
    if function.returns is None:
        yield "what it returns"


def test_every_function_has_types() -> None:
    assert_none(
        f"{place(module, function.lineno)} {function.name} does not say {what}"
        for module, function in all_functions()
        for what in untyped(function)
    )


def test_every_exception_is_caught_at_one_boundary_only() -> None:
    """Elsewhere a handler names what it expects, or cleans up and raises again."""
    handlers = [
        (module, node)
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
    ]
    assert len(handlers) > 100
    assert_none(
        f"{place(module, handler.lineno)} catches everything"
        for module, handler in handlers
        if module != "core.errors" and is_broad(handler)
    )


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether a handler takes every exception and keeps it."""
    takes_all = handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")
    raises_again = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
    return takes_all and not raises_again


def is_guess(call: ast.Call) -> bool:
    """``getattr``, ``hasattr``, or ``vars(x).get``, which misses what a class has and what a name stands for."""
    return ast.unparse(call.func) in ("getattr", "hasattr") or bool(
        re.fullmatch(r"vars\(.+\)\.get", ast.unparse(call.func))
    )


def test_objects_are_known_and_not_guessed_at() -> None:
    nodes = ((module, node) for module, tree in modules().items() for node in ast.walk(tree))
    guesses = [place(module, node.lineno) for module, node in nodes if isinstance(node, ast.Call) and is_guess(node)]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files())
    assert len(guesses) <= MAX_GUESSES * lines / 1000, "\n".join(guesses)


def test_no_file_is_named_after_nothing() -> None:
    says_nothing = {"utils", "util", "helpers", "misc", "common", "manager"}
    assert_none(at(path) for path in files() if path.stem in says_nothing)
