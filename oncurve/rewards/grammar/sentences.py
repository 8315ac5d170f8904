"""Sentences around a value: "She has 18 eggs left"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oncurve.rewards.grammar.brackets import top
from oncurve.rewards.grammar.figures import Token, Unreadable
from oncurve.rewards.grammar.phrases import is_hedged, without_lead
from oncurve.rewards.grammar.quantities import with_signs
from oncurve.rewards.grammar.regions import RELATIONS
from oncurve.rewards.grammar.units import unit_suffix
from oncurve.rewards.grammar.values import Quantity, Value

_COMPUTING = frozenset((
    "twice", "thrice", "double", "triple", "times", "minus", "negative", "plus", "half", "third", "quarter", "root",
    "square",
    "cube", "reciprocal", "opposite", "negation", "logarithm", "number",
))  # fmt: skip
_COMPUTED = frozenset(("squared", "cubed", "factorial", "below", "percent"))


def only_value(
    found: list[Token], read: Callable[[Sequence[Token]], Value], quantity: Callable[[Sequence[Token]], Quantity]
) -> Value | None:
    """The only value of a sentence; None where there are several, or where it does not commit to one."""
    if len(rest := without_lead(found)) < len(found):
        return read(rest)
    if is_hedged(found) or not any(token.kind == "word" for token in found):
        return None
    if any(token.is_sign(*RELATIONS) and not token.is_sign("=") for token in top(found)):
        return None
    chunks = [chunk for chunk in _chunks(found) if not (chunk[1] == chunk[0] + 1 and _is_letter(found[chunk[0]]))]
    if not chunks or not all(_holds_value(found[start:stop]) for start, stop in chunks):
        return None
    delimited = [chunk for chunk in chunks if found[chunk[0]].mode == "formula"]
    if len(chunks) != 1 and not (delimited and delimited[-1] == chunks[-1]):
        figures = [
            chunk
            for chunk in chunks
            if not all(t.is_from_words for t in found[chunk[0] : chunk[1]] if t.kind == "number")
        ]
        chunks = figures if len(figures) == 1 and len(chunks) > 1 else chunks
        if len(chunks) != 1:
            return None
    start, stop = chunks[-1]
    is_one_of = stop == start + 1 and found[start].is_from_words and found[start].value <= 1
    if is_one_of or _is_computed_by_words(found, start, stop):
        return None
    rest = found[start:]
    behind, _ = unit_suffix([*found[start:stop], *_words_behind(rest[stop - start :])])
    try:
        end = len(found[start:stop]) + len(_words_behind(rest[stop - start :]))
        with_unit = found[start : start + end]
        if behind < end:
            return with_signs(quantity(with_unit))
    except Unreadable:
        pass
    return read(found[start:stop])


def _chunks(found: Sequence[Token]) -> list[tuple[int, int]]:
    """Places of the runs of mathematics between words."""
    chunks, start = list[tuple[int, int]](), None
    for place, token in enumerate([*found, Token("word", "end")]):
        is_word = token.kind == "word" and not (
            token.mode != "text" and len(token.text) == 2 and not token.text.isalpha()
        )
        is_article = token.kind == "name" and token.text in ("a", "A", "I") and token.mode != "formula"
        if is_word or is_article or token.is_sign(",", ".", ";", ":", "?", '"', "\\\\", "quad"):
            if start is not None:
                chunks.append((start, place))
                start = None
        elif start is None and not token.is_sign("'", "-", "!", '"'):
            start = place
    return chunks


def _is_letter(token: Token) -> bool:
    """A letter of plain text, which names something and is no value."""
    return token.kind == "name" and token.mode != "formula"


def _holds_value(chunk: Sequence[Token]) -> bool:
    """A number or a formula; a letter of plain text is none."""
    return any(
        token.kind in ("number", "command", "function", "begin") or token.mode == "formula" for token in chunk
    ) and any(token.kind != "sign" for token in chunk)


def _words_behind(found: Sequence[Token]) -> list[Token]:
    kept = []
    for token in found:
        if token.kind not in ("word", "name") and not token.is_sign("%", "/", "^", "°"):
            break
        kept.append(token)
    return kept


def _is_computed_by_words(found: Sequence[Token], start: int, stop: int) -> bool:
    """Words around a number make another one of it: "twice 5", "half of 5", "5 squared"."""
    before = [token.text.lower() for token in found[:start] if token.text.lower() not in ("of", "the")]
    if before and (before[-1] in _COMPUTING or before[-1] in ("-", "*", "/", "^", "+")):
        return True
    after = found[stop].text.lower() if stop < len(found) else ""
    return after in _COMPUTED or (after == "and" and stop + 1 < len(found) and found[stop + 1].kind == "number")
