"""Typed values of texts."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from oncurve.rewards.grammar.exact import rational
from oncurve.rewards.grammar.figures import Unreadable
from oncurve.rewards.grammar.preparation import prepared, separated
from oncurve.rewards.grammar.regions import OrderError
from oncurve.rewards.grammar.statements import Reader
from oncurve.rewards.grammar.values import Named, Quantity, Value, number

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
