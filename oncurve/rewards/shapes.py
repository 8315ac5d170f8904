"""Shapes of answers that are no arithmetic: times, dates, ranges, ratios, lists, names, sets of reals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from oncurve.rewards.arithmetic import evaluate
from oncurve.rewards.latex import nesting, split_top
from oncurve.rewards.quantities import Quantity, read_quantity

MAX_NESTING = 12
"""Deeper brackets are compared as text only."""
MAX_SIGNS = 4
"""Most plus-minus signs in one member; more are left as they are."""

_MONTHS = re.split(" ", "january february march april may june july august september october november december")
_MONTH = "|".join(f"{month[:3]}(?:{month[3:]})?" if month != "may" else "may" for month in _MONTHS)
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_DATES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<year>\d{4})[-/.](?P<month>\d{1,2})[-/.](?P<day>\d{1,2})",
        r"(?P<month>\d{1,2})/(?P<day>\d{1,2})/(?P<year>\d{4}|\d{2})",
        r"(?P<day>\d{1,2})[/.](?P<month>\d{1,2})[/.](?P<year>\d{4})",
        rf"(?P<name>{_MONTH})\.?\s+(?:the\s+)?{_DAY}(?:,?\s+(?P<year>\d{{4}}))?",
        rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?(?P<name>{_MONTH})\.?(?:,?\s+(?P<year>\d{{4}}))?",
    )
)
_CHAIN = re.compile(r"\d+(?:-\d+){2,}|\d+(?:/\d+){2,}")
_AND = r"(?:\\text\{\s*)?(?<![a-zA-Z])(?:to|through|until)(?![a-zA-Z])(?:\s*\})?"
_TO = re.compile(rf"\s*{_AND}\s*")
_HYPHEN = re.compile(r"(?<=[\d%$})m])\s*-\s*(?=[\d$\\.€£])")
_FROM = re.compile(r"^(?:\\text\{\s*)?(?:from|between)\s*\}?\s*", re.IGNORECASE)
_NUMBERED = re.compile(
    r"^(?:\\text\{\s*)?(?:(pages?|pp?)|(chapter|verse|line|row|question|problem|exercise|section|year|age|grade|room|day"
    r"|week|step|seat|level)s?)\.?\s*\}?\s+(?=\d)(.+)",
    re.IGNORECASE | re.DOTALL,
)
"""Words before a range for what it numbers."""
_BETWEEN_AND = re.compile(r"\s+and\s+|\\text\{\s*and\s*\}")
_JOIN = re.compile(
    r"[,;]?\s*\\text\{\s*,?\s*(?:and|or)\s*\}|[,;]?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
    r"|\\(?:lor|vee)(?![a-z])|;"
)
_NAME = r"[a-zA-Z](?:_(?:\{\w+\}|\w))?'?(?:\([a-z]\))?|\\[a-z]+"
_NAMED = re.compile(rf"\s*({_NAME})\s*=(?!=)\s*(.+)", re.DOTALL)
_LABELLED = re.compile(r"\s*(?:\\text\{)?\s*([A-Za-z][a-z][A-Za-z ]*)\}?\s*[:=]\s*\}?\s*([-\\$€£]*\d[^:]*)", re.DOTALL)
_NAMED_TUPLE = re.compile(rf"\(\s*((?:{_NAME})(?:\s*,\s*(?:{_NAME}))+)\s*\)\s*=\s*\((.+)\)", re.DOTALL)
_MATRIX = re.compile(r"\\begin\{([pbB]?)(?:small)?matrix\}(.+)\\end\{\1(?:small)?matrix\}", re.DOTALL)
_TURNED = re.compile(r"\s*\^\s*\{?\s*(?:T|\\top|\\text\{T\})\s*\}?$")
_RELATION = re.compile(r"<|>|\\(?:le|ge|lt|gt|neq)(?![a-zA-Z])")
_CONGRUENCE = re.compile(
    r"(?:(?P<name>[a-zA-Z])\s*(?:\\equiv|≡|=)\s*)?(?P<residues>[^\\()a-zA-Z]+|.*\\text.*?)\s*"
    r"(?:\\pmod|\(?\s*(?:\\bmod|\\mod|\\text\{\s*mod\s*\}|mod)(?![a-zA-Z]))\s*\{?\s*(?P<modulus>\d{1,9})\s*\}?\s*\)?"
)
_BOUND = re.compile(r"(?P<name>[a-zA-Z])\s*(?P<sign><|>|\\(?:le|ge|lt|gt)(?![a-zA-Z]))(?P<value>[^<>]+)")
_REGION = re.compile(r"<|>|\\(?:in|le|ge|lt|gt|neq|cup|cap|setminus|infty|mathbb)(?![a-zA-Z])")
_BUILDER = re.compile(
    r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid(?![a-zA-Z])|\\vert|\||:)(?P<rest>.+)\\\}",
    re.DOTALL,
)
_EXCEPT = re.compile(
    r"all\s+real(?:\s+(?:numbers|values))?(?:\s+of\s+\w)?\s+(?:except|but)(?:\s+for)?\s+(?:[a-z]\s*=\s*)?(.+)",
    re.IGNORECASE,
)
_INTERVAL = re.compile(r"[\](\[][^()\[\]]*[,;][^()\[\]]*[\[)\]]")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
"""A comma between the thousands of a number."""
_OR_AND = re.compile(
    r"(\\text\{\s*(?:or|and)\s*\}|(?<![a-zA-Z\\])(?:or|and)(?![a-zA-Z])|\\(?:lor|vee|land|wedge)(?![a-z]))"
)
_PHRASES = {
    "real numbers": r"\mathbb{R}", "the real numbers": r"\mathbb{R}", "all real values": r"\mathbb{R}",
    "all real numbers": r"\mathbb{R}", "all reals": r"\mathbb{R}", "any real number": r"\mathbb{R}",
    "all real x": r"\mathbb{R}", "no solution": r"\emptyset", "no solutions": r"\emptyset",
    "no real solution": r"\emptyset", "no real solutions": r"\emptyset", "empty set": r"\emptyset",
    "the empty set": r"\emptyset",
}  # fmt: skip


def read_date(text: str) -> tuple[int | None, int, int] | None:
    """Year (None without one), month and day of a date in figures or with the name of the month; None for anything
    else.

    >>> read_date("May 17th, 2024"), read_date("5/17/2024"), read_date("17 May")
    ((2024, 5, 17), (2024, 5, 17), (None, 5, 17))
    """
    for pattern in _DATES:
        match = pattern.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip())
        if match is None:
            continue
        found = match.groupdict()
        names = [month[:3] for month in _MONTHS]
        month = int(found["month"]) if found.get("month") else 1 + names.index(found["name"][:3].lower())
        day = int(found["day"])
        if 1 <= month <= 12 and 1 <= day <= 31:
            return int(found["year"]) if found["year"] else None, month, day
    return None


def read_chain(text: str) -> list[int] | None:
    """Figures with hyphens or slashes between them, such as a telephone number; None for fewer than three."""
    return [int(part) for part in re.split("[-/]", text)] if _CHAIN.fullmatch(text) else None


def read_range(text: str) -> tuple[str, str] | None:
    """The two ends of a range of numbers or times, each with the unit behind the range; None for anything else.

    >>> [read_range(text) for text in ("10-15 cm", "from 3 to 5", "7 - x")]
    [('10 cm', '15 cm'), ('3', '5'), None]
    """
    opening, inside, _ = bracketed(text)
    text = inside if opening in ("(", "[") else text
    text = _NUMBERED.sub(lambda match: f"{match[3]} {'page' if match[1] else match[2]}", text)
    has_from = _FROM.match(text) is not None
    text = _FROM.sub("", text)
    pattern = _BETWEEN_AND if has_from and _BETWEEN_AND.search(text) else _TO if _TO.search(text) else _HYPHEN
    ends = pattern.split(text.strip())
    if len(ends) != 2:
        return None
    low, high = (end.strip() for end in ends)
    if all(re.fullmatch(r"\d{1,2}:\d{2}", end) for end in (low, high)):
        return low, high
    first, second = read_quantity(low), read_quantity(high)
    is_fraction = ["/" in end or "frac" in end for end in (low, high)]
    if first is None or second is None or (any(is_fraction) and (not all(is_fraction) or "frac" in low + high)):
        return None
    if second.unit and not first.unit:
        low += _unit_text(high)
    elif first.unit.dimensions and not second.unit and any(sign in low for sign in "$€£"):
        high = next(sign for sign in "$€£" if sign in low) + high
    return low, high


def _unit_text(quantity: str) -> str:
    match = re.search(r"\d[\d.,]*(.*)$", quantity, re.DOTALL)
    return match[1] if match else ""


def read_congruence(text: str) -> tuple[str, int, frozenset[int]] | None:
    r"""Variable, modulus and residues of ``x \equiv 3 \pmod 7``, whose variable may be missing; None for anything else.

    >>> read_congruence(r"x \equiv 10 \pmod{7}") == ("x", 7, frozenset({3}))
    True
    """
    match = _CONGRUENCE.fullmatch(text.strip())
    residues = [evaluate(member) for member in list_members(match["residues"])] if match else []
    modulus = int(match["modulus"]) if match else 0
    if match is None or not modulus or any(value is None or value.denominator != 1 for value in residues):
        return None
    return match["name"] or "", modulus, frozenset(int(value) % modulus for value in residues if value is not None)


def read_remainder(text: str) -> Quantity | None:
    r"""The remainder that ``-1 \bmod 7`` states; None for anything else, such as a class of numbers with a name.

    >>> str(read_remainder(r"-1 \bmod 7").value)
    '6'
    """
    found = read_congruence(text)
    is_one = found is not None and not found[0] and len(found[2]) == 1
    if not is_one or re.search(r"[\w)}]\s*[-+]", text):  # 2 + 17 mod 5 may be 4 as well as 2 + 2
        return None
    return Quantity(Fraction(next(iter(found[2])))) if found else None


def read_ratio(text: str) -> list[str] | None:
    """The members of ``2:3`` or ``2 to 3``; None for anything else."""
    members = split_top(text, ":")
    if len(members) < 2:
        members = _TO.split(text)
    return members if len(members) > 1 and all(members) else None


def expand_signs(member: str) -> list[str]:
    r"""The two values of ``1\pm\sqrt2``; a minus-plus takes the sign against the first plus-minus.

    >>> expand_signs(r"\pm 3")
    ['3', '-3']
    """
    count = len(re.findall(r"\\pm(?![a-zA-Z])", member))
    if count == 0 or count > MAX_SIGNS:
        return [member]
    is_joined = re.search(r"\\mp(?![a-zA-Z])", member) is not None
    signs = [("+",) * count, ("-",) * count] if is_joined else list(product("+-", repeat=count))
    expanded = []
    for choice in signs:
        chosen = iter(choice)
        text = re.sub(r"\\pm(?![a-zA-Z])", lambda _, chosen=chosen: next(chosen), member)  # type: ignore[misc]
        text = re.sub(r"\\mp(?![a-zA-Z])", "-" if choice[0] == "+" else "+", text)
        expanded.append(re.sub(r"(^|[({=])\s*\+\s*", r"\1", text).strip())
    return [re.sub(r"^-\s+", "-", text) for text in expanded]


def joins(text: str) -> bool:
    """Whether a text joins members by a word or a semicolon."""
    return _JOIN.search(text) is not None


def with_commas(text: str) -> str:
    """The text with a comma for every other joint."""
    text = _JOIN.sub(",", text)
    return re.sub(r"(?:\s*,)+", ",", text if r"\begin" in text else re.sub(r"\s\\?&\s", ",", text))


def list_members(text: str) -> list[str]:
    """The texts between commas, "and" or "or"; ``1,000, 2,000`` has two members, and so has ``\\pm 3``."""
    text = with_commas(text)
    if re.search(r",\s", text):
        text = THOUSANDS.sub("", text)
    members = [text] if read_quantity(text) is not None else split_top(text)
    return [found for member in members for found in expand_signs(member)]


def named_members(members: list[str]) -> list[tuple[str, str]]:
    """Name and value of every member of ``x = 1, y = 2`` or ``(x, y) = (1, 2)``; the name is empty where none is."""
    if len(members) == 1 and (match := _NAMED_TUPLE.fullmatch(members[0].strip())):
        names, values = (split_top(match[group]) for group in (1, 2))
        if len(names) == len(values):
            return list(zip(names, values, strict=True))
    return [
        (match[1], match[2].strip())
        if (match := _NAMED.fullmatch(member) or _LABELLED.fullmatch(member))
        else ("", member)
        for member in members
    ]


def bracketed(text: str) -> tuple[str, str, str]:
    """Opening, inside and closing of an answer in one pair of brackets; empty strings around it without one."""
    opening, inside, closing = text[:1], text[1:-1], text[-1:]
    if opening == "\\":
        opening, inside, closing = text[:2], text[2:-2], text[-2:]
    is_pair = (opening in ("(", "[") and closing in (")", "]")) or (opening, closing) == (r"\{", r"\}")
    if is_pair and nesting(plain_braces(inside)) <= MAX_NESTING:
        return opening, inside, closing
    return "", text, ""


def plain_braces(text: str) -> str:
    """The text with braces of sets as plain ones."""
    return text.replace(r"\{", "{").replace(r"\}", "}")


def is_region(text: str) -> bool:
    """Whether a text is an inequality or is written with unions, differences or infinities of real numbers."""
    return _REGION.search(text) is not None


def as_region(text: str) -> str:
    """A set of reals in one spelling: no set-builder, inward brackets, a union for inequalities joined by "or"."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip().rstrip(".").lower()
    if plain in _PHRASES:
        return _PHRASES[plain]
    text = re.sub(r"\\mathbb\{R\}\s*-\s*(?=\\\{)", r"\\mathbb{R}\\setminus", text)
    if (match := _EXCEPT.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip())) is not None:
        return rf"\mathbb{{R}}\setminus\{{{with_commas(match[1])}\}}"
    if builder := _BUILDER.fullmatch(text.strip()):
        text = builder["rest"].strip()
    if _INTERVAL.fullmatch(text) and (text[0] == "]" or text[-1] == "["):
        opening, closing = ("(" if text[0] == "]" else text[0]), (")" if text[-1] == "[" else text[-1])
        text = opening + text[1:-1].replace(";", ",") + closing
    text = _with_word(text)
    pieces = _OR_AND.split(text)
    if len(pieces) > 1 and all(_RELATION.search(piece) for piece in pieces[::2]):
        signs = [r" \cup " if re.search("or|vee", piece) else r" \cap " for piece in pieces[1::2]]
        text = pieces[0].strip() + "".join(s + p.strip() for s, p in zip(signs, pieces[2::2], strict=True))
    return text


