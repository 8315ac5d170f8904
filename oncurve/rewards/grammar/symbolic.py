"""Algebra of expressions that the exact arithmetic cannot decide; runs only inside a grading process.

No text is ever given to sympy: its expressions are built from our own trees, with limits.
"""

from __future__ import annotations

from typing import Any

import sympy

from oncurve.core.errors import Failure, attempt
from oncurve.rewards.grammar.equality import equal, read_reference
from oncurve.rewards.grammar.exact import is_too_large, rational
from oncurve.rewards.grammar.lexemes import Unreadable
from oncurve.rewards.grammar.values import Tree

MAX_DEGREE = 1_000
"""Powers of brackets above this are not expanded."""
_DIGITS = (400, 5_000)
"""Decimal places to which a difference of constants is computed: at first, and where algebra does not decide."""
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
_POINTS = ((5, 1), (3, 1), (9, 1), (8, -1))
"""Bottom and sign of the values of all variables, whose tops are primes; a point counts only where both sides are real
there."""
_FUNCTIONS = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc,
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "arccot": sympy.acot, "arcsec": sympy.asec,
    "arccsc": sympy.acsc, "sinh": sympy.sinh, "cosh": sympy.cosh, "tanh": sympy.tanh, "coth": sympy.coth,
    "arcsinh": sympy.asinh, "arccosh": sympy.acosh, "arctanh": sympy.atanh, "ln": sympy.log, "exp": sympy.exp,
    "abs": sympy.Abs, "floor": sympy.floor, "ceil": sympy.ceiling, "binom": sympy.binomial, "max": sympy.Max,
    "min": sympy.Min, "gcd": sympy.gcd, "lcm": sympy.lcm, "mod": sympy.Mod, "Γ": sympy.gamma, "ζ": sympy.zeta,
    "Re": sympy.re, "Im": sympy.im, "arg": sympy.arg, "sgn": sympy.sign,
}  # fmt: skip


class TooHardError(Exception):
    """The expression would take too much time to build."""


def grade(payload: dict[str, Any]) -> str:
    """The verdict on ``{"candidate": ..., "gold": ...}``: "right", "wrong" or "unparsable_reference"."""
    try:
        reference = read_reference(payload["gold"])
    except Unreadable:
        return "unparsable_reference"
    return "right" if equal(payload["candidate"], reference, equal_expressions) else "wrong"


def equal_expressions(first: Tree, second: Tree) -> bool:
    """Whether two expressions are equal for all values of their variables."""
    if is_too_large(first) or is_too_large(second):
        return False
    result = attempt(
        lambda: _same(_built(first), _built(second)), log=False, passing=lambda error: isinstance(error, MemoryError)
    )
    return result is True


def _built(tree: Tree) -> Any:
    """The expression of sympy for a tree. Raises TooHardError."""
    value = rational(tree)
    if value is not None:
        return sympy.Rational(value.numerator, value.denominator)
    match tree.kind:
        case "symbol":
            return _symbol(tree)
        case "sum" | "product":
            return (sympy.Add if tree.kind == "sum" else sympy.Mul)(*map(_built, tree.parts))
        case "power" | "root":
            return (_power if tree.kind == "power" else _root)(*tree.parts)
        case "factorial":
            return (sympy.factorial2 if tree.name == "!!" else sympy.factorial)(_small(tree.parts[0]))
        case "call":
            return _call(tree)
        case "operator":
            return _operator(tree)
        case "determinant":
            return sympy.Matrix([[_built(cell) for cell in row.parts] for row in tree.parts]).det()
    raise TooHardError(tree.kind)


def _symbol(tree: Tree) -> Any:
    if tree.name == "∞":
        return sympy.oo
    return {"e": sympy.E, "i": sympy.I, "π": sympy.pi}.get(tree.name) or sympy.Symbol(tree.name, real=True)


def _small(tree: Tree) -> Any:
    value = rational(tree)
    if value is not None and abs(value) > 3_000:
        raise TooHardError("a large number")
    return _built(tree)


def _power(base: Tree, exponent: Tree) -> Any:
    power = rational(exponent)
    if power is not None and (abs(power.numerator) > MAX_DEGREE or power.denominator > 100):
        raise TooHardError("a large power")
    built = _built(base)
    if power is not None and power.denominator % 2 and power.denominator > 1 and built.is_real and built.is_negative:
        return (-1) ** power.numerator * (-built) ** sympy.Rational(power.numerator, power.denominator)
    return built ** _built(exponent)


