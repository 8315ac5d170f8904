"""Sets of real numbers as unions of intervals, whose ends approximate values put in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cmp_to_key, reduce

from oncurve.rewards.grammar.exact import infinity, rational, same
from oncurve.rewards.grammar.expressions import parse
from oncurve.rewards.grammar.lexemes import Token, Unreadable, closing, split, top
from oncurve.rewards.grammar.values import Interval, RealSet, Tree, negative, number, product, quotient

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


MAX_PIECES = 32
ORDERS = ("<", "<=", ">", ">=")
SIGNS = (*ORDERS, "!=", "∪", "∩", "∖", "∈", "∉")
"""Signs that make a set of numbers of what stands around them."""
RELATIONS = ("=", "≈", "≡", "⇒", "⇔", "→", "≅", "∝", "⊂", "⊆", "⊥", "∥", *SIGNS)
"""Signs between the sides of a relation."""
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}

REALS = RealSet((Interval(None, None),))
EMPTY = RealSet(())


class OrderError(Exception):
    """Two ends of intervals cannot be put in order without algebra."""


def read_region(tokens: Sequence[Token]) -> RealSet:
    """The set of real numbers that tokens write. Raises Unreadable, and OrderError where its ends cannot be ordered.

    Understood are intervals, finite sets, chains of inequalities around one variable, memberships, set-builders, and
    unions, intersections and differences of those.
    """
    pieces = split(tokens, "∪")
    if len(pieces) > MAX_PIECES:
        raise Unreadable("too many intervals")
    return reduce(union, map(_intersection, pieces))


def _intersection(tokens: Sequence[Token]) -> RealSet:
    return reduce(intersection, map(_difference, split(tokens, "∩")))


def _difference(tokens: Sequence[Token]) -> RealSet:
    pieces = split(tokens, "∖")
    if len(pieces) == 1 and len(tokens) > 2 and tokens[0].text == "ℝ" and tokens[1].is_sign("-", "\\\\"):
        pieces = [[tokens[0]], list(tokens[2:])]
    whole, *gaps = (_atom(piece) for piece in pieces)
    for gap in gaps:
        whole = intersection(whole, complement(gap))
    return whole


def _atom(tokens: Sequence[Token]) -> RealSet:
    if not tokens:
        raise Unreadable("a set that is missing")
    first = tokens[0]
    if len(tokens) == 1 and first.text in ("ℝ", "∅"):
        return REALS if first.text == "ℝ" else EMPTY
    if first.text == "ℝ" and tokens[1].is_sign("^", "_"):
        return _part_of_line([token for token in tokens[2:] if token.text != "{}"])
    for sign in ("∈", "∉"):
        if len(pieces := split(tokens, sign)) == 2 and len(pieces[0]) < 6:
            inside = read_region(pieces[1])
            name = variable(pieces[0])
            return RealSet((inside if sign == "∈" else complement(inside)).intervals, name)
    if any(token.is_sign(*ORDERS, "!=") for piece in split(tokens, ",", "|", ":") for token in top(piece)) and (
        first.text != "{" or closing(tokens, 0) != len(tokens) - 1
    ):
        return chain(tokens)
    if first.kind == "open" and closing(tokens, 0) == len(tokens) - 1:
        return _bracketed(tokens)
    raise Unreadable("no set of numbers")


def _part_of_line(index: Sequence[Token]) -> RealSet:
    """The real numbers of an index: ``ℝ^+``, ``ℝ_{>= 0}``, ``ℝ^*``."""
    text = "".join(token.text for token in index)
    if text in ("+", "-", "*"):
        return RealSet(_half(number(0), {"+": ">", "-": "<", "*": "!="}[text]))
    if index and index[0].text in _TURNED:
        return RealSet(_half(parse(index[1:]), index[0].text))
    raise Unreadable("a part of the real numbers")


def bounded(sign: str, bound: Tree) -> RealSet:
    """The numbers on one side of a bound that words give: "at least 5"."""
    return RealSet(_half(bound, sign))


def _bracketed(tokens: Sequence[Token]) -> RealSet:
    opening, inside, close = tokens[0].text, list(tokens[1:-1]), tokens[-1].text
    if opening == "{" and close == "}":
        return _braces(inside)
    members = split(inside, ",", ";")
    if len(members) == 2 and opening in "([" and close in ")]":
        low, high = (end(member) for member in members)
        return RealSet((interval(low, high, is_low_open=opening == "(", is_high_open=close == ")"),))
    if len(members) == 1 and (opening, close) == ("(", ")"):
        return read_region(inside)
    raise Unreadable("no interval")


def _braces(inside: list[Token]) -> RealSet:
    """A set-builder or a finite set."""
    for sign in ("|", ":"):
        if len(pieces := split(inside, sign)) >= 2:
            name = variable(split(pieces[0], "∈")[0])
            rest = [token for piece in pieces[1:] for token in [*piece, Token("sign", sign)]][:-1]
            region = read_region(rest)
            if region.variable not in ("", name):
                raise Unreadable("a set-builder of another variable")
            return RealSet(region.intervals)
    if not inside:
        return EMPTY
    points = [parse(member) for member in split(inside, ",", ";")]
    return normal(RealSet(tuple(Interval(point, point, is_low_open=False, is_high_open=False) for point in points)))


def end(tokens: Sequence[Token]) -> Tree:
    """An end of an interval."""
    tokens = list(tokens)
    if tokens and tokens[0].is_sign("+"):
        tokens = tokens[1:]
    return parse(tokens)


def interval(low: Tree, high: Tree, *, is_low_open: bool, is_high_open: bool) -> Interval:
    """The interval with these ends; what is written as a closed end at infinity is kept in mind."""
    signs = infinity(low), infinity(high)
    if signs[0] == 1 or signs[1] == -1:
        raise Unreadable("an interval that begins at infinity")
    closed = (signs[0] is not None and not is_low_open) or (signs[1] is not None and not is_high_open)
    return Interval(
        None if signs[0] else low,
        None if signs[1] else high,
        is_low_open or bool(signs[0]),
        is_high_open or bool(signs[1]),
        closed,
    )


def variable(tokens: Sequence[Token]) -> str:
    """The name of a variable that stands alone. Raises Unreadable."""
    tree = parse(tokens)
    if tree.kind != "symbol" or tree.name in ("e", "i", "π", "∞"):
        raise Unreadable("no variable")
    return tree.name


def chain(tokens: Sequence[Token]) -> RealSet:
    """The numbers that satisfy ``1 < x <= 3``, ``x > 2`` or ``2x > 6``."""
    sides = [parse(side) for side in split(tokens, *ORDERS, "!=")]
    signs = [token.text for token in top(tokens) if token.is_sign(*ORDERS, "!=")]
    names = frozenset().union(*(side.symbols() for side in sides))
    if len(sides) not in (2, 3) or not names:
        raise Unreadable("no inequality in one variable")
    if len(sides) == 3 and len({sign[0] for sign in signs}) != 1:
        raise Unreadable("signs in different directions")
    parts = [_solved(left, sign, right) for left, sign, right in zip(sides, signs, sides[1:], strict=False)]
    if len({part.variable for part in parts}) != 1:
        raise Unreadable("no inequality in one variable")
    return reduce(intersection, parts)


def _solved(left: Tree, sign: str, right: Tree) -> RealSet:
    for unknown, limit, turned in ((left, right, sign), (right, left, _TURNED[sign])):
        if unknown.kind == "symbol" and unknown.name in unknown.symbols() and unknown.name not in limit.symbols():
            return RealSet(_half(limit, turned), unknown.name)
    names = left.symbols() | right.symbols()
    if len(names) == 1 and (line := _linear(Tree("sum", (left, negative(right))), next(iter(names)))):
        slope, offset = line
        turned = sign if rational(slope) > 0 else _TURNED[sign]  # type: ignore[operator]
        return RealSet(_half(quotient(negative(offset), slope), turned), next(iter(names)))
    return _bent(left, sign, right, names)


def _bent(left: Tree, sign: str, right: Tree, names: frozenset[str]) -> RealSet:
    """The numbers that satisfy ``|x - 2| < 3`` or a quadratic inequality in one variable."""
    name = next(iter(names), "")
    if left.kind == "call" and left.name == "abs" and not right.symbols() and sign in _TURNED:
        inner = left.parts[0]
        low, high = _solved(inner, _TURNED[sign], negative(right)), _solved(inner, sign, right)
        if sign == "!=":
            return intersection(low, high)
        return (intersection if sign in ("<", "<=") else union)(low, high)
    difference = Tree("sum", (left, negative(right)))
    values = [rational(put_all(difference, {name: number(point)})) for point in (0, 1, -1, 2, 5)]
    if len(names) != 1 or difference.has("call", "root", "operator", "determinant") or None in values:
        raise Unreadable("no inequality that can be solved")
    c, plus, minus, *others = values
    a, b = (plus + minus) / 2 - c, (plus - minus) / 2  # type: ignore[operator]
    if a == 0 or any(value != a * x * x + b * x + c for value, x in zip(others, (2, 5), strict=True)):  # type: ignore[operator]
        raise Unreadable("no inequality that can be solved")
    return RealSet(_between_roots(a, b, c, sign if a > 0 else _TURNED[sign]).intervals, name)  # type: ignore[arg-type]


def _between_roots(a: Fraction, b: Fraction, c: Fraction, sign: str) -> RealSet:
    """Where a parabola that opens upwards is below, above or not zero."""
    discriminant = b * b - 4 * a * c
    if discriminant < 0:
        return EMPTY if sign in ("<", "<=") else REALS
    root = Tree("root", (number(discriminant), number(2)))
    low, high = (
        Tree("product", (number(1 / (2 * a)), Tree("sum", (number(-b), product(number(turn), root)))))
        for turn in ((-1, 1) if a > 0 else (1, -1))
    )
    inside = Interval(low, high, sign == "<", sign == "<")
    if sign in ("<", "<="):
        return RealSet((inside,)) if _is_nonempty(_lower(inside), _upper(inside)) else EMPTY
    if sign == "!=":
        gaps = (Interval(point, point, is_low_open=False, is_high_open=False) for point in (low, high))
        return complement(normal(RealSet(tuple(gaps))))
    outside = Interval(low, high, sign == ">=", sign == ">=")
    return complement(RealSet((outside,))) if _is_nonempty(_lower(outside), _upper(outside)) else REALS


def _linear(tree: Tree, name: str) -> tuple[Tree, Tree] | None:
    """Slope and offset of an expression that is linear in a variable with rational numbers."""
    values = [rational(put_all(tree, {name: number(point)})) for point in (0, 1, 2, 3, 7)]
    if None in values:
        return None
    offset, slope = values[0], values[1] - values[0]  # type: ignore[operator]
    is_linear = slope != 0 and all(
        value == offset + slope * x  # type: ignore[operator]
        for value, x in zip(values, (0, 1, 2, 3, 7), strict=True)
    )  # type: ignore[operator]
    return (number(slope), number(offset)) if is_linear and not _has_bend(tree) else None  # type: ignore[arg-type]


def _has_bend(tree: Tree) -> bool:
    return tree.has("call", "root", "factorial", "operator", "determinant") or any(
        part.kind == "power" and part.symbols() for part in _parts(tree)
    )


def _parts(tree: Tree) -> list[Tree]:
    return [tree, *(inner for part in tree.parts for inner in _parts(part))]


def _half(bound: Tree, sign: str) -> tuple[Interval, ...]:
    if infinity(bound) is not None:
        raise Unreadable("a bound at infinity")
    match sign:
        case "<" | "<=":
            return (Interval(None, bound, is_high_open=sign == "<"),)
        case ">" | ">=":
            return (Interval(bound, None, is_low_open=sign == ">"),)
    return Interval(None, bound), Interval(bound, None)


def _compared(first: Tree, second: Tree) -> int:
    """-1, 0 or 1 for less, equal or greater. Raises OrderError where nobody knows."""
    values = rational(first), rational(second)
    if None not in values:
        return (values[0] > values[1]) - (values[0] < values[1])  # type: ignore[operator]
    if same(first, second):
        return 0
    near = approximation(first), approximation(second)
    if None not in near and abs(near[0] - near[1]) > 1e-9 * max(1.0, abs(near[0])):  # type: ignore[operator]
        return 1 if near[0] > near[1] else -1  # type: ignore[operator]
    raise OrderError


Bound = tuple[Tree | None, int]
"""An end, or infinity, and the side on which the set lies: -1 just before it, 1 just behind it."""


def _lower(piece: Interval) -> Bound:
    return piece.low, 1 if piece.is_low_open else -1


def _upper(piece: Interval) -> Bound:
    return piece.high, -1 if piece.is_high_open else 1


def _order(first: Bound, second: Bound, *, infinite: int) -> int:
    """The order of two lower (``infinite`` -1) or two upper ends (1)."""
    if first[0] is None or second[0] is None:
        return infinite * ((first[0] is None) - (second[0] is None))
    return _compared(first[0], second[0]) or (first[1] > second[1]) - (first[1] < second[1])


def _is_nonempty(low: Bound, high: Bound) -> bool:
    if low[0] is None or high[0] is None:
        return True
    order = _compared(low[0], high[0])
    return order < 0 or (order == 0 and low[1] < 0 < high[1])


def normal(region: RealSet) -> RealSet:
    """The same set as intervals from left to right that do not touch."""
    if len(region.intervals) < 2:
        return region
    ordered = sorted(
        region.intervals, key=cmp_to_key(lambda first, second: _order(_lower(first), _lower(second), infinite=-1))
    )
    merged = [ordered[0]]
    for piece in ordered[1:]:
        last = merged[-1]
        if _touches(last, piece):
            high = max(
                (last, piece), key=cmp_to_key(lambda first, second: _order(_upper(first), _upper(second), infinite=1))
            )
            merged[-1] = Interval(
                last.low,
                high.high,
                last.is_low_open,
                high.is_high_open,
                last.is_infinity_closed or high.is_infinity_closed,
            )
        else:
            merged.append(piece)
    return RealSet(tuple(merged), region.variable)


def _touches(left: Interval, right: Interval) -> bool:
    """Whether the right interval begins within the left one or directly behind it."""
    if left.high is None or right.low is None:
        return True
    order = _compared(right.low, left.high)
    return order < 0 or (order == 0 and not (left.is_high_open and right.is_low_open))


def _name(first: RealSet, second: RealSet) -> str:
    if first.variable and second.variable and first.variable != second.variable:
        raise Unreadable("sets of different variables")
    return first.variable or second.variable


def union(first: RealSet, second: RealSet) -> RealSet:
    """The numbers in either."""
    return normal(RealSet(first.intervals + second.intervals, _name(first, second)))


def intersection(first: RealSet, second: RealSet) -> RealSet:
    """The numbers in both."""
    pieces = []
    for left in first.intervals:
        for right in second.intervals:
            low = max((left, right), key=cmp_to_key(lambda a, b: _order(_lower(a), _lower(b), infinite=-1)))
            high = min((left, right), key=cmp_to_key(lambda a, b: _order(_upper(a), _upper(b), infinite=1)))
            if _is_nonempty(_lower(low), _upper(high)):
                closed = left.is_infinity_closed or right.is_infinity_closed
                pieces.append(Interval(low.low, high.high, low.is_low_open, high.is_high_open, closed))
    if len(pieces) > MAX_PIECES:
        raise Unreadable("too many intervals")
    return normal(RealSet(tuple(pieces), _name(first, second)))


def complement(region: RealSet) -> RealSet:
    """All other real numbers."""
    result = REALS
    for piece in region.intervals:
        sides = []
        if piece.low is not None:
            sides.append(Interval(None, piece.low, is_high_open=not piece.is_low_open))
        if piece.high is not None:
            sides.append(Interval(piece.high, None, is_low_open=not piece.is_high_open))
        result = intersection(result, RealSet(tuple(sides)))
    return RealSet(result.intervals, region.variable)


def put_all(tree: Tree, values: dict[str, Tree]) -> Tree:
    """The expression with some variables replaced."""
    if tree.kind == "symbol":
        return values.get(tree.name, tree)
    return Tree(tree.kind, tuple(put_all(part, values) for part in tree.parts), tree.name, tree.value)
