"""Approximate values of constants, which put the ends of intervals in order."""

from __future__ import annotations

import math
from collections.abc import Callable

from oncurve.rewards.grammar.exact import rational
from oncurve.rewards.grammar.values import Tree

_FUNCTIONS: dict[str, Callable[..., float]] = {
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "arcsin": math.asin, "arccos": math.acos, "arctan": math.atan,
    "sinh": math.sinh, "cosh": math.cosh, "tanh": math.tanh, "ln": math.log, "log": math.log, "exp": math.exp,
    "abs": math.fabs, "max": lambda *values: max(values), "min": lambda *values: min(values),
    "cot": lambda x: 1 / math.tan(x), "sec": lambda x: 1 / math.cos(x), "csc": lambda x: 1 / math.sin(x),
}  # fmt: skip
_CONSTANTS = {"π": math.pi, "e": math.e}
MAX_FLOAT = 1e100


def approximation(tree: Tree) -> float | None:
    """The value of a real constant to about twelve digits; None for anything else."""
    try:
        value = _value(tree)
    except (ValueError, OverflowError, ZeroDivisionError, KeyError, TypeError):
        return None
    return value if math.isfinite(value) and abs(value) < MAX_FLOAT else None


def _value(tree: Tree) -> float:
    exact = rational(tree)
    if exact is not None:
        return float(exact)
    match tree.kind:
        case "symbol":
            return _CONSTANTS[tree.name]
        case "sum":
            return math.fsum(map(_value, tree.parts))
        case "product":
            return math.prod(map(_value, tree.parts))
        case "power":
            return math.pow(_value(tree.parts[0]), _value(tree.parts[1]))
        case "root":
            radicand, index = map(_value, tree.parts)
            if radicand < 0 and index % 2 == 1:
                return -math.pow(-radicand, 1 / index)
            return math.pow(radicand, 1 / index)
        case "call":
            return _FUNCTIONS[tree.name](*map(_value, tree.parts))
        case _:
            raise ValueError
