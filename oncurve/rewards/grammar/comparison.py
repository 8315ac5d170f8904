"""Comparison of typed values: one rule for each pair of types, and the conversions that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from oncurve.rewards.grammar import regions
from oncurve.rewards.grammar.exact import infinity, rational, same
from oncurve.rewards.grammar.units import DEGREES, RADIANS, Unit
from oncurve.rewards.grammar.values import (
    Amounts,
    Conditional,
    Congruence,
    Date,
    IntegerFamily,
    Interval,
    MatrixValue,
    Members,
    Named,
    Quantity,
    Range,
    Ratio,
    RealSet,
    Relation,
    Time,
    Tree,
    Truths,
    Value,
    Words,
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


def in_radians(found: Quantity, wanted: Quantity) -> tuple[Tree, Tree, tuple[Unit, Unit]]:
    """Both with the same measure of angles, where one is in degrees and the other one names radians or holds pi."""
    turn = quotient(symbol("π"), number(180))
    if found.unit == DEGREES and (wanted.unit == RADIANS or (not wanted.unit and _holds_pi(wanted.tree))):
        return product(found.tree, turn), wanted.tree, (wanted.unit, wanted.unit)
    if found.unit == RADIANS and wanted.unit == DEGREES:
        return found.tree, product(wanted.tree, turn), (found.unit, found.unit)
    return found.tree, wanted.tree, (found.unit, wanted.unit)


def _holds_pi(tree: Tree) -> bool:
    return (tree.kind == "symbol" and tree.name == "π") or any(map(_holds_pi, tree.parts))


def same_constant(found: Tree, wanted: Tree) -> tuple[Tree, Tree]:
    """Both with one name for a constant that is added at the end."""
    if not (found.kind == wanted.kind == "sum"):
        return found, wanted
    last, other = found.parts[-1], wanted.parts[-1]
    is_constant = other == symbol("C") or last == symbol("C")
    if is_constant and last.name in _CONSTANT_NAMES and other.name in _CONSTANT_NAMES:
        return Tree("sum", (*found.parts[:-1], symbol("C")), "", found.value), Tree(
            "sum", (*wanted.parts[:-1], symbol("C"))
        )
    return found, wanted


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


def ratio(one: Tree, other: Tree) -> Fraction | None:
    """The rational number by which two expressions may differ, from their values at one place; None if none fits."""
    names = sorted(one.symbols() | other.symbols())
    for shift in (0, 1):
        place = {name: number(Fraction(7 + 4 * k + shift, 3 + k)) for k, name in enumerate(names)}
        values = [rational(regions.put_all(tree, place)) for tree in (one, other)]
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
        values = without_one_name(value.members)
        if values is not None and all(isinstance(member, Quantity) for member in values):
            points = [member.tree for member in values if isinstance(member, Quantity)]
            return regions.normal(RealSet(tuple(Interval(p, p, is_low_open=False, is_high_open=False) for p in points)))
    return None


def rows_of(found: Value, wanted: MatrixValue) -> tuple[tuple[Tree, ...], ...] | None:
    """The rows of a matrix, a list of lists, or a vector in the shape that is wanted."""
    if isinstance(found, MatrixValue):
        return found.rows
    if isinstance(found, Members) and found.kind == "tuple" and found.brackets in ("()", "[]", "⟨⟩"):
        if not all(isinstance(member, Quantity) for member in found.members):
            return None
        cells = [member.tree for member in found.members if isinstance(member, Quantity)]
        is_column = len(wanted.rows[0]) == 1 and len(cells) > 1
        return tuple((cell,) for cell in cells) if is_column else (tuple(cells),)
    if isinstance(found, Quantity):
        cells = components(found.tree)
        return None if cells is None else tuple((cell,) for cell in cells[: max(len(wanted.rows), 2)])
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


def without_one_name(members: Sequence[Value]) -> list[Value] | None:
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


Algebra = Callable[[Tree, Tree], bool]
"""Decides about two expressions that the exact arithmetic cannot tell apart."""


class AnswerComparison:
    """The rules for pairs of types."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra

    def same(self, found: Value, wanted: Value) -> bool:
        """Whether a value is the wanted one."""
        found, wanted = _adapted(found, wanted)
        rule = _RULES.get((type(found), type(wanted)))
        return rule is not None and rule(self, found, wanted)

    def trees(self, one: Tree, other: Tree) -> bool:
        """Whether two expressions are equal for all values of their variables."""
        if one.has("plusminus") or other.has("plusminus"):
            return one == other
        if one.has("operator") and not other.has("operator"):
            return False  # a sum or integral that nobody has computed is the question again
        decided = same(one, other)
        return self.algebra(one, other) if decided is None else decided

    def quantities(self, found: Quantity, wanted: Quantity) -> bool:
        """The same number or expression, and units that do not contradict each other."""
        if wanted.base not in (None, 10):
            return found.base is not None and (found.base, rational(found.tree)) == (wanted.base, rational(wanted.tree))
        if found.unit.is_percent != wanted.unit.is_percent:
            return self._percent(found, wanted)
        heats = kelvins(found), kelvins(wanted)
        if None not in heats:
            return heats[0] == heats[1]
        is_rate = [len(one.unit.dimensions) > 1 for one in (found, wanted)]
        if found.unit.money is not None and found.unit.money == wanted.unit.money and is_rate[0] != is_rate[1]:
            return self.trees(scaled(found.tree, found.unit.top), scaled(wanted.tree, wanted.unit.top))
        one, other, units = in_radians(found, wanted)
        if not units[0].agrees_with(units[1]):
            return False
        if units[0].dimensions and units[1].dimensions and units[0].factor != units[1].factor:
            one = scaled(one, units[0].factor / units[1].factor)
        if wanted.tree.has("sum") and not found.unit and not wanted.unit:
            one, other = same_constant(one, other)
        return self.trees(one, other)

    def _percent(self, found: Quantity, wanted: Quantity) -> bool:
        """50 % is 1/2, and 50 of a hundred, beside a number without a percent sign and without another unit."""
        share, plain = (found, wanted) if found.unit.is_percent else (wanted, found)
        value = rational(share.tree)
        if plain.unit:
            return False
        if value is not None and abs(value) >= 1 and rational(plain.tree) == value:
            return True
        return self.trees(scaled(share.tree, Fraction(1, 100)), plain.tree)

    def amounts(self, found: Value, wanted: Value) -> bool:
        """A sum in several units equals an amount that has a unit."""
        one, other = (value.total if isinstance(value, Amounts) else value for value in (found, wanted))
        assert isinstance(one, Quantity)
        assert isinstance(other, Quantity)
        return bool(one.unit.dimensions and other.unit.dimensions) and self.quantities(one, other)

    def members(self, found: Members, wanted: Members) -> bool:
        """Tuples in their order, lists and sets in any order; named members by their names."""
        if wanted.kind == "tuple":
            return self._tuple(found, wanted)
        wanted_marks = marks(wanted.members)
        if len(wanted.members) > 1 and all(wanted_marks) and len(set(wanted_marks)) > 1:
            return len(set(wanted_marks)) == len(wanted_marks) and self._marked(found, wanted, wanted_marks)
        if found.kind == "tuple":
            return False
        values = without_one_name(found.members)
        others = without_one_name(wanted.members)
        return values is not None and others is not None and self._pair_up(values, others)

    def _tuple(self, found: Members, wanted: Members) -> bool:
        if found.kind == "list" and wanted.brackets == "()":
            named = [member for member in found.members if isinstance(member, Named)]
            names = [member.name for member in named]
            if len(named) == len(found.members) == len(set(names)):
                ordered = tuple(member.value for member in sorted(named, key=lambda member: member.name))
                found = Members("tuple", ordered, "()")
        is_column = found.brackets == "⟨⟩" and wanted.brackets == "⟨⟩"
        is_vector = wanted.brackets == "⟨⟩" and found.brackets in ("()", "⟨⟩")
        if found.kind != "tuple" or not (found.brackets == wanted.brackets or is_vector or is_column):
            return False
        pairs = zip(found.members, wanted.members, strict=False)
        return len(found.members) == len(wanted.members) and all(self.same(one, other) for one, other in pairs)

    def _marked(self, found: Members, wanted: Members, wanted_marks: Sequence[object]) -> bool:
        """Named values and labelled amounts: each with its own name in any order, or without names in the order."""
        if len(found.members) != len(wanted.members):
            return False
        own = marks(found.members)
        if not any(own):
            pairs = zip(found.members, wanted.members, strict=True)
            return found.kind != "set" and all(self.same(one, value_of(other)) for one, other in pairs)
        if not all(own) or (found.kind == "tuple" and not isinstance(found.members[0], Named)):
            return False
        left = list(zip(wanted_marks, wanted.members, strict=True))
        for mark, member in zip(own, found.members, strict=True):
            partner = next(
                (pair for pair in left if pair[0] == mark and self.same(value_of(member), value_of(pair[1]))), None
            )
            if partner is None:
                return False
            left.remove(partner)
        return True

    def _pair_up(self, found: Sequence[Value], wanted: Sequence[Value]) -> bool:
        left = list(wanted)
        if len(found) != len(left):
            return False
        for member in found:
            partner = next((place for place, other in enumerate(left) if self.same(member, other)), None)
            if partner is None:
                return False
            del left[partner]
        return True

    def named(self, found: Named, wanted: Named) -> bool:
        """The same value of the same name; a label in words may differ."""
        are_words = all(" " in name or (name.isalpha() and len(name) > 3) for name in (found.name, wanted.name))
        return (found.name == wanted.name or are_words) and self.same(found.value, wanted.value)

    def relations(self, found: Value, wanted: Value) -> bool:
        """Relations that the same values satisfy: sides in proportion."""
        one, other = as_relation(found), as_relation(wanted)
        if one is None or other is None:
            return False
        if len(one.sides) != 2 or len(other.sides) != 2:
            return (
                one.signs == other.signs
                and all(map(self.trees, one.sides, other.sides))
                and len(one.sides) == len(other.sides)
            )
        one, other = directed(one), directed(other)
        if one.signs != other.signs:
            return False
        if one.signs[0] not in ("=", "!=", "<", "<="):
            return all(map(self.trees, one.sides, other.sides))
        if frozenset().union(*(side.symbols() for side in one.sides)) != frozenset().union(
            *(side.symbols() for side in other.sides)
        ):
            return False
        return self._proportional(one, other)

    def _proportional(self, one: Relation, other: Relation) -> bool:
        differences = [
            Tree("sum", (relation.sides[0], product(number(-1), relation.sides[1]))) for relation in (one, other)
        ]
        factor = ratio(*differences)
        if factor is None:
            return self.trees(*differences)
        is_turned = one.signs[0] in ("<", "<=") and factor < 0
        return factor != 0 and not is_turned and self.trees(differences[0], scaled(differences[1], factor))

    def regions(self, found: Value, wanted: Value) -> bool:
        """The same numbers, of the same variable where both name one."""
        one, other = as_region(found), as_region(wanted)
        if one is None or other is None:
            return False
        if one.variable and other.variable and one.variable != other.variable:
            return False
        one, other = regions.normal(one), regions.normal(other)
        if len(one.intervals) != len(other.intervals):
            return False
        return all(self._same_interval(*pair) for pair in zip(one.intervals, other.intervals, strict=True))

    def _same_interval(self, one: Interval, other: Interval) -> bool:
        sides = (one.is_low_open, one.is_high_open), (other.is_low_open, other.is_high_open)
        if sides[0] != sides[1] or (one.is_infinity_closed and not other.is_infinity_closed):
            return False
        return all(
            a is b if a is None or b is None else self.trees(a, b)
            for a, b in ((one.low, other.low), (one.high, other.high))
        )

    def matrices(self, found: Value, wanted: MatrixValue) -> bool:
        """The same rows; a list or vector stands for a row or column."""
        rows = rows_of(found, wanted)
        if rows is None or [len(row) for row in rows] != [len(row) for row in wanted.rows]:
            return False
        return all(
            self.trees(a, b)
            for one, other in zip(rows, wanted.rows, strict=True)
            for a, b in zip(one, other, strict=True)
        )

    def ratios(self, found: Value, wanted: Ratio) -> bool:
        """Members in proportion; a time of day as it is."""
        if isinstance(found, Time):
            return wanted.is_clock and _same_clock(found, wanted)
        if isinstance(found, Range):
            if (
                found.difference is not None
                or not isinstance(found.low, Quantity)
                or not isinstance(found.high, Quantity)
            ):
                return False
            found = Ratio((found.low, found.high))
        if isinstance(found, Quantity):
            return len(wanted.members) == 2 and not wanted.is_clock and self._as_share(found, wanted)
        assert isinstance(found, Ratio)
        if len(found.members) != len(wanted.members):
            return False
        pairs = list(zip(found.members, wanted.members, strict=True))
        if all(self.quantities(one, other) for one, other in pairs):
            return True
        if wanted.is_clock:
            return False
        values = [[rational(member.tree) for member in ratio.members] for ratio in (found, wanted)]
        if any(not value for side in values for value in side):
            return False
        first, second = ([value / side[0] for value in side] for side in values)  # type: ignore[operator]
        return first == second

    def _as_share(self, found: Quantity, wanted: Ratio) -> bool:
        top, bottom = (rational(member.tree) for member in wanted.members)
        is_fraction = found.tree.kind == "product" and any(part.kind == "power" for part in found.tree.parts)
        return is_fraction and top is not None and bool(bottom) and rational(found.tree) == top / bottom  # type: ignore[operator]

    def ranges(self, found: Range, wanted: Range) -> bool:
        """The same two ends, of the same thing where both name it."""
        if found.label and wanted.label and found.label != wanted.label:
            return False
        return self.same(found.low, wanted.low) and self.same(found.high, wanted.high)

    def congruences(self, found: Value, wanted: Value) -> bool:
        """The same residues of the same modulus."""
        assert isinstance(found, Congruence)
        if isinstance(wanted, Congruence):
            is_same_name = "" in (found.name, wanted.name) or found.name == wanted.name
            return is_same_name and (found.residues, found.modulus) == (wanted.residues, wanted.modulus)
        if not isinstance(wanted, Quantity) or found.name or found.is_class or len(found.residues) != 1:
            return False
        return self.quantities(Quantity(number(next(iter(found.residues)))), wanted)

    def ranges_as_numbers(self, found: Range, wanted: Quantity) -> bool:
        """``20-5`` beside a number is a subtraction."""
        return found.difference is not None and self.quantities(Quantity(found.difference), wanted)

    def conditionals(self, found: Conditional, wanted: Conditional) -> bool:
        """The same value under the same condition."""
        return self.same(found.value, wanted.value) and self.same(found.condition, wanted.condition)

    def families(self, found: IntegerFamily, wanted: IntegerFamily) -> bool:
        """The same values for the same integers."""
        return found.domain == wanted.domain and self.same(found.value, wanted.value)

    def words(self, found: Value, wanted: Value) -> bool:
        """The same words; two letters may be a product in any order."""
        if isinstance(found, Words) and isinstance(wanted, Words):
            is_product = len(found.letters) == 2 and found.letters == wanted.letters
            return found.text == wanted.text or is_product
        word, other = (found, wanted) if isinstance(found, Words) else (wanted, found)
        assert isinstance(word, Words)
        letters = other.tree if isinstance(other, Quantity) else None
        if (
            letters is None
            or not word.letters
            or letters.kind != "product"
            or not all(part.name for part in letters.parts)
        ):
            return False
        return "".join(sorted(part.name for part in letters.parts)).lower() == word.letters.lower()