def _with_word(text: str) -> str:
    """Two bounds of one variable with the word that their comma stands for: ``x > 2, x < -2`` leaves the middle out."""
    pieces = split_top(text)
    if r"\neq" in text and all(_RELATION.search(piece) for piece in pieces):
        return " and ".join(pieces)
    found = [_BOUND.fullmatch(piece.strip()) for piece in pieces]
    if len(found) != 2 or found[0] is None or found[1] is None or found[0]["name"] != found[1]["name"]:
        return text
    values = [evaluate(match["value"].strip()) for match in found if match is not None]
    is_above = [match["sign"] in (">", "\\ge", "\\gt") for match in found if match is not None]
    if None in values or is_above[0] == is_above[1]:
        return text
    low, high = (values[is_above.index(True)], values[is_above.index(False)])
    return (" or " if low >= high else " and ").join(pieces)  # type: ignore[operator]


def in_order_of_names(text: str) -> list[str] | None:
    """The values of differently named coordinates in the order of their names; None for anything else.

    >>> in_order_of_names("y = 4, x = 3")
    ['3', '4']
    """
    members = list_members(text)
    found = [(match[1].lstrip("\\"), match[2].strip()) for match in map(_NAMED.fullmatch, members) if match]
    if not 1 < len(members) == len({name for name, _ in found}):
        return None
    return [value for _, value in sorted(found)]


