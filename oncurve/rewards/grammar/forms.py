"""Forms of answers that are no expressions: dates, times, ranges, ratios, amounts, congruences, tables of truth."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from oncurve.rewards.grammar.exact import rational
from oncurve.rewards.grammar.expressions import parse
from oncurve.rewards.grammar.lexemes import Token, Unreadable, closing, split, top
from oncurve.rewards.grammar.phrases import MONTHS
from oncurve.rewards.grammar.units import DEGREES, NO_UNIT, Unit, compose, unit_suffix
from oncurve.rewards.grammar.values import (
    Amounts,
    Congruence,
    Date,
    MatrixValue,
    Quantity,
    Range,
    Ratio,
    Time,
    Tree,
    Truths,
    Value,
    number,
)

_NUMBERED = {
    "pages": "page", "page": "page", "pp": "page", "p": "page",
} | {
    form: noun
    for noun in (
        "chapter", "verse", "line", "row", "question", "problem", "exercise", "section", "year", "age", "grade",
        "room", "day", "week", "step", "seat", "level",
    )
    for form in (noun, f"{noun}s")
}  # fmt: skip
"""Words before a range for what it numbers."""
_TO = frozenset(("to", "through", "until"))
ORDINALS = frozenset(("st", "nd", "rd", "th"))
MATRICES = frozenset(("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "psmallmatrix", "bsmallmatrix"))

Reader = Callable[[Sequence[Token]], Value]


def words(tokens: Sequence[Token]) -> list[str]:
    """The texts of tokens in lower case, without full stops."""
    return [token.text.lower() for token in tokens if token.text not in (".", "{}")]


def read_date(tokens: Sequence[Token]) -> Date | None:
    """A date in figures or with the name of the month; None for anything else."""
    tokens = [
        token for token in tokens if token.text not in ("{}",) and not (token.is_sign(".") and not token.has_space)
    ]
    texts = words([token for token in tokens if not token.is_sign(",")])
    texts = [text for text in texts if text not in ("the", "of", *ORDINALS)]
    numbers = [token for token in tokens if token.kind == "number"]
    if len(numbers) == 3 and [token.text for token in tokens[1::2]] in (["-", "-"], ["/", "/"]) and len(tokens) == 5:
        return _in_figures([token.text for token in numbers], tokens[1].text)
    if len(numbers) == 2 and len(tokens) == 3 and tokens[1].text == ".":
        return None
    names = [text for text in texts if text.isalpha()]
    month = next(
        (1 + index for index, name in enumerate(MONTHS) if names and names[0] in (name, name[:3], name[:4])), None
    )
    if month is None or len(names) != 1 or len(names) + len(numbers) != len(texts) or not 1 <= len(numbers) <= 2:
        return None
    if names[0] == "may" and len(tokens[0].text) == 3 and tokens[0].text == "may":
        return None
    day, year = numbers[0], numbers[1] if len(numbers) == 2 else None
    if not (day.text.isdigit() and 1 <= day.value <= 31) or (year is not None and len(year.text) != 4):
        return None
    return Date(int(year.value) if year else None, month, int(day.value))


def _in_figures(texts: list[str], sign: str) -> Date | None:
    if not all(text.isdigit() for text in texts):
        return None
    first, second, third = map(int, texts)
    if len(texts[0]) == 4:
        year, month, day = first, second, third
    elif sign == "/" and len(texts[2]) in (2, 4):
        year, month, day = third, first, second
        if month > 12:
            month, day = day, month
    else:
        return None
    return Date(year, month, day) if 1 <= month <= 12 and 1 <= day <= 31 and max(map(len, texts)) <= 4 else None


def read_time(tokens: Sequence[Token]) -> Time | None:
    """A time of day that names its half, or that is written with a colon; None for anything else."""
    tokens = [token for token in tokens if token.text != "{}"]
    if tokens and tokens[0].text.lower() == "at":
        tokens = tokens[1:]
    if (spoken := read_spoken_time(tokens)) is not None:
        return spoken
    parts, index = list[Token](), 0
    while index < len(tokens) and tokens[index].kind == "number" and len(parts) < 3:
        parts.append(tokens[index])
        index += 1
        if not (index + 1 < len(tokens) and tokens[index].is_sign(":") and tokens[index + 1].kind == "number"):
            break
        index += 1
    if not parts or not all(part.text.isdigit() for part in parts) or any(len(part.text) != 2 for part in parts[1:]):
        return None
    half, rest = _half_of_day(words(tokens[index:]))
    return _clock([int(part.value) for part in parts], half, rest)


def read_spoken_time(tokens: Sequence[Token]) -> Time | None:
    """Noon, midnight, ``3 o'clock``; None for anything else. Minutes that are told in words are no figures."""
    texts = words(tokens)
    if texts in (["noon"], ["midday"], ["midnight"]):
        return Time(0, "a", "") if texts == ["midnight"] else Time(12 * 3600, "p", "")
    if texts[1:4] != ["o", "'", "clock"] or tokens[0].kind != "number" or tokens[0].value.denominator > 1:
        return None
    half, rest = _half_of_day(texts[4:])
    return _clock([int(tokens[0].value), 0], half, rest)