def _adapted(found: Value, wanted: Value) -> tuple[Value, Value]:
    """Both without a name that only one gives its value, and a set of one number beside a number as that number."""
    if isinstance(found, Named) and not isinstance(wanted, (Named, Relation, RealSet)):
        found = found.value
    if isinstance(wanted, Named) and not isinstance(found, (Named, Relation, RealSet)):
        wanted = wanted.value
    if isinstance(found, IntegerFamily) != isinstance(wanted, IntegerFamily):
        found, wanted = _without_family(found), _without_family(wanted)
    if isinstance(wanted, Relation) and isinstance(found, Quantity):
        return found, wanted
    return found, wanted


def _without_family(value: Value) -> Value:
    if not isinstance(value, IntegerFamily):
        return value
    return value.plain.value if isinstance(value.plain, Named) else value.plain


def _vector_rule(comparison: AnswerComparison, found: Quantity, wanted: Members) -> bool:
    cells = components(found.tree)
    if cells is None or wanted.kind != "tuple" or not all(isinstance(member, Quantity) for member in wanted.members):
        return False
    others = [member.tree for member in wanted.members if isinstance(member, Quantity)]
    others += [number(0)] * (3 - len(others))
    return len(others) == 3 and all(map(comparison.trees, cells, others))


def _same_clock(found: Time, wanted: Ratio) -> bool:
    hour, minute = (rational(member.tree) for member in wanted.members)
    seconds = int(hour or 0) * 3600 + int(minute or 0) * 60
    return found.seconds == seconds and not found.rest