def read_matrix(text: str) -> list[list[str]] | None:
    """The rows of a matrix; None for anything else, such as a determinant."""
    match = _MATRIX.fullmatch(text)
    rows = [split_top(row, "&") for row in re.split(r"\\\\", match[2].strip().removesuffix("\\\\"))] if match else []
    is_whole = match is not None and r"\begin" not in match[2] and len({len(row) for row in rows}) == 1
    return rows if is_whole and all(all(row) for row in rows) else None


def read_rows(text: str, matrix: list[list[str]]) -> list[list[str]] | None:
    """A list of lists, or of numbers where the matrix is one row or column, in the shape of the matrix; None for
    anything else.

    >>> read_rows("(1, 2)", [["a"], ["b"]]), read_rows("[[1, 2]]", [["a"], ["b"]])
    ([['1'], ['2']], None)
    """
    text, num_turns = _TURNED.subn("", re.sub(r"^\\langle(?![a-zA-Z])(.+)\\rangle$", r"(\1)", text))
    opening, inside, _ = bracketed(text)
    if opening not in ("(", "["):
        return None
    members = split_top(inside)
    inner = [bracketed(member) for member in members]
    if all(row[0] in ("(", "[") for row in inner):
        rows = [split_top(row[1]) for row in inner]
        rows = [list(column) for column in zip(*rows, strict=False)] if num_turns else rows
    else:
        is_column = len(matrix[0]) == 1 and len(members) > 1
        rows = [[member] for member in members] if is_column else [members]
    return rows if [len(row) for row in rows] == [len(row) for row in matrix] else None


