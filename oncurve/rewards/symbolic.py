"""Symbolic equality: the only door to math-verify; runs only inside a grading process."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy import And, Equality, I, Or, Unequality, expand_complex
from sympy.core.relational import Relational

from oncurve.errors import Failure, attempt
from oncurve.rewards.equality import equal_answers

for _noisy in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_noisy).setLevel(logging.CRITICAL)

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\_])i(?![a-zA-Z])")
_IRRATIONAL = re.compile(
    r"\\(?:sqrt|pi|sin|cos|tan|cot|sec|csc|ln|log|exp|arc\w+)(?![a-zA-Z])|(?<![a-zA-Z])e(?![a-zA-Z])|\^"
)
_POINT = re.compile(r"\d\.\d|(?<!\d)\.\d")


class UnparsableReference(Exception):
    """The reference answer is no mathematics that can be read."""


def grade(payload: dict[str, Any]) -> str:
    """The verdict on ``{"candidate": ..., "gold": ...}``: "right", "wrong" or "unparsable_reference"."""
    try:
        if payload["candidate"] is None:  # is it the reference that takes so long?
            equal_expressions("0", payload["gold"])
            return "wrong"
        return "right" if equal_answers(payload["candidate"], payload["gold"], equal_expressions) else "wrong"
    except UnparsableReference:
        return "unparsable_reference"


def equal_expressions(candidate: str, gold: str) -> bool:
    """Whether two expressions are equal for all values of their variables.

    A decimal beside an irrational reference is an approximation, and is refused.

    Raises UnparsableReference.
    """
    is_complex = any(_IMAGINARY.search(text) for text in (candidate, gold))
    reference = _parse(gold, is_complex=is_complex)
    if _POINT.search(candidate) and not _POINT.search(gold) and _IRRATIONAL.search(gold):
        return False
    try:
        answer = _parse(candidate, is_complex=is_complex)
    except UnparsableReference:
        return False
    if _is_relation(reference) and _is_relation(answer) and reference.free_symbols != answer.free_symbols:
        return False  # y > 2 is not x > 2
    if _solutions(reference) is not None and _solutions(reference) == _solutions(answer):
        return True
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


def _solutions(expression: Any) -> Any | None:
    """The set of numbers that satisfy an inequality in one variable; None for anything else."""
    if (
        not _is_relation(expression)
        or isinstance(expression, (Equality, Unequality))
        or len(expression.free_symbols) != 1
    ):
        return None
    solutions = attempt(expression.as_set, log=False)
    return None if isinstance(solutions, Failure) else solutions


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
        return expression
    units = {symbol: I for symbol in expression.free_symbols if symbol.name == "i"}
    return expand_complex(expression.subs(units)) if units else expression