def _half_of_day(texts: list[str]) -> tuple[str | None, str]:
    text = " ".join(texts)
    text = re.sub(r"^([ap]) m\b", r"\1m", text)
    for half, spellings in (
        ("a", ("am", "in the morning", "midnight")),
        ("p", ("pm", "in the afternoon", "in the evening", "at night", "noon")),
    ):
        for spelling in spellings:
            if text == spelling or text.startswith(spelling + " "):
                return half, text[len(spelling) :].strip()
    return None, text


def _clock(parts: list[int], half: str | None, rest: str) -> Time | None:
    hour, minute, second = [*parts, 0, 0][:3]
    if hour > (12 if half else 24) or (half and hour == 0) or minute > 59 or second > 59:
        return None
    if half is None and (len(parts) < 2 or rest):
        return None
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return Time(hour * 3600 + minute * 60 + second, half, rest)


def read_amounts(tokens: Sequence[Token]) -> Amounts | None:
    """A sum of quantities in smaller and smaller units: ``5 ft 6 in``, ``3 dollars and 25 cents``, ``5'6"``,
    ``45°30'``."""
    if len(tokens) > 1 and tokens[0].is_sign("$", "€", "£"):
        tokens = [tokens[1], tokens[0], *tokens[2:]]
    starts = [
        index
        for index, token in enumerate(tokens)
        if token.kind == "number" and not (index and tokens[index - 1].is_sign("^"))
    ]
    if not 2 <= len(starts) <= 4 or starts[0] != 0:
        return None
    names = [_name(tokens[start:stop]) for start, stop in pairwise([*starts, len(tokens)])]
    is_computed = any(
        token.is_sign("*") or token.text == "(" or (token.is_sign("-") and (token.has_space or token.mode != "text"))
        for token in tokens
    )
    if is_computed or any(tokens[start].base is not None for start in starts):
        return None
    units = [compose(name) or NO_UNIT for name in names]
    own = _ARC if units[0] == DEGREES else _TIME if any(unit.dimensions == _SECONDS for unit in units) else _LENGTH
    units = [own.get(_text(name), unit) for name, unit in zip(names, units, strict=True)]
    is_falling = all(
        larger.dimensions == smaller.dimensions and larger.factor > smaller.factor
        for larger, smaller in pairwise(units)
    )
    if not is_falling or not all(unit.dimensions and not unit.label for unit in units):
        return None
    total = sum((tokens[start].value * unit.factor for start, unit in zip(starts, units, strict=True)), Fraction(0))
    return Amounts(Quantity(number(total / units[0].factor), units[0]))


