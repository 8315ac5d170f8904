"""Brackets among tokens: where they close, and what stands outside of them."""

from __future__ import annotations

from collections.abc import Sequence

from oncurve.rewards.grammar.figures import Token, Unreadable


def closing(found: Sequence[Token], start: int) -> int:
    """The place of the bracket that closes the one at ``start``. Raises Unreadable."""
    depth = 0
    for place in range(start, len(found)):
        kind = found[place].kind
        depth += (kind in ("open", "begin")) - (kind in ("close", "end"))
        if depth == 0:
            return place
    raise Unreadable("a bracket does not close")


def split(found: Sequence[Token], *signs: str) -> list[list[Token]]:
    """The pieces between these signs, outside of brackets."""
    pieces, depth = [list[Token]()], 0
    for token in found:
        depth += (token.kind in ("open", "begin")) - (token.kind in ("close", "end"))
        if depth == 0 and token.is_sign(*signs):
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def top(found: Sequence[Token]) -> list[Token]:
    """The tokens outside of brackets."""
    kept, depth = [], 0
    for token in found:
        depth += (token.kind in ("open", "begin")) - (token.kind in ("close", "end"))
        if depth == 0:
            kept.append(token)
    return kept
