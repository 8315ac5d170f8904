"""Encoding of the values that may cross between a program and the outside.

A payload is what JSON can hold. None, booleans, strings, short integers and finite floats stand for themselves;
everything else is a list whose first element says what it is. Nothing but data of exact builtin types comes out of
``decode``: a program can send wrong values, never code and never an object with methods of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from math import isfinite
from pathlib import PurePath, PurePosixPath
from typing import Any
from uuid import UUID

MAX_DEPTH = 100
"""Deeper values are refused, so that no recursion below can overflow."""
MAX_LENGTH = 2_000_000
"""Longest iterator that is written out."""
_SHORT = 2**62

MAX_NAME_CHARACTERS = 100
KINDS = ("function", "async", "object", "exception")
"""Kinds of references; an object comes with the name of its class, an exception with its base's as well."""
MINE, YOURS = "mine", "yours"
"""Tags of a reference to an object that stays where it is: with the sender, with the receiver."""
_PLAIN: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {**_PLAIN, "g": iter, "q": deque}
_TIMES: dict[str, Any] = {"date": date, "time": time, "datetime": datetime}
_DICT = "d"
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, type(None))
}

Payload = Any
Export = Callable[[Any], Payload]
Resolve = Callable[[Payload], Any]


class NotData(ValueError):
    """The value is an object with behaviour, or too deep, or malformed: it may not cross."""


