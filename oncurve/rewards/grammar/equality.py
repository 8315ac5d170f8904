"""Typed values of texts, and equality of an answer with a reference that is read once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from oncurve.rewards.grammar.choices import chosen_letter
from oncurve.rewards.grammar.comparison import Algebra, AnswerComparison
from oncurve.rewards.grammar.exact import is_too_large, rational
from oncurve.rewards.grammar.forms import read_date, read_time, read_truths
from oncurve.rewards.grammar.lexemes import Unreadable
from oncurve.rewards.grammar.phrases import phrase, same_phrase, verdict_with_reason
from oncurve.rewards.grammar.preparation import prepared, separated, trimmed
from oncurve.rewards.grammar.regions import OrderError
from oncurve.rewards.grammar.statements import Reader
from oncurve.rewards.grammar.values import Choice, Date, Members, Named, Quantity, Time, Truths, Value, Words, number

MAX_CHARACTERS = 600
"""A longer text is no answer."""
_PLAIN = re.compile(r"\s*(-?\d{1,200}(?:\.\d{1,100})?)\s*")
"""A number in figures, which needs no grammar."""


@lru_cache(maxsize=4096)
def read(text: str, *, with_thousands: bool = True, with_letters: bool = True) -> Value:
    r"""The typed value of an answer. Raises Unreadable.

    ``with_thousands`` False takes the commas of ``1,000`` for separators of members; ``with_letters`` False takes a
    single letter behind a number, as in ``5 m``, for a variable and not a unit.

    >>> read("x = 5").name, read(r"3 \text{ cm}").unit.dimensions
    ('x', (('m', 1),))
    """
    if (plain := _PLAIN.fullmatch(text)) is not None:
        return Quantity(number(Fraction(plain[1])), digits=plain[1])
    if len(text) > MAX_CHARACTERS:
        raise Unreadable("a text that is too long")
    found = separated(prepared(text), everywhere=not with_thousands)
    reader = Reader(with_letters=with_letters)
    try:
        return reader.value(found)
    except (RecursionError, OrderError) as error:
        raise Unreadable(str(error) or "nested too deeply") from None


def exact_number(text: str) -> Fraction | None:
    """The number that a text states, its unit and currency left aside; None if it states something else.

    >>> exact_number("$1,000")
    Fraction(1000, 1)
    """
    try:
        value = read(text.strip())
    except Unreadable:
        return None
    value = value.value if isinstance(value, Named) else value
    if not isinstance(value, Quantity) or value.tree.has("factorial"):
        return None
    number_of = rational(value.tree)
    return None if number_of is None else number_of / (100 if value.unit.is_percent else 1)


_THOUSANDS = re.compile(r"\d,\d{3}")
_LETTER = re.compile(r"\d\s+[a-zA-Z](?![a-zA-Z])")


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference answer, read once."""

    text: str
    value: Value
    others: tuple[Value, ...] = ()
    """Other readings, where its commas or letters have two: ``1,000`` as two numbers, ``4 t`` as a product."""


def read_reference(text: str) -> Reference:
    """The typed value of a reference. Raises Unreadable."""
    found = trimmed(prepared(text)) if len(text) <= MAX_CHARACTERS else []
    bare = [token for token in found if token.text not in ("(", ")", "{}")]
    if len(bare) == 1 and len(bare[0].text) == 1 and bare[0].text in "ABCDEFGHIJ" and len(found) in (1, 3):
        return Reference(text, Choice(bare[0].text))
    if (date := read_date(found)) is not None:
        return Reference(text, date)
    if (time := read_time(found)) is not None and (time.half is not None):
        return Reference(text, time)
    value = read(text)
    if isinstance(value, Quantity) and is_too_large(value.tree):
        raise Unreadable("a number that is too large to be computed")
    return Reference(text, value, _other_readings(text, value))


def _other_readings(text: str, value: Value) -> tuple[Value, ...]:
    """The readings without thousands and without units of one letter, where they differ."""
    others: list[Value] = []
    for pattern, flags in ((_THOUSANDS, {"with_thousands": False}), (_LETTER, {"with_letters": False})):
        if pattern.search(text) is None:
            continue
        try:
            other = read(text, **flags)
        except Unreadable:
            continue
        is_zero = isinstance(value, Quantity) and rational(value.tree) == 0
        if other != value and other not in others and not is_zero:
            others.append(other)
    return tuple(others)


def equal(text: str, reference: Reference, algebra: Algebra) -> bool:
    """Whether an answer states what the reference states; an answer that cannot be read does not."""
    try:
        return _equal(text, reference, AnswerComparison(algebra))
    except (Unreadable, OrderError, RecursionError):
        return False


