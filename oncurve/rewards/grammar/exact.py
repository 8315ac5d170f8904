"""Exact values of expressions: rational numbers, and an arithmetic that decides what roots and variables allow.

``Image`` maps an expression into a finite field in which the rational numbers, square roots, odd roots, the imaginary
unit, logarithms of rational numbers, e, pi and the variables keep every sum and product. Equal expressions have equal
images. Unequal ones have different images but for a chance of about 1e-18, unless a part is opaque: a function whose
laws the field does not know.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b

from oncurve.rewards.grammar.values import CONSTANTS, Tree

MAX_BITS = 200_000
"""Most bits of a value that is computed exactly."""
MAX_FACTORIAL = 3_000
MAX_FUNCTION_BITS = 1_000
MAX_FACTORED = 10**4
"""Largest prime that is looked for in a radicand."""
MAX_DETERMINANT = 5
PRIME = 2**61 - 465
"""A prime of the form 12k - 1 without small factors in ``PRIME - 1``: -1 has no root, and odd roots are unique."""


class NotExactError(Exception):
    """The expression has no rational value, or one that is too large."""


class TooLargeError(NotExactError):
    """Computing the expression would take too much time or memory."""


def rational(tree: Tree) -> Fraction | None:
    """The exact value of arithmetic with rational numbers; None for anything else, or for too large a value."""
    try:
        return _value(tree)
    except (NotExactError, ZeroDivisionError):
        return None


def is_too_large(tree: Tree) -> bool:
    """Whether some part of an expression is a number that is too large to be computed."""
    try:
        _value(tree)
    except TooLargeError:
        return True
    except (NotExactError, ZeroDivisionError):
        return any(is_too_large(part) for part in tree.parts)
    return False


def _limited(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise TooLargeError
    return value


def _value(tree: Tree) -> Fraction:
    match tree.kind:
        case "number":
            return tree.value
        case "sum":
            total = Fraction(0)
            for part in tree.parts:
                total = _limited(total + _value(part))
            return total
        case "product":
            total = Fraction(1)
            for part in tree.parts:
                total = _limited(total * _value(part))
            return total
        case "power" | "root":
            return (_power if tree.kind == "power" else _root)(*map(_value, tree.parts))
        case "factorial":
            return _factorial(_value(tree.parts[0]), tree.name)
        case "call":
            return _called(tree.name, [_value(part) for part in tree.parts])
        case "determinant":
            return _determinant([[_value(cell) for cell in row.parts] for row in tree.parts])
        case _:
            raise NotExactError


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        return _root(_power(base, Fraction(exponent.numerator)), Fraction(exponent.denominator))
    if base == 0 and exponent <= 0:
        raise NotExactError
    bits = base.numerator.bit_length() + base.denominator.bit_length()
    if base not in (0, 1, -1) and (abs(exponent) > MAX_BITS or bits * abs(exponent) > 2 * MAX_BITS):
        raise TooLargeError
    if base in (1, -1):
        return base if exponent % 2 else Fraction(1)
    return _limited(base ** int(exponent))


def _root(radicand: Fraction, index: Fraction) -> Fraction:
    """A root that is rational; odd ones also of negative numbers."""
    if index.denominator != 1 or not 1 <= index <= 100:
        raise NotExactError
    n = int(index)
    if radicand < 0:
        if n % 2 == 0:
            raise NotExactError
        return -_root(-radicand, index)
    if radicand.numerator.bit_length() + radicand.denominator.bit_length() > 8 * MAX_FUNCTION_BITS:
        raise NotExactError
    top, bottom = (_integer_root(value, n) for value in (radicand.numerator, radicand.denominator))
    return Fraction(top, bottom)


def _integer_root(value: int, n: int) -> int:
    low = math.isqrt(value) if n == 2 else round(math.exp(math.log(value) / n)) if value else 0
    for guess in (low - 1, low, low + 1):
        if guess >= 0 and guess**n == value:
            return guess
    if n > 2 and value.bit_length() > 50:  # beyond the precision of the first guess
        low, high = 0, 1 << (value.bit_length() // n + 1)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if middle**n < value else (low, middle)
        if low**n == value:
            return low
    raise NotExactError


def _integer(value: Fraction) -> int:
    if value.denominator != 1:
        raise NotExactError
    return int(value)


def _factorial(value: Fraction, sign: str) -> Fraction:
    n = _integer(value)
    if not 0 <= n <= MAX_FACTORIAL:
        raise TooLargeError
    return Fraction(math.prod(range(n, 0, -2)) if sign == "!!" else math.factorial(n))


_AT_POINTS = {name: {0: 0} for name in ("sin", "tan", "arcsin", "arctan", "sinh", "tanh")} | {
    name: {0: 1} for name in ("cos", "exp", "sec", "cosh")
} | {"ln": {1: 0}}  # fmt: skip
"""Values of functions at rational points."""


def _called(name: str, values: list[Fraction]) -> Fraction:
    if name in ("abs", "floor", "ceil") and len(values) == 1:
        return {"abs": abs, "floor": math.floor, "ceil": math.ceil}[name](values[0]) * Fraction(1)
    if name == "binom" and len(values) == 2:
        return Fraction(_binomial(*map(_integer, values)))
    if name == "mod" and len(values) == 2 and values[1] > 0:
        return values[0] % values[1]
    if name in ("max", "min") and len(values) > 1:
        return (max if name == "max" else min)(values)
    if name in ("gcd", "lcm") and len(values) > 1:
        members = [_integer(value) for value in values]
        if max(map(abs, members)).bit_length() > MAX_FUNCTION_BITS:
            raise TooLargeError
        return _limited(Fraction((math.gcd if name == "gcd" else math.lcm)(*members)))
    if len(values) == 1 and values[0] in _AT_POINTS.get(name, {}):
        return Fraction(_AT_POINTS[name][int(values[0])])
    if name == "log" and len(values) == 2:
        return _logarithm(*values)
    raise NotExactError


def _binomial(n: int, k: int) -> int:
    if k < 0 or n < 0:
        raise NotExactError
    if min(k, max(n - k, 0)) * max(n.bit_length(), 1) > 2 * MAX_FACTORIAL * 10 or n > 10**6:
        raise TooLargeError
    return math.comb(n, k)


def _logarithm(value: Fraction, base: Fraction) -> Fraction:
    """A logarithm that is a rational number with small parts."""
    if value <= 0 or base <= 0 or base == 1 or value.numerator.bit_length() > 8 * MAX_FUNCTION_BITS:
        raise NotExactError
    guess = Fraction(math.log(value.numerator) - math.log(value.denominator)) / Fraction(
        math.log(base.numerator) - math.log(base.denominator)
    )
    near = guess.limit_denominator(12)
    if abs(near) < 2_000 and _power(value, Fraction(near.denominator)) == _power(base, Fraction(near.numerator)):
        return near
    raise NotExactError


def _determinant(rows: list[list[Fraction]]) -> Fraction:
    if len(rows) != len(rows[0]) or len(rows) > MAX_DETERMINANT:
        raise NotExactError
    if len(rows) == 1:
        return rows[0][0]
    total = Fraction(0)
    for column, cell in enumerate(rows[0]):
        minor = [row[:column] + row[column + 1 :] for row in rows[1:]]
        total += (-1) ** column * cell * _determinant(minor)
    return _limited(total)


Element = tuple[int, int]
"""A member a + bi of the field with ``PRIME`` squared members."""


def _times(first: Element, second: Element) -> Element:
    (a, b), (c, d) = first, second
    return (a * c - b * d) % PRIME, (a * d + b * c) % PRIME


def _raised(base: Element, exponent: int) -> Element:
    if exponent < 0:
        a, b = base
        norm = (a * a + b * b) % PRIME
        if norm == 0:
            raise NotExactError
        inverse = pow(norm, -1, PRIME)
        return _raised((a * inverse % PRIME, -b * inverse % PRIME), -exponent)
    result = (1, 0)
    while exponent:
        if exponent & 1:
            result = _times(result, base)
        base, exponent = _times(base, base), exponent >> 1
    return result


@lru_cache(maxsize=4096)
def _drawn(key: str) -> Element:
    """The member of the field that stands for a symbol or an opaque expression."""
    return int.from_bytes(blake2b(key.encode("utf-8", "replace"), digest_size=16).digest(), "big") % PRIME, 0


def _residue(value: Fraction) -> Element:
    if value.denominator % PRIME == 0:
        raise NotExactError
    return value.numerator * pow(value.denominator, -1, PRIME) % PRIME, 0


def factored(n: int) -> dict[int, int] | None:
    """Prime factors with their powers; None where one is too large to be found."""
    powers: dict[int, int] = {}
    prime = 2
    while prime * prime <= n and prime <= MAX_FACTORED:
        while n % prime == 0:
            powers[prime] = powers.get(prime, 0) + 1
            n //= prime
        prime += 1 if prime == 2 else 2
    if n > 1:
        if n > MAX_FACTORED**2:
            return None
        powers[n] = powers.get(n, 0) + 1
    return powers


class Image:
    """The image of an expression, and whether the field knows the laws of all its parts."""

    def __init__(self, tree: Tree) -> None:
        self.is_exact = True
        self.value = self._of(tree)

    def _opaque(self, *key: object) -> Element:
        self.is_exact = False
        return _drawn(repr(key))

    def _of(self, tree: Tree) -> Element:
        if (plain := rational(tree)) is not None:
            return _residue(plain)
        match tree.kind:
            case "sum":
                values = [self._of(part) for part in tree.parts]
                return sum(a for a, _ in values) % PRIME, sum(b for _, b in values) % PRIME
            case "product":
                total = (1, 0)
                for part in tree.parts:
                    total = _times(total, self._of(part))
                return total
            case "power" | "root":
                return (self._power if tree.kind == "power" else self._root)(*tree.parts)
            case "symbol":
                return self._symbol(tree.name)
            case "call":
                return self._call(tree)
            case "determinant":
                return self._of(_expanded(tree))
            case _:
                return self._opaque(tree.kind, tree.name, *(self._of(part) for part in tree.parts))

    def _symbol(self, name: str) -> Element:
        if name == "i":
            return 0, 1
        if name == "∞":
            return self._opaque(name)
        return _drawn(("constant " if name in CONSTANTS else "symbol ") + name)

    def _call(self, tree: Tree) -> Element:
        if tree.name in ("ln", "log") and (value := rational(tree.parts[0])) is not None and value > 0:
            logarithm = self._logarithm(value)
            if tree.name == "ln" or len(tree.parts) == 1:
                return logarithm
            base = rational(tree.parts[1])
            if base is not None and base > 0 and base != 1:
                return _times(logarithm, _raised(self._logarithm(base), -1))
        if tree.name == "log" and len(tree.parts) == 2:
            return _times(
                self._of(Tree("call", (tree.parts[0],), "ln")),
                _raised(self._of(Tree("call", (tree.parts[1],), "ln")), -1),
            )
        if tree.name == "ln" and tree.parts[0] == Tree("symbol", name="e"):
            return 1, 0
        if tree.name == "exp" and len(tree.parts) == 1:
            return self._power(Tree("symbol", name="e"), tree.parts[0])
        return self._opaque(tree.name, *(self._of(part) for part in tree.parts))

    def _logarithm(self, value: Fraction) -> Element:
        total = 0
        for n, sign in ((value.numerator, 1), (value.denominator, -1)):
            factors = factored(n)
            if factors is None:
                return self._opaque("ln", value)
            total += sum(sign * power * _drawn(f"ln {prime}")[0] for prime, power in factors.items())
        return total % PRIME, 0

    def _power(self, base: Tree, exponent: Tree) -> Element:
        power = rational(exponent)
        if power is not None and power.denominator == 1:
            if abs(power) > MAX_BITS:
                raise TooLargeError
            return _raised(self._of(base), int(power))
        if power is not None and power.denominator < 100:
            root = self._root(base, Tree("number", value=Fraction(power.denominator)))
            return _raised(root, int(power.numerator))
        if exponent.kind == "sum":
            total = (1, 0)
            for part in exponent.parts:
                total = _times(total, self._power(base, part))
            return total
        factor, rest = _with_factor(exponent)
        return _raised(self._opaque("power", self._of(base), self._of(rest)), factor)

    def _root(self, radicand: Tree, index: Tree) -> Element:
        value, n = rational(radicand), rational(index)
        if value is None or n is None or n.denominator != 1 or n < 1:
            return self._opaque("root", self._of(radicand), self._of(index))
        if n == 2:
            return self._square_root(value)
        if n % 2 and math.gcd(int(n), PRIME - 1) == 1:
            return pow(_residue(value)[0], pow(int(n), -1, PRIME - 1), PRIME), 0
        return self._opaque("root", value, n)

    def _square_root(self, value: Fraction) -> Element:
        """The square root as a product of the roots of primes, so that roots of products are products of roots."""
        factors = factored(abs(value.numerator) * value.denominator)
        if factors is None:
            return self._opaque("root", value, 2)
        total = _residue(Fraction(1, value.denominator))
        for prime, power in factors.items():
            total = _times(total, (pow(prime, power // 2, PRIME), 0))
            if power % 2:
                total = _times(total, _prime_root(prime))
        return _times(total, (0, 1)) if value < 0 else total


@lru_cache(maxsize=4096)
def _prime_root(prime: int) -> Element:
    root = pow(prime, (PRIME + 1) // 4, PRIME)
    return (root, 0) if root * root % PRIME == prime % PRIME else (0, root)


def _with_factor(tree: Tree) -> tuple[int, Tree]:
    """The integer before an expression, and the rest of it."""
    if tree.kind != "product":
        return 1, tree
    factor = 1
    rest = []
    for part in tree.parts:
        if part.kind == "number" and part.value.denominator == 1 and abs(part.value) < MAX_BITS:
            factor *= int(part.value)
        else:
            rest.append(part)
    if not rest or abs(factor) > MAX_BITS:
        return 1, tree
    return factor, rest[0] if len(rest) == 1 else Tree("product", tuple(rest))


def _expanded(tree: Tree) -> Tree:
    """A determinant as a sum of products."""
    rows = [row.parts for row in tree.parts]
    if len(rows) != len(rows[0]) or len(rows) > MAX_DETERMINANT:
        raise NotExactError
    if len(rows) == 1:
        return rows[0][0]
    terms = []
    for column, cell in enumerate(rows[0]):
        minor = Tree("determinant", tuple(Tree("sum", row[:column] + row[column + 1 :]) for row in rows[1:]))
        terms.append(Tree("product", (Tree("number", value=Fraction((-1) ** column)), cell, _expanded(minor))))
    return Tree("sum", tuple(terms))


def same(left: Tree, right: Tree) -> bool | None:
    """Whether two expressions are equal; None where their laws are beyond this arithmetic."""
    if left == right:
        return None if left.has("operator") and _is_undefined(left) else not _is_undefined(left)
    values = rational(left), rational(right)
    if None not in values:
        return values[0] == values[1]
    if _is_undefined(left) or _is_undefined(right):
        return False
    if _has_infinity(left) or _has_infinity(right):
        return infinity(left) is not None and infinity(left) == infinity(right)
    try:
        first, second = Image(left), Image(right)
    except (NotExactError, ZeroDivisionError, RecursionError):
        return None
    if first.value == second.value:
        return True
    return False if first.is_exact and second.is_exact else None


def _is_undefined(tree: Tree) -> bool:
    """It divides by zero, or is zero to the power of zero."""
    if tree.kind == "power":
        base, exponent = (rational(part) for part in tree.parts)
        if base == 0 and exponent is not None and exponent <= 0:
            return True
    return any(_is_undefined(part) for part in tree.parts)


def infinity(tree: Tree) -> int | None:
    """The sign of an expression that is infinity or minus infinity; None for any other."""
    if tree.kind == "symbol":
        return 1 if tree.name == "∞" else None
    if tree.kind == "product" and len(tree.parts) == 2 and tree.parts[0].kind == "number" and tree.parts[0].value:
        sign = infinity(tree.parts[1])
        return None if sign is None else sign if tree.parts[0].value > 0 else -sign
    return None


def _has_infinity(tree: Tree) -> bool:
    if tree.kind == "operator":
        return False
    return (tree.kind == "symbol" and tree.name == "∞") or any(_has_infinity(part) for part in tree.parts)