_LENGTH = {"'": Unit((("m", 1),), Fraction("0.3048")), '"': Unit((("m", 1),), Fraction("0.0254"))}
_ARC = {"'": Unit(DEGREES.dimensions, DEGREES.factor / 60), '"': Unit(DEGREES.dimensions, DEGREES.factor / 3600)}
_SECONDS = (("s", 1),)
_TIME = {"d": Unit(_SECONDS, Fraction(86_400)), "m": Unit(_SECONDS, Fraction(60))}
"""Signs behind a number that mean feet and inches, or behind degrees their minutes and seconds; letters beside another
unit of time."""


def _name(tokens: Sequence[Token]) -> list[Token]:
    """The tokens behind the number of a piece, without those that join it to the next."""
    name = list(tokens[1:])
    while name and (name[-1].text in (",", "and", "{}") or name[-1].is_sign("-")):
        name.pop()
    return name


def _text(name: Sequence[Token]) -> str:
    return "".join(token.text for token in name if token.text != "{}").replace("''", '"')


def read_ratio(tokens: Sequence[Token], quantity: Callable[[Sequence[Token]], Quantity]) -> Ratio | None:
    """``2:3`` or ``1:2:3``; None for anything without colons."""
    pieces = split(tokens, ":")
    if not 2 <= len(pieces) <= 8 or not all(pieces):
        return None
    members = tuple(quantity(piece) for piece in pieces)
    first, second = pieces[0], pieces[1]
    is_clock = (
        len(pieces) == 2
        and len(first) == len(second) == 1
        and first[0].kind == second[0].kind == "number"
        and len(first[0].text) <= 2
        and len(second[0].text) == 2
        and second[0].value < 60
    )
    return Ratio(members, is_clock)


def read_range(tokens: Sequence[Token], read: Reader) -> Range | None:
    """``3-6``, ``3 to 6``, ``from 3 to 5``, ``pages 7-12``; None for anything else."""
    tokens = list(tokens)
    label, has_from = "", False
    if tokens and tokens[0].kind == "open" and tokens[0].text in ("(", "[") and closing(tokens, 0) == len(tokens) - 1:
        tokens = tokens[1:-1]
    if tokens and tokens[0].text.lower() in _NUMBERED and len(tokens) > 3:
        label, tokens = _NUMBERED[tokens[0].text.lower()], tokens[1:]
        tokens = tokens[1:] if tokens[0].is_sign(".") else tokens
    if tokens and tokens[0].text.lower() in ("from", "between"):
        has_from, tokens = True, tokens[1:]
    is_word = any(token.text in _TO for token in tokens)
    signs = _TO if is_word else frozenset(("and",)) if has_from else frozenset(("-",))
    indices = [index for index, token in enumerate(tokens) if token.text in signs and 0 < index < len(tokens) - 1]
    if len(indices) != 1:
        return None
    low, high = tokens[: indices[0]], tokens[indices[0] + 1 :]
    if not is_word and not has_from and not (_is_plain_end(low) and _is_plain_end(high)):
        return None
    return _with_ends(low, high, read, label, None if is_word or has_from else tokens)


def _is_plain_end(tokens: Sequence[Token]) -> bool:
    """A number in figures with a currency or unit, or a time: what a hyphen joins to a range."""
    numbers = [token for token in tokens if token.kind == "number"]
    has_clock = len(numbers) == 2 and any(token.is_sign(":") for token in tokens)
    others = [
        token
        for token in tokens
        if token.kind not in ("number", "word") and not token.is_sign("%", "$", "€", "£", ":", "°")
    ]
    names_unit = all(token.mode == "text" or token.has_space for token in others if token.kind == "name")
    return (len(numbers) == 1 or has_clock) and all(token.kind == "name" for token in others) and names_unit