def _equal(text: str, reference: Reference, comparison: AnswerComparison) -> bool:
    if len(text) > MAX_CHARACTERS or not text.strip():
        return False
    wanted = reference.value
    match wanted:
        case Choice():
            return _chooses(text, wanted.letter)
        case Date():
            return read_date(trimmed(prepared(text))) == wanted
        case Time():
            return _same_time(text, wanted)
        case Truths():
            truths = read_truths(trimmed(prepared(text)), wanted.letters)
            return _same_truths(truths, wanted, text, reference.text)
        case Words():
            return _same_words(text, wanted)
    if _is_base_digits(text, wanted):
        return True
    value = _without_braces(read(text), wanted)
    if comparison.same(value, wanted):
        return True
    candidates = (value, *_other_readings(text, value))
    return any(
        comparison.same(found, other)
        for found in candidates
        for other in (wanted, *reference.others)
        if (found, other) != (value, wanted)
    )


def _without_braces(value: Value, wanted: Value) -> Value:
    """The number of a set of one number, where a number is wanted."""
    is_single = isinstance(value, Members) and value.kind == "set" and len(value.members) == 1
    return value.members[0] if is_single and isinstance(wanted, Quantity) else value  # type: ignore[union-attr]


def _chooses(text: str, letter: str) -> bool:
    """A letter in a formula, such as ``c = 5`` or ``A'``, chooses nothing."""
    plain = text.strip()
    found = trimmed(prepared(plain)) if _is_short(plain) else []
    if (
        len(found) > 1
        and found[0].kind == "name"
        and found[1].text in ("=", "'", "+", "*", "/", "^", "_", "<", ">", "(")
    ):
        is_remark = found[1].text == "(" and any(token.kind == "word" for token in found[2:])
        if not is_remark:
            return False
    if (
        len(found) > 2
        and found[0].kind == "name"
        and found[1].is_sign("-")
        and not any(t.kind == "word" for t in found[2:])
    ):
        return False
    return chosen_letter(plain.upper() if len(plain) <= 3 else plain) == letter


def _is_short(text: str) -> bool:
    try:
        prepared(text)
    except Unreadable:
        return False
    return len(text) <= MAX_CHARACTERS


def _same_time(text: str, wanted: Time) -> bool:
    found = read_time(trimmed(prepared(text)))
    if found is None:
        value = read(text)
        if isinstance(value, Quantity) and not value.unit and wanted.seconds % 3600 == 0:
            return False
        return False
    if found.half is not None or wanted.half is None:
        return (found.seconds, found.rest) == (wanted.seconds, wanted.rest)
    is_bare = found.seconds == wanted.seconds or (
        3600 <= found.seconds < 43_200 + 3600 and found.seconds % 43_200 == wanted.seconds % 43_200
    )
    return is_bare and found.rest == wanted.rest


def _same_truths(found: Truths, wanted: Truths, text: str, reference: str) -> bool:
    del text, reference
    if found.letters != wanted.letters:
        wanted = Truths(found.letters, _spread(wanted, found.letters), wanted.kind)
    return found.rows == wanted.rows


def _spread(truths: Truths, letters: Sequence[str]) -> frozenset[int]:
    """The rows of a table over more letters."""
    places = [letters.index(letter) for letter in truths.letters]
    return frozenset(
        row
        for row in range(2 ** len(letters))
        if sum((row >> place & 1) << k for k, place in enumerate(places)) in truths.rows
    )


def _same_words(text: str, wanted: Words) -> bool:
    """Whether an answer is the words of the reference, without case, article and final stop; a "yes" or "no" may have
    its reason behind it."""
    found = trimmed(prepared(text))
    if verdict := verdict_with_reason(found):
        return verdict == wanted.text
    if same_phrase(phrase(found)) == wanted.text:
        return wanted.text != "nan"
    is_number = all(token.kind == "number" for token in found)
    if len(wanted.letters) == 2 and not is_number:
        return "".join(sorted("".join(token.text for token in found))) == wanted.letters and len(found) == 1
    value = read(text)
    return isinstance(value, Words) and value.text == wanted.text != "nan"


def _is_base_digits(text: str, wanted: Value) -> bool:
    """The digits of a reference with another base than ten, without the base."""
    if not isinstance(wanted, Quantity) or wanted.base in (None, 10):
        return False
    found = trimmed(prepared(text))
    return (
        all(token.base is None for token in found) and "".join(token.text for token in found).upper() == wanted.digits
    )
