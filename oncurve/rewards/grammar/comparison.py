"""AnswerComparison of typed values: one rule for each pair of types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from oncurve.rewards.grammar import regions
from oncurve.rewards.grammar.conversions import (
    as_region,
    as_relation,
    components,
    directed,
    in_radians,
    is_named_sum,
    kelvins,
    marks,
    ratio,
    rows_of,
    same_constant,
    scaled,
    value_of,
    without_one_name,
)
from oncurve.rewards.grammar.exact import infinity, rational, same
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
)

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
