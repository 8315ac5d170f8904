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
    tokens = separated(prepared(text), everywhere=not with_thousands)
    reader = Reader(with_letters=with_letters)
    try:
        return reader.value(tokens)
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
    tokens = trimmed(prepared(text)) if len(text) <= MAX_CHARACTERS else []
    bare = [token for token in tokens if token.text not in ("(", ")", "{}")]
    if len(bare) == 1 and len(bare[0].text) == 1 and bare[0].text in "ABCDEFGHIJ" and len(tokens) in (1, 3):
        return Reference(text, Choice(bare[0].text))
    if (date := read_date(tokens)) is not None:
        return Reference(text, date)
    if (time := read_time(tokens)) is not None and (time.half is not None):
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
    expected = reference.value
    match expected:
        case Choice():
            return _chooses(text, expected.letter)
        case Date():
            return read_date(trimmed(prepared(text))) == expected
        case Time():
            return _same_time(text, expected)
        case Truths():
            truths = read_truths(trimmed(prepared(text)), expected.letters)
            return _same_truths(truths, expected, text, reference.text)
        case Words():
            return _same_words(text, expected)
    if _is_base_digits(text, expected):
        return True
    value = _without_braces(read(text), expected)
    if comparison.same(value, expected):
        return True
    candidates = (value, *_other_readings(text, value))
    return any(
        comparison.same(candidate, other)
        for candidate in candidates
        for other in (expected, *reference.others)
        if (candidate, other) != (value, expected)
    )


def _without_braces(value: Value, expected: Value) -> Value:
    """The number of a set of one number, where a number is wanted."""
    is_single = isinstance(value, Members) and value.kind == "set" and len(value.members) == 1
    return value.members[0] if is_single and isinstance(expected, Quantity) else value  # type: ignore[union-attr]


def _chooses(text: str, letter: str) -> bool:
    """A letter in a formula, such as ``c = 5`` or ``A'``, chooses nothing."""
    plain = text.strip()
    tokens = trimmed(prepared(plain)) if _is_short(plain) else []
    if (
        len(tokens) > 1
        and tokens[0].kind == "name"
        and tokens[1].text in ("=", "'", "+", "*", "/", "^", "_", "<", ">", "(")
    ):
        is_remark = tokens[1].text == "(" and any(token.kind == "word" for token in tokens[2:])
        if not is_remark:
            return False
    if (
        len(tokens) > 2
        and tokens[0].kind == "name"
        and tokens[1].is_sign("-")
        and not any(t.kind == "word" for t in tokens[2:])
    ):
        return False
    return chosen_letter(plain.upper() if len(plain) <= 3 else plain) == letter


def _is_short(text: str) -> bool:
    try:
        prepared(text)
    except Unreadable:
        return False
    return len(text) <= MAX_CHARACTERS


def _same_time(text: str, expected: Time) -> bool:
    time = read_time(trimmed(prepared(text)))
    if time is None:
        value = read(text)
        if isinstance(value, Quantity) and not value.unit and expected.seconds % 3600 == 0:
            return False
        return False
    if time.half is not None or expected.half is None:
        return (time.seconds, time.rest) == (expected.seconds, expected.rest)
    is_bare = time.seconds == expected.seconds or (
        3600 <= time.seconds < 43_200 + 3600 and time.seconds % 43_200 == expected.seconds % 43_200
    )
    return is_bare and time.rest == expected.rest


def _same_truths(answer: Truths, expected: Truths, text: str, reference: str) -> bool:
    del text, reference
    if answer.letters != expected.letters:
        expected = Truths(answer.letters, _spread(expected, answer.letters), expected.kind)
    return answer.rows == expected.rows


def _spread(truths: Truths, letters: Sequence[str]) -> frozenset[int]:
    """The rows of a table over more letters."""
    bits = [letters.index(letter) for letter in truths.letters]
    return frozenset(
        row
        for row in range(2 ** len(letters))
        if sum((row >> bit & 1) << k for k, bit in enumerate(bits)) in truths.rows
    )


def _same_words(text: str, expected: Words) -> bool:
    """Whether an answer is the words of the reference, without case, article and final stop; a "yes" or "no" may have
    its reason behind it."""
    tokens = trimmed(prepared(text))
    if verdict := verdict_with_reason(tokens):
        return verdict == expected.text
    if same_phrase(phrase(tokens)) == expected.text:
        return expected.text != "nan"
    is_number = all(token.kind == "number" for token in tokens)
    if len(expected.letters) == 2 and not is_number:
        return "".join(sorted("".join(token.text for token in tokens))) == expected.letters and len(tokens) == 1
    value = read(text)
    return isinstance(value, Words) and value.text == expected.text != "nan"


def _is_base_digits(text: str, expected: Value) -> bool:
    """The digits of a reference with another base than ten, without the base."""
    if not isinstance(expected, Quantity) or expected.base in (None, 10):
        return False
    tokens = trimmed(prepared(text))
    return (
        all(token.base is None for token in tokens)
        and "".join(token.text for token in tokens).upper() == expected.digits
    )
