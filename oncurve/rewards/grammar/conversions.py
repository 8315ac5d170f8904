"""Typed values in the form in which another one can be compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from oncurve.rewards.grammar import regions
from oncurve.rewards.grammar.exact import rational
from oncurve.rewards.grammar.units import DEGREES, RADIANS, Unit
from oncurve.rewards.grammar.values import (
    Interval,
    MatrixValue,
    Members,
    Named,
    Quantity,
    RealSet,
    Relation,
    Tree,
    Value,
    number,
    product,
    quotient,
    symbol,
)

_CONSTANT_NAMES = ("C", "c", "K", "k")
"""Names of the constant of an integral, which has any of them."""
_ZERO_IN_KELVINS = {"K": Fraction(0), "°C": Fraction(27315, 100), "°F": Fraction(45967, 180)}


def kelvins(quantity: Quantity) -> Fraction | None:
    """A temperature on the absolute scale; None for any other quantity."""
    [(base, power), *others] = quantity.unit.dimensions or (("", 0),)
    value = rational(quantity.tree)
    if others or power != 1 or base not in _ZERO_IN_KELVINS or value is None:
        return None
    return value * quantity.unit.factor + _ZERO_IN_KELVINS[base]


def scaled(tree: Tree, factor: Fraction) -> Tree:
    """The expression times a number."""
    return tree if factor == 1 else product(number(factor), tree)


def in_radians(answer: Quantity, reference: Quantity) -> tuple[Tree, Tree, tuple[Unit, Unit]]:
    """Both with the same measure of angles, where one is in degrees and the other one names radians or holds pi."""
    turn = quotient(symbol("π"), number(180))
    if answer.unit == DEGREES and (reference.unit == RADIANS or (not reference.unit and _holds_pi(reference.tree))):
        return product(answer.tree, turn), reference.tree, (reference.unit, reference.unit)
    if answer.unit == RADIANS and reference.unit == DEGREES:
        return answer.tree, product(reference.tree, turn), (answer.unit, answer.unit)
    return answer.tree, reference.tree, (answer.unit, reference.unit)


def _holds_pi(tree: Tree) -> bool:
    return (tree.kind == "symbol" and tree.name == "π") or any(map(_holds_pi, tree.parts))


def same_constant(answer: Tree, reference: Tree) -> tuple[Tree, Tree]:
    """Both with one name for a constant that is added at the end."""
    if not (answer.kind == reference.kind == "sum"):
        return answer, reference
    last, second = answer.parts[-1], reference.parts[-1]
    is_constant = second == symbol("C") or last == symbol("C")
    if is_constant and last.name in _CONSTANT_NAMES and second.name in _CONSTANT_NAMES:
        return Tree("sum", (*answer.parts[:-1], symbol("C")), "", answer.value), Tree(
            "sum", (*reference.parts[:-1], symbol("C"))
        )
    return answer, reference


def as_relation(value: Value) -> Relation | None:
    """A relation, also from a named value; None for anything else."""
    if isinstance(value, Relation):
        return value
    if isinstance(value, Named) and isinstance(value.value, Quantity) and len(value.name) < 8 and not value.value.unit:
        return Relation((symbol(value.name), value.value.tree), ("=",))
    return None


def directed(relation: Relation) -> Relation:
    """The relation with "less" for "greater"."""
    turned = {">": "<", ">=": "<="}
    if relation.signs[0] in turned:
        return Relation(relation.sides[::-1], (turned[relation.signs[0]],))
    return relation


def ratio(first: Tree, second: Tree) -> Fraction | None:
    """The rational number by which two expressions may differ, from their values at one point; None if none fits."""
    names = sorted(first.symbols() | second.symbols())
    for shift in (0, 1):
        point = {name: number(Fraction(7 + 4 * k + shift, 3 + k)) for k, name in enumerate(names)}
        values = [rational(regions.put_all(tree, point)) for tree in (first, second)]
        if None not in values and values[1]:
            return values[0] / values[1]  # type: ignore[operator]
    return None


def as_region(value: Value) -> RealSet | None:
    """A region, also from a pair in brackets that may be an interval, or a set of numbers."""
    if isinstance(value, RealSet):
        return value
    if isinstance(value, Named):
        inner = as_region(value.value) if not isinstance(value.value, Quantity) else None
        return None if inner is None else RealSet(inner.intervals, value.name)
    if (
        isinstance(value, Members)
        and value.kind == "tuple"
        and len(value.members) == 2
        and value.brackets in ("()", "[]", "(]", "[)")
    ):
        low, high = value.members
        if isinstance(low, Quantity) and isinstance(high, Quantity):
            opened = value.brackets[0] == "(", value.brackets[1] == ")"
            return RealSet((regions.interval(low.tree, high.tree, is_low_open=opened[0], is_high_open=opened[1]),))
    if isinstance(value, Members) and value.kind in ("set", "list"):
        values = without_lone_name(value.members)
        if values is not None and all(isinstance(member, Quantity) for member in values):
            points = [member.tree for member in values if isinstance(member, Quantity)]
            return regions.normal(RealSet(tuple(Interval(p, p, is_low_open=False, is_high_open=False) for p in points)))
    return None


def rows_of(answer: Value, reference: MatrixValue) -> tuple[tuple[Tree, ...], ...] | None:
    """The rows of a matrix, a list of lists, or a vector in the shape that is wanted."""
    if isinstance(answer, MatrixValue):
        return answer.rows
    if isinstance(answer, Members) and answer.kind == "tuple" and answer.brackets in ("()", "[]", "⟨⟩"):
        if not all(isinstance(member, Quantity) for member in answer.members):
            return None
        cells = [member.tree for member in answer.members if isinstance(member, Quantity)]
        is_column = len(reference.rows[0]) == 1 and len(cells) > 1
        return tuple((cell,) for cell in cells) if is_column else (tuple(cells),)
    if isinstance(answer, Quantity):
        cells = components(answer.tree)
        return None if cells is None else tuple((cell,) for cell in cells[: max(len(reference.rows), 2)])
    return None


def components(tree: Tree) -> list[Tree] | None:
    """The components of a sum of unit vectors; None for anything else."""
    names = ("î", "ĵ", "k̂")
    if not tree.symbols() & set(names):
        return None
    zero = {name: number(0) for name in names}
    return [regions.put_all(tree, zero | {name: number(1)}) for name in names]


def marks(members: Sequence[Value]) -> list[object]:
    """The marks that tell members apart besides their values: a name, or the unit and noun of an amount."""
    marks: list[object] = []
    for member in members:
        if isinstance(member, Named):
            marks.append(member.name)
        elif isinstance(member, Quantity) and member.unit:
            marks.append((member.unit.dimensions, member.unit.factor, member.unit.label))
        else:
            marks.append("")
    return marks


def value_of(member: Value) -> Value:
    """A member without its name."""
    return member.value if isinstance(member, Named) else member


def without_lone_name(members: Sequence[Value]) -> list[Value] | None:
    """The values of members that are unnamed or all of one variable, ``x_1`` and ``x_2`` included; None for others."""
    names = {member.name.partition("_")[0] for member in members if isinstance(member, Named)}
    if len(names) > 1 or (names and not all(isinstance(member, Named) for member in members)):
        return None
    return [value_of(member) for member in members]


def is_named_sum(tree: Tree) -> bool:
    """An expression of several variables and no numbers: it is what was asked for."""
    if len(tree.symbols()) < 2:
        return False
    return not any(part.kind == "number" and part.value not in (1, -1) for part in _leaves(tree))


def _leaves(tree: Tree) -> list[Tree]:
    return [leaf for part in tree.parts for leaf in _leaves(part)] if tree.parts else [tree]
