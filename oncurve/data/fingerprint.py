"""Fingerprints of Python objects that a run is given, by which a resumed run knows that they are the same."""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Values whose text says all about them."""
CODE = (FunctionType, BuiltinFunctionType, MethodType, type, partial)


@dataclass
class Fingerprint:
    """A digest of an object, and what in it could not be looked into, so that its change would not be noticed."""

    unseen: list[str] = field(default_factory=list)
    _digest: Any = field(default_factory=hashlib.sha256)
    _met: set[int] = field(default_factory=set)
    _alive: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The digest in hexadecimal."""
        return self._digest.hexdigest()

    def add_callable(self, function: Any) -> None:
        """A function, method, class, partial or callable object: name, source and the values it was made with.

        Functions, classes and constants of the same module that its code names count with it.
        """
        if id(function) in self._met:
            return
        self._met.add(id(function))
        function = inspect.unwrap(function, stop=_says_any_name)
        match function:
            case MethodType():
                self.add_callable(function.__func__)
                self._add_owner(function.__self__)
            case partial():
                self.add_callable(function.func)
                self.add([function.args, function.keywords])
            case FunctionType():
                self._add(function.__qualname__)
                self._add_source(function)
                self._add_surroundings(function)
            case type():
                self._add(function.__qualname__)
                self._add_class(function)
            case BuiltinFunctionType():
                self._add(f"{function.__module__}.{function.__qualname__}")
            case _:
                self._add_owner(function)

    def add(self, value: Any) -> None:
        """A value: plain ones by their text, containers by what they hold, code by its source, others by their type."""
        if isinstance(value, CODE) or (callable(value) and not isinstance(value, Mapping)):
            self.add_callable(value)
        elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
            self._add_container(value)
        elif (text := _text_of(value)) is not None:
            self._add(text)
        else:
            self._add(_kind(value))
            self._miss(f"a value of type {_kind(value)}")

    def _add_container(self, container: Any) -> None:
        if id(container) in self._met:  # it holds itself, or stands here twice
            self._add("again")
            return
        self._met.add(id(container))
        self._alive.append(container)  # so that nothing else gets its number
        parts = container.items() if isinstance(container, Mapping) else container
        self._add("[")
        for part in sorted(parts, key=repr) if isinstance(container, (set, frozenset)) else parts:
            self.add(part)
        self._add("]")

    def _add(self, text: str) -> None:
        self._digest.update(f"{text}\0".encode("utf-8", "surrogatepass"))

    def _miss(self, what: str) -> None:
        if what not in self.unseen:
            self.unseen.append(what)

    def _add_owner(self, owner: Any) -> None:
        """An object: its class and its attributes, those in slots included. A class alone has no others."""
        self.add_callable(owner if isinstance(owner, type) else type(owner))
        if not isinstance(owner, (type, ModuleType)):
            try:
                self.add(object.__getstate__(owner))
            except TypeError:  # it is made of something that has no attributes to look into
                self._miss(f"a value of type {_kind(owner)}")

    def _add_class(self, owner: type) -> None:
        """Its methods and constants, and those of the classes beside it that it is made from."""
        for name, value in sorted(vars(owner).items()):
            code = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(code, FunctionType) and not (code.__code__.co_filename == "<string>" and name[:2] == "__"):
                self.add_callable(code)  # and not what a dataclass made for itself
            elif isinstance(value, PLAIN) and not name.startswith("__"):
                self._add(f"{name} {value!r}")
        for base in owner.__bases__:
            if base.__module__ == owner.__module__:
                self.add_callable(base)

    def _add_source(self, code: Any) -> None:
        """The source; a class of the standard library or of an installed package counts by its name."""
        try:
            self._add(inspect.getsource(code))
        except (OSError, TypeError):
            self._miss(f"{code.__qualname__}, whose source cannot be read")
            if isinstance(code, FunctionType):
                self._add(
                    code.__code__.co_code.hex() + repr([c for c in code.__code__.co_consts if isinstance(c, PLAIN)])
                )

    def _add_surroundings(self, function: FunctionType) -> None:
        """Add what a function closes over, its defaults, and what it names of its own module."""
        self.add([function.__defaults__, function.__kwdefaults__])
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(name)
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not assigned yet
                self._add("empty")
        for name in sorted(_named(function.__code__)):
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            if isinstance(value, (FunctionType, type)) and value.__module__ == function.__module__:
                self.add_callable(value)
            elif isinstance(value, (*PLAIN, list, tuple, dict, set, frozenset, re.Pattern)):
                self._add(name)
                self.add(value)


def _says_any_name(value: Any) -> bool:
    """It wraps nothing, even if it has an attribute of every name, as mocks and proxies have."""
    return inspect.getattr_static(value, "__wrapped__", None) is None


def fingerprint(value: Any) -> Fingerprint:
    """The fingerprint of a reward function or object."""
    result = Fingerprint()
    result.add_callable(value)
    return result


def rows_fingerprint(rows: Iterable[Mapping[str, Any]]) -> Fingerprint:
    """The fingerprint of rows with all their columns, and columns whose values could not be looked into."""
    result = Fingerprint()
    for row in rows:
        try:
            result.add(json.dumps(row, sort_keys=True))
        except (TypeError, ValueError):  # more than plain values
            result.add(row)
    return result


def _text_of(value: Any) -> str | None:
    """All that a value says, as text; None where its text does not say it."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, re.Pattern):
        return f"{value.pattern!r} {value.flags}"
    return value.__name__ if isinstance(value, ModuleType) else None


def _named(code: CodeType) -> set[str]:
    """Names that a function's code looks up and never assigns, those of functions inside of it included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    return set(code.co_names).union(*map(_named, inner)) - assigned


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
