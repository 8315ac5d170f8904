"""Algebras of sets and statements in letters, as tables of truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from oncurve.rewards.grammar.brackets import closing, split, top
from oncurve.rewards.grammar.figures import Token, Unreadable
from oncurve.rewards.grammar.values import Truths

MAX_VARIABLES = 6
_RANKS = (("⇔",), ("⇒", "→"), ("∨", "∪"), ("∧", "∩", "∖"))
"""Signs of an algebra, the loosest first."""


def read_truths(found: Sequence[Token], letters: Sequence[str] = ()) -> Truths:
    """The algebra of sets or statements that tokens write, over its letters and those given. Raises Unreadable."""
    own = {token.text for token in found if token.kind == "name"}
    names = tuple(sorted(own | set(letters)))
    if not own or len(names) > MAX_VARIABLES or any(len(name) != 1 or not name.isascii() for name in names):
        raise Unreadable("no algebra of letters")
    is_logic = any(token.is_sign("∧", "∨", "¬", "⇒", "⇔", "→") for token in found)
    kind: Literal["sets", "statements"] = "statements" if is_logic else "sets"
    if kind == "sets" and not all(name.isupper() for name in names):
        raise Unreadable("no algebra of sets")
    everything = frozenset(range(2 ** len(names)))
    members = {name: frozenset(row for row in everything if row >> place & 1) for place, name in enumerate(names)}
    return Truths(names, _rows(list(found), members, everything, 0), kind)


def _rows(
    found: list[Token], members: dict[str, frozenset[int]], everything: frozenset[int], depth: int
) -> frozenset[int]:
    if depth > 20 or not found:
        raise Unreadable("no algebra of letters")
    for signs in _RANKS:
        pieces = split(found, *signs)
        if len(pieces) > 1:
            used = [token.text for token in top(found) if token.is_sign(*signs)]
            values = [_rows(piece, members, everything, depth + 1) for piece in pieces]
            return _combined(values, used, everything)
    if found[0].is_sign("¬"):
        return everything - _rows(found[1:], members, everything, depth + 1)
    if found[-1].is_sign("ᶜ", "'"):
        return everything - _rows(found[:-1], members, everything, depth + 1)
    if found[0].text == "overline" and len(found) > 1:
        inside = found[1:]
        if any(token.text == "overline" for token in inside):
            raise Unreadable("a bar over a bar")
        return everything - _rows(inside, members, everything, depth + 1)
    if len(found) == 1 and found[0].text in members and found[0].kind == "name":
        return members[found[0].text]
    if found[0].text in ("(", "{}") and closing(found, 0) == len(found) - 1:
        return _rows(found[1:-1], members, everything, depth + 1)
    raise Unreadable("no algebra of letters")


def _combined(values: list[frozenset[int]], used: list[str], everything: frozenset[int]) -> frozenset[int]:
    if used[0] in ("⇒", "→"):  # from the right
        total = values[-1]
        for value in reversed(values[:-1]):
            total |= everything - value
        return total
    total = values[0]
    for sign, value in zip(used, values[1:], strict=True):
        match sign:
            case "∪" | "∨":
                total |= value
            case "∩" | "∧":
                total &= value
            case "∖":
                total -= value
            case _:
                total = everything - (total ^ value)
    return total
