"""Comparison of typed values: one rule for each pair of types."""

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
    without_lone_name,
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
    symbol,
)

Algebra = Callable[[Tree, Tree], bool]
"""Decides about two expressions that the exact arithmetic cannot tell apart."""


class AnswerComparison:
    """The rules for pairs of types."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra

    def same(self, answer: Value, reference: Value) -> bool:
        """Whether a value is the wanted one."""
        answer, reference = _adapted(answer, reference)
        rule = _RULES.get((type(answer), type(reference)))
        return rule is not None and rule(self, answer, reference)

    def trees(self, first: Tree, second: Tree) -> bool:
        """Whether two expressions are equal for all values of their variables."""
        if first.has("plusminus") or second.has("plusminus"):
            return first == second
        if first.has("operator") and not second.has("operator"):
            return False  # a sum or integral that nobody has computed is the question again
        decided = same(first, second)
        return self.algebra(first, second) if decided is None else decided

    def quantities(self, answer: Quantity, reference: Quantity) -> bool:
        """The same number or expression, and units that do not contradict each other."""
        if reference.base not in (None, 10):
            return answer.base is not None and (answer.base, rational(answer.tree)) == (
                reference.base,
                rational(reference.tree),
            )
        if answer.unit.is_percent != reference.unit.is_percent:
            return self._percent(answer, reference)
        heats = kelvins(answer), kelvins(reference)
        if None not in heats:
            return heats[0] == heats[1]
        is_rate = [len(first.unit.dimensions) > 1 for first in (answer, reference)]
        if answer.unit.money is not None and answer.unit.money == reference.unit.money and is_rate[0] != is_rate[1]:
            return self.trees(scaled(answer.tree, answer.unit.top), scaled(reference.tree, reference.unit.top))
        first, second, units = in_radians(answer, reference)
        if not units[0].agrees_with(units[1]):
            return False
        if units[0].dimensions and units[1].dimensions and units[0].factor != units[1].factor:
            first = scaled(first, units[0].factor / units[1].factor)
        if reference.tree.has("sum") and not answer.unit and not reference.unit:
            first, second = same_constant(first, second)
        return self.trees(first, second)

    def _percent(self, answer: Quantity, reference: Quantity) -> bool:
        """50 % is 1/2, and 50 of a hundred, beside a number without a percent sign and without another unit."""
        share, plain = (answer, reference) if answer.unit.is_percent else (reference, answer)
        value = rational(share.tree)
        if plain.unit:
            return False
        if value is not None and abs(value) >= 1 and rational(plain.tree) == value:
            return True
        return self.trees(scaled(share.tree, Fraction(1, 100)), plain.tree)

    def amounts(self, answer: Value, reference: Value) -> bool:
        """A sum in several units equals an amount that has a unit."""
        first, second = (value.total if isinstance(value, Amounts) else value for value in (answer, reference))
        assert isinstance(first, Quantity)
        assert isinstance(second, Quantity)
        return bool(first.unit.dimensions and second.unit.dimensions) and self.quantities(first, second)

    def members(self, answer: Members, reference: Members) -> bool:
        """Tuples in their order, lists and sets in any order; named members by their names."""
        if reference.kind == "tuple":
            return self._tuple(answer, reference)
        reference_marks = marks(reference.members)
        if len(reference.members) > 1 and all(reference_marks) and len(set(reference_marks)) > 1:
            return len(set(reference_marks)) == len(reference_marks) and self._marked(
                answer, reference, reference_marks
            )
        if answer.kind == "tuple":
            return False
        values = without_lone_name(answer.members)
        others = without_lone_name(reference.members)
        return values is not None and others is not None and self._pair_up(values, others)

    def _tuple(self, answer: Members, reference: Members) -> bool:
        if answer.kind == "list" and reference.brackets == "()":
            named = [member for member in answer.members if isinstance(member, Named)]
            names = [member.name for member in named]
            if len(named) == len(answer.members) == len(set(names)):
                ordered = tuple(member.value for member in sorted(named, key=lambda member: member.name))
                answer = Members("tuple", ordered, "()")
        is_column = answer.brackets == "⟨⟩" and reference.brackets == "⟨⟩"
        is_vector = reference.brackets == "⟨⟩" and answer.brackets in ("()", "⟨⟩")
        if answer.kind != "tuple" or not (answer.brackets == reference.brackets or is_vector or is_column):
            return False
        pairs = zip(answer.members, reference.members, strict=False)
        return len(answer.members) == len(reference.members) and all(
            self.same(first, second) for first, second in pairs
        )

    def _marked(self, answer: Members, reference: Members, reference_marks: Sequence[object]) -> bool:
        """Named values and labelled amounts: each with its own name in any order, or without names in the order."""
        if len(answer.members) != len(reference.members):
            return False
        own = marks(answer.members)
        if not any(own):
            pairs = zip(answer.members, reference.members, strict=True)
            return answer.kind != "set" and all(self.same(first, value_of(second)) for first, second in pairs)
        if not all(own) or (answer.kind == "tuple" and not isinstance(answer.members[0], Named)):
            return False
        left = list(zip(reference_marks, reference.members, strict=True))
        for mark, member in zip(own, answer.members, strict=True):
            partner = next(
                (pair for pair in left if pair[0] == mark and self.same(value_of(member), value_of(pair[1]))), None
            )
            if partner is None:
                return False
            left.remove(partner)
        return True

    def _pair_up(self, answer: Sequence[Value], reference: Sequence[Value]) -> bool:
        left = list(reference)
        if len(answer) != len(left):
            return False
        for member in answer:
            partner = next((index for index, candidate in enumerate(left) if self.same(member, candidate)), None)
            if partner is None:
                return False
            del left[partner]
        return True

    def named(self, answer: Named, reference: Named) -> bool:
        """The same value of the same name; a label in words may differ, and the graph of a function of x is its y."""
        are_words = all(" " in name or (name.isalpha() and len(name) > 3) for name in (answer.name, reference.name))
        are_graphs = {answer.name, reference.name} in ({"y", "f(x)"}, {"y", "g(x)"}, {"y", "h(x)"})
        if answer.name == reference.name or are_words or are_graphs:
            return self.same(answer.value, reference.value)
        sides = (Quantity(symbol(answer.name)), Quantity(symbol(reference.name)))
        return (reference.value, answer.value) == sides  # `x = y` for `y = x`

    def relations(self, answer: Value, reference: Value) -> bool:
        """Relations that the same values satisfy: sides in proportion."""
        first, second = as_relation(answer), as_relation(reference)
        if first is None or second is None:
            return False
        if len(first.sides) != 2 or len(second.sides) != 2:
            return (
                first.signs == second.signs
                and all(map(self.trees, first.sides, second.sides))
                and len(first.sides) == len(second.sides)
            )
        first, second = directed(first), directed(second)
        if first.signs != second.signs:
            return False
        if first.signs[0] not in ("=", "!=", "<", "<="):
            return all(map(self.trees, first.sides, second.sides))
        if frozenset().union(*(side.symbols() for side in first.sides)) != frozenset().union(
            *(side.symbols() for side in second.sides)
        ):
            return False
        return self._proportional(first, second)

    def _proportional(self, first: Relation, second: Relation) -> bool:
        differences = [
            Tree("sum", (relation.sides[0], product(number(-1), relation.sides[1]))) for relation in (first, second)
        ]
        factor = ratio(*differences)
        if factor is None:
            return self.trees(*differences)
        is_turned = first.signs[0] in ("<", "<=") and factor < 0
        return factor != 0 and not is_turned and self.trees(differences[0], scaled(differences[1], factor))

    def regions(self, answer: Value, reference: Value) -> bool:
        """The same numbers, of the same variable where both name one."""
        first, second = as_region(answer), as_region(reference)
        if first is None or second is None:
            return False
        if first.variable and second.variable and first.variable != second.variable:
            return False
        first, second = regions.normal(first), regions.normal(second)
        if len(first.intervals) != len(second.intervals):
            return False
        return all(self._same_interval(*pair) for pair in zip(first.intervals, second.intervals, strict=True))

    def _same_interval(self, first: Interval, second: Interval) -> bool:
        sides = (first.is_low_open, first.is_high_open), (second.is_low_open, second.is_high_open)
        if sides[0] != sides[1] or (first.is_infinity_closed and not second.is_infinity_closed):
            return False
        return all(
            a is b if a is None or b is None else self.trees(a, b)
            for a, b in ((first.low, second.low), (first.high, second.high))
        )

    def matrices(self, answer: Value, reference: MatrixValue) -> bool:
        """The same rows; a list or vector stands for a row or column."""
        rows = rows_of(answer, reference)
        if rows is None or [len(row) for row in rows] != [len(row) for row in reference.rows]:
            return False
        return all(
            self.trees(a, b)
            for first, second in zip(rows, reference.rows, strict=True)
            for a, b in zip(first, second, strict=True)
        )

    def ratios(self, answer: Value, reference: Ratio) -> bool:
        """Members in proportion; a time of day as it is."""
        if isinstance(answer, Time):
            return reference.is_clock and _same_clock(answer, reference)
        if isinstance(answer, Range):
            if (
                answer.difference is not None
                or not isinstance(answer.low, Quantity)
                or not isinstance(answer.high, Quantity)
            ):
                return False
            answer = Ratio((answer.low, answer.high))
        if isinstance(answer, Quantity):
            return len(reference.members) == 2 and not reference.is_clock and self._as_share(answer, reference)
        assert isinstance(answer, Ratio)
        if len(answer.members) != len(reference.members):
            return False
        pairs = list(zip(answer.members, reference.members, strict=True))
        if all(self.quantities(member, counterpart) for member, counterpart in pairs):
            return True
        if reference.is_clock:
            return False
        values = [[rational(member.tree) for member in ratio.members] for ratio in (answer, reference)]
        if any(not value for side in values for value in side):
            return False
        first, second = ([value / side[0] for value in side] for side in values)  # type: ignore[operator]
        return first == second

    def _as_share(self, answer: Quantity, reference: Ratio) -> bool:
        top, bottom = (rational(member.tree) for member in reference.members)
        is_fraction = answer.tree.kind == "product" and any(part.kind == "power" for part in answer.tree.parts)
        return is_fraction and top is not None and bool(bottom) and rational(answer.tree) == top / bottom  # type: ignore[operator]

    def ranges(self, answer: Range, reference: Range) -> bool:
        """The same two ends, of the same thing where both name it."""
        if answer.label and reference.label and answer.label != reference.label:
            return False
        return self.same(answer.low, reference.low) and self.same(answer.high, reference.high)

    def congruences(self, answer: Value, reference: Value) -> bool:
        """The same residues of the same modulus."""
        assert isinstance(answer, Congruence)
        if isinstance(reference, Congruence):
            is_same_name = "" in (answer.name, reference.name) or answer.name == reference.name
            return is_same_name and (answer.residues, answer.modulus) == (reference.residues, reference.modulus)
        if not isinstance(reference, Quantity) or answer.name or answer.is_class or len(answer.residues) != 1:
            return False
        return self.quantities(Quantity(number(next(iter(answer.residues)))), reference)

    def ranges_as_numbers(self, answer: Range, reference: Quantity) -> bool:
        """``20-5`` beside a number is a subtraction."""
        return answer.difference is not None and self.quantities(Quantity(answer.difference), reference)

    def conditionals(self, answer: Conditional, reference: Conditional) -> bool:
        """The same value under the same condition."""
        return self.same(answer.value, reference.value) and self.same(answer.condition, reference.condition)

    def families(self, answer: IntegerFamily, reference: IntegerFamily) -> bool:
        """The same values for the same integers."""
        return answer.domain == reference.domain and self.same(answer.value, reference.value)

    def words(self, answer: Value, reference: Value) -> bool:
        """The same words; two letters may be a product in any order."""
        if isinstance(answer, Words) and isinstance(reference, Words):
            is_product = len(answer.letters) == 2 and answer.letters == reference.letters
            return answer.text == reference.text or is_product
        word, second = (answer, reference) if isinstance(answer, Words) else (reference, answer)
        assert isinstance(word, Words)
        letters = second.tree if isinstance(second, Quantity) else None
        if (
            letters is None
            or not word.letters
            or letters.kind != "product"
            or not all(part.name for part in letters.parts)
        ):
            return False
        return "".join(sorted(part.name for part in letters.parts)).lower() == word.letters.lower()


def _adapted(answer: Value, reference: Value) -> tuple[Value, Value]:
    """Both without a name that only one gives its value, and a set of one number beside a number as that number."""
    if isinstance(answer, Named) and not isinstance(reference, (Named, Relation, RealSet)):
        answer = answer.value
    if isinstance(reference, Named) and not isinstance(answer, (Named, Relation, RealSet)):
        reference = reference.value
    if isinstance(answer, IntegerFamily) != isinstance(reference, IntegerFamily):
        if (pair := _with_equal_letters(answer, reference)) is not None:
            return pair
        answer, reference = _without_family(answer), _without_family(reference)
    return answer, reference


_INTEGER_LETTERS = frozenset("jklmn")
"""Letters that stand for an integer where nothing says so."""


def _with_equal_letters(answer: Value, reference: Value) -> tuple[Value, Value] | None:
    """A family of values and an expression with another letter for its integer, both with the same one; else None."""
    family, other = (answer, reference) if isinstance(answer, IntegerFamily) else (reference, answer)
    assert isinstance(family, IntegerFamily)
    plain = _without_family(family)
    if not isinstance(plain, Quantity) or not isinstance(family.value, Quantity) or not isinstance(other, Quantity):
        return None
    letters = other.tree.symbols() - plain.tree.symbols()
    if len(letters) != 1 or not letters < _INTEGER_LETTERS:
        return None
    renamed = Quantity(regions.put_all(other.tree, {next(iter(letters)): symbol("#")}), other.unit)
    return (family.value, renamed) if family is answer else (renamed, family.value)


def _without_family(value: Value) -> Value:
    if not isinstance(value, IntegerFamily):
        return value
    return value.plain.value if isinstance(value.plain, Named) else value.plain


def _vector_rule(comparison: AnswerComparison, answer: Quantity, reference: Members) -> bool:
    cells = components(answer.tree)
    if (
        cells is None
        or reference.kind != "tuple"
        or not all(isinstance(member, Quantity) for member in reference.members)
    ):
        return False
    others = [member.tree for member in reference.members if isinstance(member, Quantity)]
    others += [number(0)] * (3 - len(others))
    return len(others) == 3 and all(map(comparison.trees, cells, others))


def _same_clock(answer: Time, reference: Ratio) -> bool:
    hour, minute = (rational(member.tree) for member in reference.members)
    seconds = int(hour or 0) * 3600 + int(minute or 0) * 60
    return answer.seconds == seconds and not answer.rest


def _relation_or_value(comparison: AnswerComparison, answer: Value, reference: Value) -> bool:
    """Compared as equations; one that is not solved, such as ``2x = 10``, does not state that ``x = 5``."""
    if isinstance(answer, Relation) and isinstance(reference, Named) and isinstance(reference.value, Quantity):
        is_number, name = not reference.value.tree.symbols(), symbol(reference.name)
        if is_number and name not in answer.sides:
            return False
    return comparison.relations(answer, reference)


def _column_as_tuple(comparison: AnswerComparison, answer: MatrixValue, reference: Members) -> bool:
    """A column for the tuple of its numbers."""
    members = [member.tree for member in reference.members if isinstance(member, Quantity)]
    if reference.kind != "tuple" or len(members) != len(reference.members) or len(members) != len(answer.rows):
        return False
    is_column = all(len(row) == 1 for row in answer.rows)
    return is_column and all(map(comparison.trees, (row[0] for row in answer.rows), members))


def _infinite(comparison: AnswerComparison, answer: Quantity, reference: Quantity) -> bool:
    signs = infinity(answer.tree), infinity(reference.tree)
    return comparison.quantities(answer, reference) if signs == (None, None) else signs[0] == signs[1]


def _named_in_region(comparison: AnswerComparison, answer: Named, reference: RealSet) -> bool:
    return not isinstance(answer.value, Quantity) and comparison.regions(answer, reference)


def _value_of_sum(comparison: AnswerComparison, answer: Value, reference: Value) -> bool:
    """``a + b = 58`` states the value of what was asked for; an equation with numbers on its left states none."""
    relation, other = (answer, reference) if isinstance(answer, Relation) else (reference, answer)
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
    (Named, RealSet): _named_in_region,
    (MatrixValue, MatrixValue): AnswerComparison.matrices,
    (Members, MatrixValue): AnswerComparison.matrices,
    (Quantity, MatrixValue): AnswerComparison.matrices,
    (Quantity, Members): _vector_rule,
    (Members, Quantity): lambda comparison, answer, reference: _vector_rule(comparison, reference, answer),
    (MatrixValue, Members): _column_as_tuple,
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
    (Truths, Truths): lambda _, answer, reference: (
        answer.letters == reference.letters and answer.rows == reference.rows
    ),
    (Date, Date): lambda _, answer, reference: answer == reference,
    (Time, Time): lambda _, answer, reference: answer == reference,
}