def _with_ends(
    low: list[Token], high: list[Token], read: Reader, label: str, whole: list[Token] | None
) -> Range | None:
    start, unit = unit_suffix(high)
    is_bare = unit_suffix(low)[1] == Unit() and not any(token.is_sign("$", "€", "£") for token in low)
    if unit and is_bare:
        low = low + high[start:]
    elif low and low[0].is_sign("$", "€", "£") and high[0].kind == "number":
        high = [low[0], *high]
    try:
        ends = read(low), read(high)
    except Unreadable:
        return None
    difference = None
    with suppress(Unreadable):
        difference = parse(whole) if whole is not None and not unit else None
    if not all(isinstance(end, (Quantity, Ratio, Time)) for end in ends):
        return None
    return Range(*ends, difference, label)


def read_congruence(
    tokens: Sequence[Token], members: Callable[[Sequence[Token]], list[list[Token]]]
) -> Congruence | None:
    """``x \\equiv 3 \\pmod 7``, ``3, 4 mod 7``; None for anything else."""
    indices = [index for index, token in enumerate(tokens) if token.is_sign("mod")]
    if len(indices) != 1:
        return None
    left = [token for token in tokens[: indices[0]] if token.text != "quad"]
    right = [token for token in tokens[indices[0] + 1 :] if token.text not in ("{}", "(", ")", "quad")]
    while left and left[-1].text in ("(", "{}") and left[-1].kind == "open":
        left.pop()
    if len(right) != 1 or right[0].kind != "number" or right[0].value.denominator != 1 or right[0].value < 1:
        return None
    name, is_class = "", any(token.is_sign("≡") for token in left)
    sides = split(left, "≡", "=")
    if len(sides) == 2 and len(sides[0]) == 1 and sides[0][0].kind == "name":
        name, left = sides[0][0].text, sides[1]
    elif len(sides) > 1:
        return None
    residues = []
    for member in members(left):
        value = rational(parse(member))
        has_sum = any(token.is_sign("+", "-") for token in member[1:])
        if value is None or value.denominator != 1 or has_sum:
            return None
        residues.append(int(value % right[0].value))
    return Congruence(name, frozenset(residues), int(right[0].value), is_class) if residues else None


def read_matrix(tokens: Sequence[Token]) -> MatrixValue | None:
    """A matrix, or numbers times a matrix; None for anything else."""
    tokens = list(tokens)
    begins = [index for index, token in enumerate(tokens) if token.kind == "begin"]
    if len(begins) != 1:
        return None
    start = begins[0]
    stop = closing(tokens, start)
    name = tokens[start].text
    is_array = name in ("array", "matrix") and start and tokens[start - 1].text in ("(", "[") and stop + 1 < len(tokens)
    before, after = tokens[: start - bool(is_array)], tokens[stop + 1 + bool(is_array) :]
    if name not in MATRICES and not is_array:
        return None
    is_turned = is_transposed(after)
    if after and not is_turned:
        return None
    rows = [split(row, "&") for row in split(tokens[start + 1 : stop], "\\\\") if row]
    cells = [[parse(cell) for cell in row] for row in rows]
    if not cells or len({len(row) for row in cells}) != 1:
        raise Unreadable("rows of different lengths")
    if is_turned:
        cells = [list(column) for column in zip(*cells, strict=True)]
    while before and before[-1].is_sign("*"):
        before.pop()
    if before:
        factor = number(-1) if len(before) == 1 and before[0].is_sign("-") else parse(before)
        cells = [[Tree("product", (factor, cell)) for cell in row] for row in cells]
    return MatrixValue(tuple(map(tuple, cells)))


def is_transposed(after: Sequence[Token]) -> bool:
    """Whether tokens are the sign of a transposed matrix."""
    texts = [token.text for token in after if token.text != "{}"]
    return len(texts) == 2 and texts[0] == "^" and texts[1] in ("T", "⊤")