def _root(radicand: Tree, index: Tree) -> Any:
    built, n = _built(radicand), _built(index)
    if built.is_negative and n.is_odd:
        return -((-built) ** (1 / n))
    return built ** (1 / n)


def _call(tree: Tree) -> Any:
    arguments = [_built(part) for part in tree.parts]
    if tree.name == "log":
        return sympy.log(arguments[0]) / sympy.log(arguments[1] if len(arguments) > 1 else 10)
    if tree.name == "binom":
        values = [rational(part) for part in tree.parts]
        if any(value is not None and abs(value) > 3_000 for value in values):
            raise TooHardError("a large binomial")
    function = _FUNCTIONS.get(tree.name)
    return function(*arguments) if function is not None else sympy.Function(tree.name)(*arguments)


def _operator(tree: Tree) -> Any:
    letters = sorted({name for name in tree.symbols() if name.startswith("#")})
    *bounds, body = tree.parts
    letter = sympy.Symbol(letters[0] if letters else "#0", real=True)
    built, ends = _built(body), [_built(bound) for bound in bounds]
    if tree.name == "lim" and len(ends) == 1:
        return sympy.Limit(built, letter, ends[0])
    if len(ends) not in (0, 2) or tree.name not in ("sum", "prod", "int"):
        raise TooHardError(tree.name)
    limits = (letter, *ends) if ends else letter
    made = {"sum": sympy.Sum, "prod": sympy.Product, "int": sympy.Integral}[tree.name]
    return made(built, limits)


_WRITTEN_OUT = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)


def _same(answer: Any, reference: Any) -> bool:
    """The difference is zero: proved for constants, for expressions at generic points or by algebra."""
    if answer == reference:
        return True
    answer, reference = (side.doit() if side.has(*_WRITTEN_OUT) else side for side in (answer, reference))
    if answer == reference:
        return True
    symbols = sorted(answer.free_symbols | reference.free_symbols, key=str)
    if not symbols:
        return is_zero(answer - reference)
    if len(symbols) > len(_PRIMES):
        return sympy.simplify(answer - reference) == 0
    num_compared = 0
    for bottom, sign in _POINTS:
        tops = _PRIMES if bottom % 2 else _PRIMES[::-1]
        point = {name: sympy.Rational(sign * top, bottom) for name, top in zip(symbols, tops, strict=False)}
        values = [side.subs(point) for side in (answer, reference)]
        if not all(isinstance(value, sympy.Expr) and value.is_number for value in values):
            return sympy.simplify(answer - reference) == 0
        if any(value.has(sympy.zoo, sympy.nan) or value.is_finite is False for value in values):
            continue
        if not all(value.is_real for value in values):
            continue
        if _has_digits(values[0] - values[1], _DIGITS[0]):
            return False
        num_compared += 1
    return num_compared > 1 or sympy.simplify(answer - reference) == 0


def is_zero(difference: Any) -> bool:
    """Whether a constant is zero, however small it may be otherwise.

    Digits are computed until one is certain. Where none comes, algebra decides; what neither tells from zero in 5,000
    decimal places is zero.
    """
    if difference == 0:
        return True
    if difference.is_Rational or not difference.is_number or difference.has(sympy.zoo, sympy.nan, sympy.oo):
        return False
    if difference.has(sympy.core.function.AppliedUndef):
        return sympy.simplify(difference) == 0
    if _has_digits(difference, _DIGITS[0]):
        return False
    simple = attempt(lambda: sympy.simplify(difference), log=False)
    if not isinstance(simple, Failure) and isinstance(simple, sympy.Basic):
        if simple == 0:
            return True
        if simple.is_zero is False:
            return False
    return not _has_digits(difference, _DIGITS[1])


def _has_digits(value: Any, most: int) -> bool:
    """Whether some digit that is not zero can be computed with so many decimal places."""
    near = attempt(lambda: value.evalf(10, maxn=most), log=False)
    if isinstance(near, Failure):
        return False
    return any(part._prec > 1 and part != 0 for part in near.atoms(sympy.Float)) or (
        not near.atoms(sympy.Float) and near.is_number and near != 0
    )


_same(sympy.sin(sympy.Symbol("#0")) ** 2, sympy.Integer(1))  # the tables are built before the first answer is timed