def encode(value: Any, export: Export | None = None, depth: int = 0) -> Payload:
    """The payload of a value; ``export`` gets what is not data.

    Subclasses count as the builtin type they extend, since only their data is sent.

    Raises NotData for an object that ``export`` does not take, and for nesting beyond ``MAX_DEPTH``.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -_SHORT < number < _SHORT else ["i", hex(number)]
    if isinstance(value, float):
        real = float.__float__(value)
        return real if isfinite(real) else ["f", repr(real)]
    if depth > MAX_DEPTH:
        raise NotData(f"nested more than {MAX_DEPTH} deep")
    return _encode_container(value, export, depth + 1)


def _encode_container(value: Any, export: Export | None, depth: int) -> Payload:
    for tag, kind in _PLAIN.items():
        if isinstance(value, kind):
            return [tag, *(encode(item, export, depth) for item in kind.__iter__(value))]
    if isinstance(value, dict):
        flat: list[Payload] = [_DICT]
        for key, item in dict.items(value):
            flat += (encode(key, export, depth), encode(item, export, depth))
        return flat
    scalar = _encode_scalar(value)
    if scalar is not None:
        return scalar
    name = f"{type(value).__module__}.{type(value).__name__}"
    if name.startswith(("numpy.", "array.")) and hasattr(value, "tolist"):
        return encode(value.tolist(), export, depth)
    if isinstance(value, deque):
        return ["q", *(encode(item, export, depth) for item in deque.__iter__(value))]
    if _is_view_or_iterator(value):
        return ["g", *(encode(item, export, depth) for item in _bounded(value))]
    if export is not None:
        return export(value)
    raise NotData(f"an object of type {type(value).__name__} is not data")


def _encode_scalar(value: Any) -> Payload:
    """The payload of bytes, a rarer number, a time or a builtin type; None if it is none of them."""
    if isinstance(value, bytes | bytearray):
        return ["b" if isinstance(value, bytes) else "B", bytes(value).decode("latin-1")]
    if isinstance(value, Decimal):
        return ["D", Decimal.__str__(value)]
    if isinstance(value, PurePath):
        return ["path", PurePath.__str__(value)]
    if isinstance(value, type):
        return ["T", value.__name__] if _TYPES.get(value.__name__) is value else None
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value)
    name = type(value).__name__
    return [name, value.isoformat()] if _TIMES.get(name) is type(value) else None


_WRITERS: tuple[tuple[type, Callable[[Any], Payload]], ...] = (
    (complex, lambda value: ["c", encode(value.real), encode(value.imag)]),
    (Fraction, lambda value: ["F", encode(value.numerator), encode(value.denominator)]),
    (range, lambda value: ["r", encode(value.start), encode(value.stop), encode(value.step)]),
    (timedelta, lambda value: ["delta", value.days, value.seconds, value.microseconds]),
    (UUID, lambda value: ["uuid", f"{value.int:032x}"]),
)


def _is_view_or_iterator(value: Any) -> bool:
    """Builtin iterators only: those of a class of the program would run its code as data."""
    kind = type(value)
    return kind.__module__ in ("builtins", "itertools") and (
        hasattr(kind, "__next__") or kind.__name__ in ("dict_keys", "dict_values", "dict_items")
    )


def _bounded(values: Iterable[Any]) -> Iterable[Any]:
    for index, value in enumerate(values):
        if index >= MAX_LENGTH:
            raise NotData(f"an iterator of more than {MAX_LENGTH} values")
        yield value


def decode(payload: Payload, resolve: Resolve | None = None, depth: int = 0) -> Any:
    """The value of a payload; ``resolve`` gets references to objects of either side.

    Raises NotData for anything that ``encode`` would not have written.
    """
    if payload is None or isinstance(payload, bool | int | float | str):
        return payload
    if not isinstance(payload, list) or not payload or not isinstance(payload[0], str) or depth > MAX_DEPTH:
        raise NotData("malformed data")
    tag, items = payload[0], payload[1:]
    if tag in (MINE, YOURS):
        if resolve is None:
            raise NotData("an object is not data")
        return resolve(payload)
    try:
        if tag == _DICT:
            decoded = [decode(item, resolve, depth + 1) for item in items]
            return dict(zip(decoded[::2], decoded[1::2], strict=True))
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([decode(item, resolve, depth + 1) for item in items])
        return _scalar(tag, items)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise NotData(f"malformed data: {type(error).__name__}") from error


_READERS: dict[str, tuple[tuple[type, ...], Callable[..., Any]]] = {
    "i": ((str,), lambda text: int(text, 16)),
    "f": ((str,), float),
    "c": ((object, object), lambda real, imaginary: complex(decode(real), decode(imaginary))),
    "D": ((str,), Decimal),
    "F": ((object, object), lambda top, bottom: Fraction(decode(top), decode(bottom))),
    "r": ((object, object, object), lambda *ends: range(*map(decode, ends))),
    "b": ((str,), lambda text: text.encode("latin-1")),
    "B": ((str,), lambda text: bytearray(text.encode("latin-1"))),
    "T": ((str,), lambda name: _TYPES[name]),
    "delta": ((int, int, int), timedelta),
    "uuid": ((str,), UUID),
    "path": ((str,), PurePosixPath),
    **{name: ((str,), kind.fromisoformat) for name, kind in _TIMES.items()},
}


def _scalar(tag: Any, items: list[Payload]) -> Any:
    kinds, read = _READERS.get(tag, ((), None))
    if read is None or len(kinds) != len(items) or not all(map(isinstance, items, kinds)):
        raise NotData("malformed data")
    return read(*items)


def check(payload: Payload, *, allow_references: bool = False, depth: int = 0) -> None:
    """Refuses what ``encode`` would not have written, without building the value.

    Building it could be made slow on purpose, with keys that share one hash; looking at it is linear.

    Raises NotData.
    """
    if payload is None or isinstance(payload, bool | int | str) or (isinstance(payload, float) and isfinite(payload)):
        return
    if not isinstance(payload, list) or not payload or not isinstance(payload[0], str) or depth > MAX_DEPTH:
        raise NotData("malformed data")
    tag = payload[0]
    if tag in (MINE, YOURS):
        if not allow_references or not _is_reference(payload):
            raise NotData("an object is not data")
    elif tag in _SEQUENCES or (tag == _DICT and len(payload) % 2 == 1):
        for item in payload[1:]:
            check(item, allow_references=allow_references, depth=depth + 1)
    else:
        try:
            _scalar(tag, payload[1:])
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise NotData("malformed data") from error


def _is_reference(payload: list[Payload]) -> bool:
    numbers = [item for item in payload[1:2] if isinstance(item, int) and not isinstance(item, bool)]
    names = [item for item in payload[3:] if isinstance(item, str) and len(item) <= MAX_NAME_CHARACTERS]
    return len(payload) - 3 == len(names) <= 2 and len(numbers) == 1 and payload[2] in KINDS
