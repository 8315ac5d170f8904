"""Equations that state a value: names on their left, chains, and chains that contradict themselves."""

from __future__ import annotations

from collections.abc import Sequence

from oncurve.rewards.grammar.brackets import closing
from oncurve.rewards.grammar.exact import rational
from oncurve.rewards.grammar.expressions import parse
from oncurve.rewards.grammar.figures import Token, Unreadable
from oncurve.rewards.grammar.phrases import is_hedged, phrase
from oncurve.rewards.grammar.values import Tree


def stated_side(sides: list[list[Token]]) -> list[Token] | None:
    """The side of a chain that states its value; None for an equation that states none."""
    trees = [tree_or_none(side) for side in sides]
    if len(sides) == 2 and trees[0] is not None and not trees[0].symbols() and name_of(sides[1]) is not None:
        return sides[0]  # 5 = x
    if len(sides) == 2 and trees[1] is not None and trees[1].kind == "symbol" and trees[1].symbols():
        return None
    is_computed = all(tree is None or not tree.symbols() for tree in trees[:-1])
    if trees[0] is not None and trees[0].has("operator"):
        return sides[-1]
    if is_computed and all(
        tree is not None or _has_label(side) for tree, side in zip(trees[:-1], sides[:-1], strict=True)
    ):
        return sides[-1]
    if len(sides) > 2 and (trees[-1] is None or not trees[-1].symbols()):
        return sides[-1]
    return None


def tree_or_none(side: list[Token]) -> Tree | None:
    """The expression of a side; None for words."""
    try:
        return parse(side)
    except Unreadable:
        return None


def _has_label(side: list[Token]) -> bool:
    return any(token.kind == "word" or token.is_sign("$", "€", "£") for token in side)


def refuse_contradiction(sides: list[list[Token]]) -> None:
    """A chain of numbers that are not equal states nothing."""
    trees = [tree for side in sides if (tree := tree_or_none(side)) is not None]
    values = {value for tree in trees if (value := rational(tree)) is not None}
    if len(values) > 1 and all(not _has_label(side) for side in sides):
        raise Unreadable("an equation that is false")


def name_of(found: Sequence[Token]) -> str | None:
    """The name on the left of an equation: a variable, a function's name, a segment, words; None for an expression."""
    found = [token for token in found if token.text not in ("{}",) or token.kind == "sign"]
    if found and found[0].kind == "word" and is_hedged(found):
        raise Unreadable("a condition")
    if not found or any(token.kind == "number" and place == 0 for place, token in enumerate(found)):
        return None
    if found[0].text in ("∠", "△") and len(found) == 2:
        return found[0].text + found[1].text
    if all(token.kind in ("word", "name") for token in found):
        is_product = len(found) > 1 and all(token.kind == "name" for token in found) and found[0].mode != "text"
        return (
            None
            if is_product and len(found) != 2
            else phrase(found)
            if any(t.kind == "word" for t in found)
            else "".join(t.text for t in found)
        )
    is_applied = (
        len(found) > 3 and found[0].kind == "name" and found[1].text == "(" and closing(found, 1) == len(found) - 1
    )
    if is_applied and (found[0].text in "PnNE" or any(token.is_sign("∪", "∩", "|", "ᶜ") for token in found)):
        return "".join(token.text for token in found)
    is_of = any(token.text == "∂" or (token.kind == "word" and token.text[0] == "d") for token in found[1:])
    if found[0].text == "frac" and is_of and all(token.text[0] == "d" for token in found if token.kind == "word"):
        return "".join(token.text for token in found)  # a derivative
    tree = tree_or_none(list(found))
    if tree is not None and tree.kind == "symbol" and tree.symbols():
        return tree.name
    is_function = tree is not None and tree.kind == "call" and found[0].kind in ("name", "word")
    return "".join(token.text for token in found) if is_function else None
