"""Exact arithmetic on expressions that a model wrote, read as syntax and never run."""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DIGITS = 60
"""Most digits of an intermediate result; larger ones are refused."""
LARGEST = Fraction(10**MAX_DIGITS)
Operation = Callable[[Fraction, Fraction], Fraction]


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_DIGITS:
        raise ValueError("an exponent must be a whole number of moderate size")
    return base ** int(exponent)


OPERATIONS: dict[type[ast.operator], Operation] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: lambda left, right: left % right,
    ast.Pow: _power,
}


def evaluate(expression: str) -> str:
    """The value of an arithmetic expression: whole numbers exactly, others to ten digits.

    >>> evaluate("(482913 + 77104) * 2"), evaluate("1/3")
    ('1120034', '0.3333333333')

    Raises ValueError that says what is wrong.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    try:
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("not an arithmetic expression")
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(str(number)) if isinstance(number, float) else Fraction(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return _bounded(OPERATIONS[type(op)](_value(left), _value(right)))
    raise ValueError("not an arithmetic expression")


def _bounded(number: Fraction) -> Fraction:
    if abs(number) > LARGEST or number.denominator > LARGEST:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return number
