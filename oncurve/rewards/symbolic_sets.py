"""Sets of real numbers, read from intervals, inequalities and unions of them; runs only inside a grading process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sympy import Complement, EmptySet, FiniteSet, Intersection, Interval, Reals, Set, Union, oo

from oncurve.core.errors import Failure, attempt
from oncurve.rewards.latex import bracket_depths, split_top

Region = tuple[str | None, Set]
"""The variable that a text names, if it does, and the set of its values."""
Constant = Callable[[str], Any]
"""The value of an end of an interval; None if the text states none."""

_VARIABLE = re.compile(r"\s*(?:[a-zA-Z](?:_(?:\w|\{\w+\}))?|\\(?:theta|alpha|beta|lambda|mu|phi))\s*")
_SIGN = re.compile(r"\\(?:le|ge|lt|gt|neq)(?![a-zA-Z])|[<>]")
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\lt": r"\gt", r"\gt": r"\lt", r"\neq": r"\neq"}
_COVERED = re.compile(r"(?:\\(?:overline|bar)\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))|([A-Z])('|\^\{?[cC]\}?|))(?!\s*[A-Z(])")
_ALGEBRA = re.compile(r"(?:!|\\(?:cup|cap|setminus|backslash)(?![a-zA-Z])|[\s()])+")
MAX_PIECES = 32
MAX_LETTERS = 6


def read_region(text: str, constant: Constant) -> Region | None:
    r"""The set of reals that a tidied text states; None if it states none.

    Understood are intervals, chains of inequalities around one variable, finite sets, ``\mathbb{R}``, memberships,
    and unions, intersections and differences of those.
    """
    result = attempt(lambda: _union(text, constant), log=False)
    return None if isinstance(result, Failure) else result


def with_members(candidate: str, gold: str) -> tuple[str, str]:
    r"""Both with every capital letter as the regions of a Venn diagram that it covers, which decide what is the same.

    They are left as they are where the reference is no algebra of sets in letters, such as ``A \cup B'``.
    """
    found = [match[:3] for text in (candidate, gold) for match in _COVERED.findall(text)]
    letters = sorted({letter for match in found for letter in match if letter})
    if not _ALGEBRA.fullmatch(_COVERED.sub("!", gold)) or len(letters) > MAX_LETTERS:
        return candidate, gold

    def covered(match: re.Match[str]) -> str:
        place, is_complement = letters.index(match[1] or match[2] or match[3]), not match[3] or match[4] != ""
        inside = [str(k) for k in range(2 ** len(letters)) if (k >> place) % 2 != is_complement]
        return rf"\{{{','.join(inside)}\}}"

    return _COVERED.sub(covered, candidate), _COVERED.sub(covered, gold)


def same_region(one: Region, other: Region, is_zero: Callable[[Any], bool]) -> bool:
    """The same set, of the same variable where both name one."""
    if one[0] and other[0] and one[0] != other[0]:
        return False
    if one[1] == other[1]:
        return True
    first, second = (_pieces(region[1]) for region in (one, other))
    if first is None or second is None or len(first) != len(second):
        return False
    return all(
        left[0] == right[0] and all(_same_end(a, b, is_zero) for a, b in zip(left[1], right[1], strict=True))
        for left, right in zip(first, second, strict=True)
    )


def _same_end(one: Any, other: Any, is_zero: Callable[[Any], bool]) -> bool:
    if one in (oo, -oo) or other in (oo, -oo):
        return one == other
    return is_zero(one - other)


def _pieces(region: Set) -> list[tuple[tuple[bool, bool] | str, tuple[Any, ...]]] | None:
    """Kind and ends of every interval and point, from left to right; None for any other set."""
    parts: list[tuple[tuple[bool, bool] | str, tuple[Any, ...]]] = []
    for part in region.args if isinstance(region, Union) else (region,):
        if isinstance(part, Interval):
            parts.append(((bool(part.left_open), bool(part.right_open)), (part.start, part.end)))
        elif isinstance(part, FiniteSet):
            parts += [("point", (point,)) for point in part.args]
        elif part is not EmptySet:
            return None
    placed = attempt(lambda: sorted(parts, key=lambda part: (float(part[1][0]), str(part[0]))), log=False)
    return None if isinstance(placed, Failure) else placed


def _union(text: str, constant: Constant) -> Region | None:
    return _combined(text, r"\\cup", lambda part: _intersection(part, constant), Union)


def _intersection(text: str, constant: Constant) -> Region | None:
    return _combined(text, r"\\cap", lambda part: _atom(part.strip(), constant), Intersection)


def _combined(text: str, sign: str, read: Callable[[str], Region | None], combine: Callable[..., Set]) -> Region | None:
    pieces = _split(text, sign)
    if len(pieces) > MAX_PIECES:
        return None
    found = [read(piece) for piece in pieces]
    regions = [region for region in found if region is not None]
    names = {name for name, _ in regions if name}
    if len(regions) != len(found) or len(names) > 1:
        return None
    return next(iter(names), None), regions[0][1] if len(regions) == 1 else combine(*(part for _, part in regions))


def _split(text: str, sign: str) -> list[str]:
    """The pieces between signs that stand in no bracket."""
    pieces, start = [], 0
    for place, depth in bracket_depths(text):
        if depth == 0 and re.compile(rf"{sign}(?![a-zA-Z])").match(text, place):
            pieces.append(text[start:place])
            start = place + len(re.match(r"\\[a-z]+", text[place:]).group())  # type: ignore[union-attr]
    return [*pieces, text[start:]]


def _atom(text: str, constant: Constant) -> Region | None:
    differences = _split(text, r"\\(?:setminus|backslash)")
    if len(differences) == 2:
        whole, gap = (_union(part, constant) for part in differences)
        return None if whole is None or gap is None else (whole[0], Complement(whole[1], gap[1]))
    member = re.fullmatch(r"(.+?)\s*\\in(?![a-zA-Z])\s*(.+)", text, re.DOTALL)
    if member is not None and _VARIABLE.fullmatch(member[1]):
        inside = _union(member[2], constant)
        return None if inside is None else (member[1].strip(), inside[1])
    if text == r"\mathbb{R}":
        return None, Reals
    if text == r"\emptyset":
        return None, EmptySet
    if _SIGN.search(text):
        return _chain(text, constant)
    if text.startswith(r"\{") and text.endswith(r"\}"):
        points = [constant(part) for part in split_top(text[2:-2])]
        return None if None in points else (None, FiniteSet(*points))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        ends = [_end(part, constant) for part in split_top(text[1:-1])]
        if len(ends) == 2 and None not in ends:
            return None, Interval(*ends, left_open=text[0] == "(", right_open=text[-1] == ")")
        return _union(text[1:-1], constant) if len(ends) == 1 else None
    return None


def _end(text: str, constant: Constant) -> Any:
    plain = text.replace(" ", "")
    if plain in (r"\infty", r"+\infty"):
        return oo
    return -oo if plain == r"-\infty" else constant(text)


def _chain(text: str, constant: Constant) -> Region | None:
    r"""``1 < x \le 3`` or ``x > 2``, with the variable alone between the signs or on one side."""
    sides = [side.strip() for side in _SIGN.split(text)]
    signs = _SIGN.findall(text)
    places = [place for place, side in enumerate(sides) if _VARIABLE.fullmatch(side) and side not in ("e", "i")]
    if len(sides) == 3 and 1 in places:  # a < x < b
        places = [1]
    if len(places) != 1 or len(sides) not in (2, 3):
        return None
    place, sides_of = places[0], []
    for other in (place - 1, place + 1):
        if 0 <= other < len(sides):
            end = _end(sides[other], constant)
            if end is None or (end.free_symbols and len(sides) == 2):
                return None
            sign = signs[min(place, other)]
            sides_of.append(_side(sign if place < other else _TURNED[sign], end))
    if len(sides_of) == 2 and len({sign.lstrip("\\")[0] in "<l" for sign in signs}) == 1:
        low, high = sorted(sides_of, key=lambda part: part.end == oo, reverse=True)
        return sides[place], Interval(low.start, high.end, low.left_open, high.right_open)
    return sides[place], Intersection(*sides_of)


def _side(sign: str, end: Any) -> Set:
    """The numbers that stand in a relation to an end."""
    match sign:
        case "<" | r"\lt":
            return Interval.open(-oo, end)
        case ">" | r"\gt":
            return Interval.open(end, oo)
        case r"\le":
            return Interval(-oo, end)
        case r"\ge":
            return Interval(end, oo)
        case _:
            return Complement(Reals, FiniteSet(end))