def _relation_or_value(comparison: AnswerComparison, found: Value, wanted: Value) -> bool:
    """A named value beside an inequality is none; beside an equation the two are compared as equations."""
    if (isinstance(found, Relation) and isinstance(wanted, Named)) or (
        isinstance(found, Named) and isinstance(wanted, Relation)
    ):
        return comparison.relations(found, wanted)
    return comparison.relations(found, wanted)


def _infinite(comparison: AnswerComparison, found: Quantity, wanted: Quantity) -> bool:
    signs = infinity(found.tree), infinity(wanted.tree)
    return comparison.quantities(found, wanted) if signs == (None, None) else signs[0] == signs[1]


def _one_named(comparison: AnswerComparison, found: Named, wanted: RealSet) -> bool:
    return not isinstance(found.value, Quantity) and comparison.regions(found, wanted)


def _value_of_sum(comparison: AnswerComparison, found: Value, wanted: Value) -> bool:
    """``a + b = 58`` states the value of what was asked for; an equation with numbers on its left states none."""
    relation, other = (found, wanted) if isinstance(found, Relation) else (wanted, found)
    assert isinstance(relation, Relation)
    is_stated = set(relation.signs) == {"="} and is_named_sum(relation.sides[0])
    return is_stated and comparison.same(Quantity(relation.sides[-1]), other)


