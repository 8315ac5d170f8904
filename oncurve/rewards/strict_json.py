"""Strict reader of the JSON in a completion, and how much of it is right."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

from oncurve.rewards.answer_locations import MAX_TEXT_CHARACTERS, answer_tag
from oncurve.rewards.code_blocks import fenced_blocks
from oncurve.rewards.thinking import after_thinking

Around = Literal["nothing", "fence", "text"]
"""Text allowed around the JSON: only space; exactly one fence; or text, of which the last fence or object counts."""

JsonSource = Literal["text", "answer_tag"]
"""Where the JSON stands: in what follows the thinking, or in the answer tag."""

MAX_NESTING = 64
MAX_DIGITS = 100
MAX_TRIED_STARTS = 200
"""Brackets in a text at which JSON may begin."""
_SPACE = " \t\r\n"
_MARK = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def json_text(text: str, *, around: Around = "nothing", source: JsonSource = "text") -> str | None:
    """The part of a completion that should be JSON; None if there is other text where none may be."""
    spoken = after_thinking(text)
    body = answer_tag(spoken) if source == "answer_tag" else spoken
    if body is None or len(body) > MAX_TEXT_CHARACTERS:
        return None
    body = body.strip(_SPACE)
    if around == "nothing" or (around == "fence" and not body.startswith(("```", "~~~"))):
        return body
    blocks = list(fenced_blocks(body))
    if not blocks:
        return _last_value(body) if around == "text" else body
    if around == "text":
        blocks = [block for block in blocks if block.language.casefold() in ("", "json")][-1:]
    if len(blocks) != 1 or blocks[0].language.casefold() not in ("", "json"):
        return None
    content = blocks[0].content
    num_lines = len(body.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    is_alone = num_lines == content.count("\n") + 3 and body.endswith(("```", "~~~"))
    return content.strip(_SPACE) if around == "text" or is_alone else None


def _last_value(text: str) -> str:
    """The last object in a text, or the last list where there is no object; the text itself if it has neither.

    A draft may stand before it.
    """
    for opening in "{[":
        values, start, reader = [], text.find(opening), json.JSONDecoder()
        for _ in range(MAX_TRIED_STARTS):
            if start < 0:
                break
            try:
                _, end = reader.raw_decode(text, start)
                values.append(text[start:end])
            except (ValueError, RecursionError):
                end = start + 1
            start = text.find(opening, end)
        if values:
            return values[-1]
    return text


def parse_json(text: str) -> Any:
    """The value of a JSON text, without what lenient readers let pass.

    Refused are NaN and infinities, numbers beyond a double or of more than 100 digits, a key that stands twice, and
    more than 64 levels of nesting.

    Raises ValueError.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' stands twice
    """
    if len(text) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"longer than {MAX_TEXT_CHARACTERS} characters")
    _check_nesting(text)
    return json.loads(
        text,
        object_pairs_hook=_object_of,
        parse_constant=_refuse_constant,
        parse_int=_integer_of,
        parse_float=_float_of,
    )


def _check_nesting(text: str) -> None:
    depth = 0
    for match in _MARK.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match.group(), 0)
        if depth > MAX_NESTING:
            raise ValueError(f"nested deeper than {MAX_NESTING} levels")


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {key[:60]!a} stands twice")
        fields[key] = value
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _integer_of(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return int(digits)


def _float_of(digits: str) -> float:
    value = float(digits) if len(digits) <= MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise ValueError(f"a number of more than {MAX_DIGITS} digits or beyond a double")
    return value


def json_of(value: object) -> Any:
    """A column of a row as JSON: text is read strictly, anything else goes through JSON once.

    Raises ValueError if it is no JSON.
    """
    try:
        return parse_json(value if isinstance(value, str) else json.dumps(value, allow_nan=False))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def without_nulls(value: Any) -> Any:
    """A value without the keys that are null: ``datasets`` gives all rows of a struct column the same keys.

    >>> without_nulls({"a": 1, "b": None, "c": [{"d": None}]})
    {'a': 1, 'c': [{}]}
    """
    match value:
        case dict():
            return {key: without_nulls(child) for key, child in value.items() if child is not None}
        case list():
            return [without_nulls(child) for child in value]
        case _:
            return value


def fields_fraction(value: object, gold: object) -> float:
    """The share of fields that are as in the reference, among all that either of the two has.

        fraction = |equal leaves| / |leaves of value or of gold|

    A leaf is a value without children, known by its path; lists count by index. Dividing by the union makes guessing
    further fields cost something. 1.0 means that the two are equal; 1 equals 1.0 and true equals neither.

    >>> fields_fraction({"a": 1, "b": [2, 3]}, {"a": 1.0, "b": [2]})
    0.6666666666666666
    """
    answered, expected = dict(_leaves(value)), dict(_leaves(gold))
    num_equal = sum(path in answered and answered[path] == leaf for path, leaf in expected.items())
    return num_equal / len(answered.keys() | expected.keys())


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], tuple[str, Any]]]:
    match value:
        case dict() if value:
            for key, child in value.items():
                yield from _leaves(child, (*path, key))
        case list() if value:
            for index, child in enumerate(value):
                yield from _leaves(child, (*path, index))
        case bool() | None:
            yield path, ("constant", value)
        case dict() | list():
            yield path, (type(value).__name__, None)
        case str():
            yield path, ("string", value)
        case _:
            yield path, ("number", value)
