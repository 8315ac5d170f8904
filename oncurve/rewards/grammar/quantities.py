"""Numbers and expressions with currencies, units, bases and plus-minus signs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as combinations

from oncurve.rewards.grammar.expressions import parse
from oncurve.rewards.grammar.figures import Token, Unreadable
from oncurve.rewards.grammar.phrases import is_hedged
from oncurve.rewards.grammar.units import DEGREES, NO_UNIT, Unit, unit_suffix
from oncurve.rewards.grammar.values import Members, Quantity, Tree, Value, negative, number

MAX_SIGNS = 4
"""Most plus-minus signs in one value."""
_CURRENCIES = ("$", "€", "£", "¥")


def read_quantity(found: Sequence[Token], *, with_letters: bool = True) -> Quantity:
    """A number or expression with its currency and unit. Raises Unreadable."""
    found = list(found)
    if is_hedged(found):
        raise Unreadable("a hedge")
    sign, currency, found = _currency(found)
    start, unit = unit_suffix(found, with_letters=with_letters)
    has_operator = any(token.kind == "operator" for token in found)
    if has_operator or (unit == DEGREES and any(token.kind == "function" for token in found[:start])):
        start, unit = len(found), NO_UNIT  # an integral's variable, the angle of a sine
    if currency:
        unit = _with_currency(currency, unit)
    inner = _with_base(found[:start])
    while inner and inner[-1].text in ("{}",) and inner[-1].kind == "open":
        raise Unreadable("a unit in a bracket")
    if len(inner) == 1 and inner[0].kind == "number":
        token = inner[0]
        if token.is_from_words and unit.label and not (token.value > 1 and _is_lower(found[start:])):
            raise Unreadable("words")
        value = -token.value if sign < 0 else token.value
        return Quantity(number(value), unit, token.base, ("-" if sign < 0 else "") + token.text)
    tree = parse(inner)
    base, digits = None, ""
    if len(inner) == 2 and inner[0].is_sign("-") and inner[1].kind == "number":
        base, digits = inner[1].base, f"-{inner[1].text}"
    return Quantity(negative(tree) if sign < 0 else tree, unit, base, digits)


def with_signs(value: Quantity) -> Value:
    """The quantity, or the list of the values that its plus-minus signs stand for."""
    if not value.tree.has("plusminus"):
        return value
    count = _count_signs(value.tree)
    if count > MAX_SIGNS:
        raise Unreadable("too many signs")
    has_both = _has_sign(value.tree, "∓")
    choices = [(1,) * count, (-1,) * count] if has_both else list(combinations((1, -1), repeat=count))
    members = tuple(Quantity(_chosen(value.tree, list(choice)), value.unit) for choice in choices)
    return Members("list", members, "±")


def _currency(found: list[Token]) -> tuple[int, str, list[Token]]:
    """Sign, currency and the rest of an amount of money; an empty currency for anything else."""
    if len(found) > 1 and found[0].text.upper() in ("US", "USD", "CAD", "AUD") and found[1].is_sign("$"):
        found = found[1:]
    sign, place = 1, 0
    if found and found[0].is_sign("-", "+"):
        sign, place = (-1 if found[0].is_sign("-") else 1), 1
    if place < len(found) and found[place].is_sign(*_CURRENCIES):
        currency, rest = found[place].text, found[place + 1 :]
        if sign > 0 and rest and rest[0].is_sign("-"):
            sign, rest = -1, rest[1:]
        return sign, currency, rest
    return 1, "", found


def _with_base(found: list[Token]) -> list[Token]:
    """A number and its base behind a macro, ``\\text{110}_2``, as one token."""
    texts = [token for token in found if token.text != "{}"]
    texts = (
        [token for token in texts if token.text not in ("(", ")", "in")]
        if any(t.text == "base" for t in texts)
        else texts
    )
    is_based = (
        len(texts) == 3
        and texts[0].kind == texts[2].kind == "number"
        and (texts[1].is_sign("_") or texts[1].text.lower() == "base")
    )
    digits, base = (texts[0].text, texts[2].value) if is_based else ("", 0)
    if not is_based or not digits.isdigit() or not 2 <= base <= 36 or any(int(digit) >= base for digit in digits):
        return found
    return [Token("number", digits, value=number(int(digits, int(base))).value, base=int(base))]


def _with_currency(currency: str, unit: Unit) -> Unit:
    money = ((currency, 1),)
    if unit.dimensions == money:
        return unit
    if any(power > 0 for _, power in unit.dimensions):
        raise Unreadable("an amount of money with another unit")
    return Unit(tuple(sorted((*money, *unit.dimensions))), unit.factor, unit.label)


def _is_lower(found: Sequence[Token]) -> bool:
    return all(token.text == token.text.lower() for token in found if token.kind == "word")


def _count_signs(tree: Tree) -> int:
    return (tree.kind == "plusminus") + sum(map(_count_signs, tree.parts))


def _has_sign(tree: Tree, sign: str) -> bool:
    return (tree.kind == "plusminus" and tree.name == sign) or any(_has_sign(part, sign) for part in tree.parts)


def _chosen(tree: Tree, signs: list[int]) -> Tree:
    """The expression with each plus-minus sign replaced by the next of ``signs``."""
    if tree.kind == "plusminus":
        sign = signs.pop(0) * (1 if tree.name == "±" else -1)
        part = _chosen(tree.parts[0], signs)
        return part if sign > 0 else negative(part)
    if not tree.parts:
        return tree
    return Tree(tree.kind, tuple(_chosen(part, signs) for part in tree.parts), tree.name, tree.value)
