"""Types of answers: what the grammar reads, and what comparison compares."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from oncurve.rewards.grammar.units import NO_UNIT, Unit

TreeKind = Literal[
    "number", "symbol", "sum", "product", "power", "call", "root", "factorial", "plusminus", "operator", "determinant"
]


@dataclass(frozen=True, slots=True)
class Tree:
    """An expression.

    The kinds hold: ``number`` its value; ``symbol`` its name; ``power`` base and exponent; ``call`` a function's name
    and its arguments; ``root`` the radicand and the index; ``plusminus`` what the sign stands before, with the sign as
    name; ``operator`` a sum, product, integral or limit: its name, then bounds and body.
    """

    kind: TreeKind
    parts: tuple[Tree, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)

    def has(self, *kinds: TreeKind) -> bool:
        """Whether it or a part of it is one of these."""
        return self.kind in kinds or any(part.has(*kinds) for part in self.parts)

    def symbols(self) -> frozenset[str]:
        """Names of its variables; the constants e, i, pi and infinity are none."""
        if self.kind == "symbol":
            return frozenset() if self.name in CONSTANTS else frozenset((self.name,))
        return frozenset().union(*(part.symbols() for part in self.parts))


CONSTANTS = frozenset(("e", "i", "π", "∞"))


def number(value: Fraction | int) -> Tree:
    """The tree of a number."""
    return Tree("number", value=Fraction(value))


def symbol(name: str) -> Tree:
    """The tree of a variable or constant."""
    return Tree("symbol", name=name)


def product(*parts: Tree) -> Tree:
    """The tree of a product; the part itself where there is one."""
    return parts[0] if len(parts) == 1 else Tree("product", parts)


def negative(tree: Tree) -> Tree:
    """The tree with the other sign."""
    return number(-tree.value) if tree.kind == "number" else product(number(-1), tree)


def quotient(top: Tree, bottom: Tree) -> Tree:
    """The tree of a fraction."""
    return product(top, Tree("power", (bottom, number(-1))))


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number or an expression with the unit behind it."""

    tree: Tree
    unit: Unit = NO_UNIT
    base: int | None = None
    """Base that the number is written with."""
    digits: str = ""
    """Its digits as they are written, where it is a plain number."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """A sum of quantities in smaller and smaller units: 5 feet 6 inches."""

    total: Quantity


@dataclass(frozen=True, slots=True)
class Members:
    """Several values: a list or set in any order, or a tuple in its order."""

    kind: Literal["list", "set", "tuple"]
    members: tuple[Value, ...]
    brackets: str = ""
    """Brackets of a tuple, such as ``(]``."""


@dataclass(frozen=True, slots=True)
class Named:
    """A value with its name or label: ``x = 5``, ``Total: 84``."""

    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class Relation:
    """Expressions with signs of relation between them."""

    sides: tuple[Tree, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of real numbers, or a point; None is an end at infinity."""

    low: Tree | None
    high: Tree | None
    is_low_open: bool = True
    is_high_open: bool = True
    is_infinity_closed: bool = False
    """It is written as if infinity belonged to it."""


@dataclass(frozen=True, slots=True)
class RealSet:
    """A set of real numbers: a union of intervals."""

    intervals: tuple[Interval, ...]
    variable: str = ""


@dataclass(frozen=True, slots=True)
class Truths:
    """An algebra of sets or of statements in letters: for which memberships of the letters it holds."""

    letters: tuple[str, ...]
    rows: frozenset[int]
    kind: Literal["sets", "statements"]


@dataclass(frozen=True, slots=True)
class MatrixValue:
    """Rows of values."""

    rows: tuple[tuple[Tree, ...], ...]
    is_list: bool = False
    """Written as a list of lists."""
    is_turned: bool = False
    """A list that is transposed."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Numbers in proportion: ``2:3``; two of them may be a time of day."""

    members: tuple[Quantity, ...]
    is_clock: bool = False
    is_in_words: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    """Two ends: ``3-6``, ``from 3 to 5``."""

    low: Value
    high: Value
    difference: Tree | None = None
    """The same read as a subtraction, where a hyphen stands between the ends."""
    label: str = ""
    """Noun of what is numbered: page, chapter."""


@dataclass(frozen=True, slots=True)
class Congruence:
    """Residues of one modulus, and the variable where it is named."""

    name: str
    residues: frozenset[int]
    modulus: int
    is_class: bool = False


@dataclass(frozen=True, slots=True)
class Date:
    """A day; the year is None where it is not said."""

    year: int | None
    month: int
    day: int


@dataclass(frozen=True, slots=True)
class Time:
    """A time of day in seconds, with the half of the day where it is said."""

    seconds: int
    half: str | None = None
    rest: str = ""
    """Words behind it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The letter of an option."""

    letter: str


@dataclass(frozen=True, slots=True)
class Words:
    """Words of a language, in lower case."""

    text: str
    letters: str = ""
    """The letters of a short product of variables that it may be as well, sorted."""


@dataclass(frozen=True, slots=True)
class Conditional:
    """A value that holds under a condition; the pieces of a function are several of these."""

    value: Value
    condition: Value


@dataclass(frozen=True, slots=True)
class IntegerFamily:
    """A value for every integer ``k``; the letter is written as ``#``."""

    value: Value
    domain: str
    plain: Value
    """The value with its own letter."""


Value = (
    Quantity | Amounts | Members | Named | Relation | RealSet | Truths | MatrixValue | Ratio | Range | Congruence | Date
    | Time | Choice | Words | Conditional | IntegerFamily
)  # fmt: skip
"""The types of answers."""