def read_nested_list(tokens: Sequence[Token]) -> MatrixValue | None:
    """A list of lists as a matrix: ``[[1,2],[3,4]]``; None for anything else."""
    if not tokens or tokens[0].text not in ("[", "("):
        return None
    stop = closing(tokens, 0)
    is_turned = is_transposed(tokens[stop + 1 :])
    rows = split(tokens[1:stop], ",")
    is_nested = all(row and row[0].text in ("[", "(") and closing(row, 0) == len(row) - 1 for row in rows)
    if not is_nested or (stop != len(tokens) - 1 and not is_turned):
        return None
    cells = [[parse(cell) for cell in split(row[1:-1], ",")] for row in rows]
    if len({len(row) for row in cells}) != 1:
        raise Unreadable("rows of different lengths")
    if is_turned:
        cells = [list(column) for column in zip(*cells, strict=True)]
    return MatrixValue(tuple(map(tuple, cells)), is_list=True, is_turned=is_turned)


MAX_VARIABLES = 6
_RANKS = (("⇔",), ("⇒", "→"), ("∨", "∪"), ("∧", "∩", "∖"))
"""Signs of an algebra, the loosest first."""


def read_truths(tokens: Sequence[Token], letters: Sequence[str] = ()) -> Truths:
    """The algebra of sets or statements that tokens write, over its letters and those given. Raises Unreadable."""
    own = {token.text for token in tokens if token.kind == "name"}
    names = tuple(sorted(own | set(letters)))
    if not own or len(names) > MAX_VARIABLES or any(len(name) != 1 or not name.isascii() for name in names):
        raise Unreadable("no algebra of letters")
    is_logic = any(token.is_sign("∧", "∨", "¬", "⇒", "⇔", "→") for token in tokens)
    kind: Literal["sets", "statements"] = "statements" if is_logic else "sets"
    if kind == "sets" and not all(name.isupper() for name in names):
        raise Unreadable("no algebra of sets")
    everything = frozenset(range(2 ** len(names)))
    members = {name: frozenset(row for row in everything if row >> index & 1) for index, name in enumerate(names)}
    return Truths(names, _rows(list(tokens), members, everything, 0), kind)


def _rows(
    tokens: list[Token], members: dict[str, frozenset[int]], everything: frozenset[int], depth: int
) -> frozenset[int]:
    if depth > 20 or not tokens:
        raise Unreadable("no algebra of letters")
    for signs in _RANKS:
        pieces = split(tokens, *signs)
        if len(pieces) > 1:
            used = [token.text for token in top(tokens) if token.is_sign(*signs)]
            values = [_rows(piece, members, everything, depth + 1) for piece in pieces]
            return _combined(values, used, everything)
    if tokens[0].is_sign("¬"):
        return everything - _rows(tokens[1:], members, everything, depth + 1)
    if tokens[-1].is_sign("ᶜ", "'"):
        return everything - _rows(tokens[:-1], members, everything, depth + 1)
    if tokens[0].text == "overline" and len(tokens) > 1:
        inside = tokens[1:]
        if any(token.text == "overline" for token in inside):
            raise Unreadable("a bar over a bar")
        return everything - _rows(inside, members, everything, depth + 1)
    if len(tokens) == 1 and tokens[0].text in members and tokens[0].kind == "name":
        return members[tokens[0].text]
    if tokens[0].text in ("(", "{}") and closing(tokens, 0) == len(tokens) - 1:
        return _rows(tokens[1:-1], members, everything, depth + 1)
    raise Unreadable("no algebra of letters")


def _combined(values: list[frozenset[int]], used: list[str], everything: frozenset[int]) -> frozenset[int]:
    if used[0] in ("⇒", "→"):  # from the right
        total = values[-1]
        for value in reversed(values[:-1]):
            total |= everything - value
        return total
    total = values[0]
    for sign, value in zip(used, values[1:], strict=True):
        match sign:
            case "∪" | "∨":
                total |= value
            case "∩" | "∧":
                total &= value
            case "∖":
                total -= value
            case _:
                total = everything - (total ^ value)
    return total
