"""Exact value of arithmetic with rational numbers."""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_BITS = 200_000
"""Most bits of a value that is computed exactly."""
MAX_FACTORIAL = 3_000
MAX_FUNCTION_BITS = 1_000
"""Most bits of an argument of a greatest common divisor and the like."""
MAX_DEPTH = 24

_ARITHMETIC = re.compile(
    r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+|\\(?:frac|binom|cdot|times|div|b?mod)(?![a-zA-Z])|!!|[-+*/^!(){}]"
)
_OF_INTEGERS = re.compile(r"\\(gcd|lcm|max|min)(?:\(([^()]{1,200})\)|\\\{([^{}]{1,200})\\\})")
_FUNCTIONS = {"gcd": math.gcd, "lcm": math.lcm, "max": max, "min": min}


class _NoNumberError(Exception):
    """The text is no arithmetic of rational numbers, or too much of it."""


def evaluate(text: str) -> Fraction | None:
    r"""The exact value of arithmetic with rational numbers; None for anything else, or for numbers beyond 200,000 bits.

    >>> evaluate(r"1-\left(\frac{1}{2}\right)^{3}".replace(r"\left", "").replace(r"\right", ""))
    Fraction(7, 8)
    """
    while (function := _OF_INTEGERS.search(text)) is not None:
        value = _of_integers(function[1], (function[2] or function[3]).split(","))
        before = text[: function.start()].rstrip()
        if value is None:
            return None
        is_factor = value < 0 or before[-1:].isdigit() or before.endswith((")", "}"))
        written = f"({value})" if is_factor else f"{{{value}}}"
        text = f"{before}{written}{text[function.end() :]}"
    tokens = _ARITHMETIC.findall(text)
    if not tokens or len("".join(tokens)) != len(re.sub(r"\s", "", text)) or re.search(r"\d\s+\d|\d\.\s", text):
        return None
    try:
        reader = _Arithmetic(tokens)
        value = reader.sum()
        return value if reader.place == len(tokens) else None
    except (_NoNumberError, ZeroDivisionError):
        return None


def _of_integers(name: str, texts: list[str]) -> int | None:
    """The value of a greatest common divisor and the like; None where its arguments are not several integers."""
    members = [evaluate(text) for text in texts]
    found = [int(member) for member in members if member is not None and member.denominator == 1]
    if not 1 < len(members) == len(found) or max(map(abs, found)).bit_length() > MAX_FUNCTION_BITS:
        return None
    value = _FUNCTIONS[name](*found)
    return value if value.bit_length() <= 8 * MAX_FUNCTION_BITS else None


class _Arithmetic:
    """A reader of one sum from left to right; sizes are checked before anything is computed."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.place, self.depth = tokens, 0, 0

    def next(self) -> str:
        """The token to be read, or nothing at the end."""
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        """Reads a token if it is one of those; raises otherwise."""
        token = self.next()
        if wanted and token not in wanted:
            raise _NoNumberError
        self.place += 1
        return token

    def sum(self) -> Fraction:
        """Terms with signs between them."""
        sign = -1 if self.next() in ("+", "-") and self.take() == "-" else 1
        total = sign * self.product()
        while self.next() in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
            total = _limited(total + sign * self.product())
        return total

    def product(self) -> Fraction:
        """Factors with signs of multiplication or division, or brackets, between them."""
        value = self.mixed()
        while True:
            token = self.next()
            if token in ("*", r"\cdot", r"\times"):
                self.take()
                value *= self.signed()
            elif token in ("/", r"\div"):
                self.take()
                value /= self.signed()
            elif token in (r"\bmod", r"\mod"):
                self.take()
                value %= self.signed()
            elif token in ("(", r"\frac", r"\binom"):
                value *= self.power()
            else:
                return value
            value = _limited(value)

    def signed(self) -> Fraction:
        """A factor that may have a sign."""
        sign = -1 if self.next() == "-" and self.take() else 1
        return sign * self.power()

    def mixed(self) -> Fraction:
        r"""A factor, or a mixed number: ``2\frac{1}{2}`` is two and a half."""
        following = self.tokens[self.place : self.place + 8]
        if (
            len(following) == 8
            and following[1:3] == [r"\frac", "{"]
            and following[4:6] == ["}", "{"]
            and all(following[k].isdigit() for k in (0, 3, 6))
        ):
            self.place += 8
            return int(following[0]) + Fraction(int(following[3]), int(following[6]))
        return self.power()

    def power(self) -> Fraction:
        """A number, fraction, binomial or bracket with its exponent and factorial signs."""
        value = self.atom()
        if self.next() == "^":
            self.take()
            value = self.raised(value)
        if self.next() in ("!", "!!"):
            value = _factorial(value, step=len(self.take()))
        return value

    def raised(self, base: Fraction) -> Fraction:
        """The base to the power that follows."""
        if self.next() == "{":
            exponent = self.bracket()
        else:
            exponent = Fraction(self.take()) if self.next().isdigit() else Fraction(1, 2)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or bits * abs(exponent) > MAX_BITS or (base == 0 and exponent <= 0):
            raise _NoNumberError
        return base ** int(exponent)

    def atom(self) -> Fraction:
        """An operand without a sign of its own."""
        if self.next() in ("(", "{"):
            return self.bracket()
        token = self.take()
        if token == r"\frac":
            top, bottom = self.bracket(), self.bracket()
            return top / bottom
        if token == r"\binom":
            top, bottom = self.bracket(), self.bracket()
            if top.denominator != 1 or bottom.denominator != 1 or not 0 <= bottom <= top <= MAX_FACTORIAL:
                raise _NoNumberError
            return Fraction(math.comb(int(top), int(bottom)))
        if not token[:1].isdigit() and token[:1] != ".":
            raise _NoNumberError
        return Fraction(token.replace(",", ""))

    def bracket(self) -> Fraction:
        """A sum in brackets."""
        closing = {"(": ")", "{": "}"}[self.take("(", "{")]
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _NoNumberError
        value = self.sum()
        self.depth -= 1
        self.take(closing)
        return value


def _factorial(value: Fraction, *, step: int) -> Fraction:
    if value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise _NoNumberError
    return Fraction(math.prod(range(int(value), 0, -step)))


def _limited(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise _NoNumberError
    return value