_RULES: dict[tuple[type, type], Callable[..., bool]] = {
    (Quantity, Quantity): _infinite,
    (Amounts, Amounts): AnswerComparison.amounts,
    (Amounts, Quantity): AnswerComparison.amounts,
    (Quantity, Amounts): AnswerComparison.amounts,
    (Members, Members): AnswerComparison.members,
    (Named, Named): AnswerComparison.named,
    (Relation, Quantity): _value_of_sum,
    (Quantity, Relation): _value_of_sum,
    (Relation, Relation): _relation_or_value,
    (Relation, Named): _relation_or_value,
    (Named, Relation): _relation_or_value,
    (RealSet, RealSet): AnswerComparison.regions,
    (Members, RealSet): AnswerComparison.regions,
    (RealSet, Members): AnswerComparison.regions,
    (Named, RealSet): _one_named,
    (MatrixValue, MatrixValue): AnswerComparison.matrices,
    (Members, MatrixValue): AnswerComparison.matrices,
    (Quantity, MatrixValue): AnswerComparison.matrices,
    (Quantity, Members): _vector_rule,
    (Ratio, Ratio): AnswerComparison.ratios,
    (Quantity, Ratio): AnswerComparison.ratios,
    (Range, Ratio): AnswerComparison.ratios,
    (Time, Ratio): AnswerComparison.ratios,
    (Range, Range): AnswerComparison.ranges,
    (Range, Quantity): AnswerComparison.ranges_as_numbers,
    (Congruence, Congruence): AnswerComparison.congruences,
    (Congruence, Quantity): AnswerComparison.congruences,
    (Words, Words): AnswerComparison.words,
    (Words, Quantity): AnswerComparison.words,
    (Quantity, Words): AnswerComparison.words,
    (Conditional, Conditional): AnswerComparison.conditionals,
    (IntegerFamily, IntegerFamily): AnswerComparison.families,
    (Truths, Truths): lambda _, found, wanted: found.letters == wanted.letters and found.rows == wanted.rows,
    (Date, Date): lambda _, found, wanted: found == wanted,
    (Time, Time): lambda _, found, wanted: found == wanted,
}
