"""Stand-in that test code finds as pytest: raises, approx and parametrize, without fixtures."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from .assertions import uncalled_tests

_PARAMETERS = "__parameters__"


class _Approx:
    """A number that equals those near to it."""

    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self._expected, self._rel, self._abs = expected, rel, abs

    def __eq__(self, other: object) -> bool:
        if isinstance(self._expected, list | tuple):
            return (
                isinstance(other, list | tuple)
                and len(other) == len(self._expected)
                and all(_Approx(a, self._rel, self._abs) == b for a, b in zip(self._expected, other, strict=True))
            )
        if type(other) not in (int, float):
            return other == self._expected
        return abs(other - self._expected) <= max(self._rel * abs(self._expected), self._abs)

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def _raises(kinds: Any, match: str | None = None) -> Iterator[SimpleNamespace]:
    info = SimpleNamespace(value=None, type=None)
    try:
        yield info
    except kinds as error:
        info.value, info.type = error, type(error)
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {match!r}") from error
    else:
        raise AssertionError(f"{kinds} was not raised")


class _Mark:
    """Marks of pytest, of which only ``parametrize`` means anything here."""

    def parametrize(self, names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
        """Calls the test once for every value."""
        listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(listed, row if len(listed) > 1 else (row,), strict=True)) for row in values]

        def mark(function: Any) -> Any:
            before = vars(function).get(_PARAMETERS, [{}])
            setattr(function, _PARAMETERS, [{**old, **new} for old in before for new in rows])
            return function

        return mark

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **_: args[0] if len(args) == 1 and callable(args[0]) else lambda function: function


def stand_in() -> ModuleType:
    """The module that test code imports as pytest."""
    module = ModuleType("pytest")
    vars(module).update(raises=_raises, approx=_Approx, mark=_Mark(), main=lambda *_, **__: 0)
    return module


def calls_of(source: str, namespace: Mapping[str, Any]) -> Iterator[Callable[[], Any]]:
    """Every test that code leaves to pytest, once for each of its parameters."""
    tree = ast.parse(source)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    names = [node.name for node in uncalled_tests(tree)]
    for name in names:
        if name in functions:
            yield from _expanded(namespace[name])
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test") and not node.bases:
            for name in vars(namespace[node.name]):
                if name in names and name not in functions:
                    yield from _expanded(vars(namespace[node.name])[name], namespace[node.name])


def _expanded(function: Any, kind: Any = None) -> Iterator[Callable[[], Any]]:
    for parameters in vars(function).get(_PARAMETERS, [{}]):
        yield partial(_run, function, kind, parameters)


def _run(function: Any, kind: Any, parameters: Mapping[str, Any]) -> None:
    own = () if kind is None else (kind(),)
    result = function(*own, **parameters)
    if inspect.iscoroutine(result):
        asyncio.run(result)