def marks_of(members: list[tuple[str, str]]) -> list[object]:
    """The marks that tell named members of a list apart besides their values: a name, or an amount's unit and label."""
    marks: list[object] = []
    for name, value in members:
        quantity: Quantity | None = read_quantity(value)
        unit = quantity.unit if quantity is not None else None
        marks.append(name or ((unit.dimensions, unit.factor, unit.label) if unit else ""))
    return marks


def pairs_up(found: Sequence[Any], wanted: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Every member has its own partner that is the same, in any order, and none is left over."""
    left = list(wanted)
    for member in found:
        partner = next((place for place, other in enumerate(left) if same(member, other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


_HALF = re.compile(
    r"(?<=\d)\s*(?:\\text\s*\{)?\s*(?:(?P<letter>[ap])\.?\s?m(?![a-zA-Z])"
    r"|(?:in the|at)\s+(?P<word>morning|afternoon|evening|night)|(?P<twelve>noon|midnight))",
    re.IGNORECASE,
)
_TIME = re.compile(r"(?:at\s+)?(?P<hour>\d{1,2})(?:\s*:\s*(?P<minute>\d{2})(?:\s*:\s*(?P<second>\d{2}))?)?")


def same_time(candidate: str, gold: str) -> bool | None:
    """Whether two tidied answers are the same time of day; None where that is not what they are about.

    A time that does not say its half of the day may mean either, as a number without a unit may.

    >>> [same_time(answer, "3:00 PM") for answer in ("3 p.m.", "15:00", "3:00 AM", "3:00", "three")]
    [True, True, False, True, None]
    """
    halves = [_half(text) for text in (candidate, gold)]
    if not any(halves):
        return None
    times = [_seconds(text, half) for text, half in zip((candidate, gold), halves, strict=True)]
    if None in halves:
        bare = times[halves.index(None)]
        other = times[1 - halves.index(None)]
        if bare is None or other is None:
            return None
        return bare == other or (3600 <= bare < 43_200 and bare % 43_200 == other % 43_200)
    if halves[0] != halves[1] and None not in times:
        return False
    if None in times:  # a time inside of something else: the other rules compare that
        return False if halves[0] != halves[1] else None
    return times[0] == times[1]


def _half(text: str) -> str | None:
    """Which half of the day a text names: "a" or "p"."""
    found = _HALF.search(text)
    if found is None:
        return None
    word = (found["letter"] or found["word"] or found["twelve"]).lower()
    return "a" if word in ("a", "morning", "midnight") else "p"


def _seconds(text: str, half: str | None) -> int | None:
    """The seconds since midnight of a text that is a time and nothing else."""
    bare = _HALF.sub("", text).strip(" .}")
    found = _TIME.fullmatch(bare)
    if found is None or (half is None and found["minute"] is None):
        return None
    hour, minute, second = int(found["hour"]), int(found["minute"] or 0), int(found["second"] or 0)
    if hour > (12 if half else 23) or (half and hour == 0) or minute > 59 or second > 59:
        return None
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return hour * 3600 + minute * 60 + second
