"""Symbolic equality: the only door to math-verify's parser; runs only inside a grading process."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy import (
    And,
    Basic,
    Equality,
    Expr,
    FiniteSet,
    Float,
    I,
    Integral,
    Limit,
    MatrixBase,
    Or,
    Product,
    Rational,
    Set,
    Sum,
    Tuple,
    Unequality,
    expand_complex,
    simplify,
    zoo,
)
from sympy.core.relational import Relational

from oncurve.core.errors import Failure, attempt
from oncurve.rewards.equality import equal_answers
from oncurve.rewards.shapes import is_region, pairs_up
from oncurve.rewards.symbolic_sets import Region, read_region, same_region, with_members

for _noisy in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_noisy).setLevel(logging.CRITICAL)

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\_])i(?![a-zA-Z])")
_WRITTEN_OUT = (Sum, Product, Integral, Limit)
_CLOSED_FAR = re.compile(r"\[\s*-\s*\\infty|\\infty\s*\]")
_DIGITS = (400, 5_000)
"""Decimal places to which a difference of constants is computed: at first, and where algebra does not decide."""
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
_PLACES = ((5, 1), (3, 1), (9, 1), (8, -1))
"""Bottom and sign of the values of all variables, whose tops are primes; a place counts only where both sides are real
there."""


class UnparsableReference(Exception):
    """The reference answer is no mathematics that can be read."""


def grade(payload: dict[str, Any]) -> str:
    """The verdict on ``{"candidate": ..., "gold": ...}``: "right", "wrong" or "unparsable_reference"."""
    try:
        if payload["candidate"] is None:  # is it the reference that takes so long?
            equal_expressions(r"\sqrt{2}", payload["gold"])
            return "wrong"
        return "right" if equal_answers(payload["candidate"], payload["gold"], equal_expressions) else "wrong"
    except UnparsableReference:
        return "unparsable_reference"


def equal_expressions(candidate: str, gold: str) -> bool:
    """Whether two expressions are equal for all values of their variables.

    A decimal states its value exactly, so 1.414 is not a root of two.

    Raises UnparsableReference.
    """
    if is_region(gold) or is_region(candidate):
        found, wanted = (read_region(text, _constant) for text in with_members(candidate, gold))
        if wanted is not None:
            if _CLOSED_FAR.search(candidate) and not _CLOSED_FAR.search(gold):
                return False
            found = found or _solved(candidate)
            return found is not None and same_region(found, wanted, is_zero)
    is_gold_complex = _IMAGINARY.search(gold) is not None
    reference = _parse(gold, is_complex=is_gold_complex)
    is_complex = is_gold_complex or _IMAGINARY.search(candidate) is not None
    try:
        if is_complex and not is_gold_complex:
            reference = _parse(gold, is_complex=True)
        answer = _parse(candidate, is_complex=is_complex)
    except UnparsableReference:  # of the answer, or of the reference in the answer's terms
        return False
    is_same = attempt(lambda: same(answer, reference), log=False, passing=lambda error: isinstance(error, MemoryError))
    if not isinstance(is_same, Failure):
        return is_same
    if isinstance(attempt(lambda: same(reference, reference), log=False), Failure):
        raise UnparsableReference(f"{gold}: {is_same.detail}")
    return False  # nothing that can be compared with a reference that is in order


def same(answer: Any, reference: Any) -> bool:
    """Whether two parsed expressions are equal: sets and tuples by their members, relations by their solutions."""
    if _is_relation(reference) or _is_relation(answer):
        return _is_relation(reference) and _is_relation(answer) and _same_relation(answer, reference)
    if isinstance(reference, FiniteSet) or isinstance(answer, FiniteSet):
        return isinstance(answer, type(reference)) and pairs_up(answer.args, reference.args, same)
    if isinstance(reference, (Tuple, tuple)):
        return (
            isinstance(answer, (Tuple, tuple))
            and len(answer) == len(reference)
            and all(same(one, other) for one, other in zip(answer, reference, strict=True))
        )
    if isinstance(reference, MatrixBase) and isinstance(answer, MatrixBase):
        return answer.shape == reference.shape and all(map(same, answer.flat(), reference.flat()))
    if isinstance(reference, Set) and isinstance(answer, Set):
        return same_region((None, answer), (None, reference), is_zero)
    if isinstance(reference, Expr) and isinstance(answer, Expr):
        return _same_value(answer, reference)
    return verify(
        reference,
        answer,
        float_rounding=12,
        numeric_precision=20,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )


def _is_relation(expression: Any) -> bool:
    return isinstance(expression, (And, Or, Relational))


def _same_relation(answer: Any, reference: Any) -> bool:
    """Both are satisfied by the same values: sides in proportion, or the same set of solutions in one variable."""
    if reference.free_symbols != answer.free_symbols:
        return False  # y > 2 is not x > 2
    if all(isinstance(relation, Relational) for relation in (answer, reference)):
        one, other = (_sides(relation) for relation in (answer, reference))
        if type(_turned(answer)) is not type(_turned(reference)):
            return False
        ratio = attempt(lambda: simplify(_exact(one) / _exact(other)), log=False)
        if not isinstance(ratio, Failure) and ratio.is_number and ratio.is_finite and not is_zero(ratio):
            return not _is_ordered(answer) or bool(ratio.is_positive)
        if isinstance(answer, (Equality, Unequality)):
            return False
    found, wanted = _solutions(answer), _solutions(reference)
    return found is not None and wanted is not None and same_region((None, found), (None, wanted), is_zero)


def _sides(relation: Any) -> Any:
    """The difference of both sides, the lesser one first."""
    return relation.lts - relation.gts if _is_ordered(relation) else relation.lhs - relation.rhs


def _is_ordered(relation: Any) -> bool:
    return not isinstance(relation, (Equality, Unequality))


def _turned(relation: Any) -> Any:
    """A relation that is no "greater": for the comparison of kinds."""
    return relation.reversed if relation.rel_op in (">", ">=") else relation


def _solutions(expression: Any) -> Any | None:
    """The set of numbers that satisfy an inequality in one variable; None for anything else."""
    if isinstance(expression, (Equality, Unequality)) or len(expression.free_symbols) != 1:
        return None
    solutions = attempt(expression.as_set, log=False)
    return None if isinstance(solutions, Failure) else solutions


def _solved(text: str) -> Region | None:
    """The solutions of a relation in one variable, such as ``|x| > 2``, and the variable."""
    parsed = attempt(lambda: _parse(text, is_complex=False), log=False)
    if isinstance(parsed, Failure) or not _is_relation(parsed) or len(parsed.free_symbols) != 1:
        return None
    solutions = _solutions(parsed)
    return None if solutions is None else (str(next(iter(parsed.free_symbols))), solutions)


def _exact(expression: Any) -> Any:
    """The expression with every decimal as the fraction that it states."""
    decimals = expression.atoms(Float)
    return expression.xreplace({decimal: Rational(str(decimal)) for decimal in decimals}) if decimals else expression


def _same_value(answer: Any, reference: Any) -> bool:
    """The difference is zero: proved for constants, for expressions at generic places or by algebra."""
    if answer == reference:
        return True
    answer, reference = (_exact(side.doit() if side.has(*_WRITTEN_OUT) else side) for side in (answer, reference))
    symbols = sorted(answer.free_symbols | reference.free_symbols, key=str)
    if not symbols:
        return is_zero(answer - reference)
    if len(symbols) > len(_PRIMES):
        return simplify(answer - reference) == 0
    num_compared = 0
    for bottom, sign in _PLACES:
        tops = _PRIMES if bottom % 2 else _PRIMES[::-1]
        place = {symbol: Rational(sign * top, bottom) for symbol, top in zip(symbols, tops, strict=False)}
        values = [side.subs(place) for side in (answer, reference)]
        if not all(isinstance(value, Expr) and value.is_number for value in values):
            return simplify(answer - reference) == 0
        if any(value.has(zoo) or value.is_finite is False for value in values):
            continue
        if not all(value.is_real for value in values):
            continue
        if not is_zero(values[0] - values[1]):
            return False
        num_compared += 1
    return num_compared > 1 or simplify(answer - reference) == 0


def is_zero(difference: Any) -> bool:
    """Whether a constant is zero, however small it may be otherwise.

    Digits are computed until one is certain. Where none comes, algebra decides; what neither tells from zero in 5,000
    decimal places is zero.
    """
    if difference == 0:
        return True
    if difference.is_Rational or not difference.is_number:  # or a function that nobody has defined
        return False
    if _has_digits(difference, _DIGITS[0]):
        return False
    simple = attempt(lambda: simplify(difference), log=False)
    if not isinstance(simple, Failure) and isinstance(simple, Basic):
        if simple == 0:
            return True
        if simple.is_zero is False:
            return False
    return not _has_digits(difference, _DIGITS[1])


def _has_digits(number: Any, most: int) -> bool:
    """Whether some digit that is not zero can be computed with so many decimal places."""
    value = attempt(lambda: number.evalf(10, maxn=most), log=False)
    if isinstance(value, Failure):
        return False
    return any(part._prec > 1 and part != 0 for part in value.atoms(Float)) or (
        not value.atoms(Float) and value.is_number and value != 0
    )


@lru_cache(maxsize=256)
def _constant(text: str) -> Any:
    """An end of an interval: an exact constant or symbol; None for anything else."""
    value = attempt(lambda: _exact(_read(text, is_complex=False)), log=False)
    return None if isinstance(value, Failure) or not isinstance(value, Expr) else value


@lru_cache(maxsize=256)
def _parse(text: str, *, is_complex: bool) -> Any:
    parsed = attempt(lambda: _read(text, is_complex=is_complex), log=False)
    if isinstance(parsed, Failure):
        raise UnparsableReference(f"{text}: {parsed.detail}")
    return parsed


def _read(text: str, *, is_complex: bool) -> Any:
    normalized = normalize_latex(text, config=_NORMALIZATION)
    expression: Any = latex2sympy(
        normalized,
        is_real=not is_complex,
        convert_degrees=False,
        normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=False),
    )
    if not is_complex:
        return _with_real_roots(expression)
    units = {symbol: I for symbol in expression.free_symbols if symbol.name == "i"}
    return expand_complex(expression.subs(units)) if units else expression


def _with_real_roots(expression: Any) -> Any:
    """Odd roots of negative numbers are the real ones: the cube root of -8 is -2."""
    if not isinstance(expression, Basic):
        return expression

    def _is_odd_root(part: Any) -> bool:
        return part.is_Pow and part.exp.is_Rational and part.exp.q % 2 == 1 and part.exp.q > 1 and part.base.is_negative

    return expression.replace(_is_odd_root, lambda part: (-1) ** part.exp.p * (-part.base) ** part.exp)


_read(r"\frac{1}{2}\sqrt{x}", is_complex=False)  # the parser builds its tables before the first answer is timed
