"""Preparation of tokens: numbers in figures, brackets and commas as they are meant, nothing idle around them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from oncurve.rewards.grammar.brackets import closing
from oncurve.rewards.grammar.figures import Token
from oncurve.rewards.grammar.forms import ORDINALS
from oncurve.rewards.grammar.lexer import as_members, tokens
from oncurve.rewards.grammar.numerals import with_figures


def prepared(text: str) -> list[Token]:
    """The tokens of an answer with numbers in figures, without ordinal endings."""
    return _bare(_without_ordinals(with_figures(_inward(_angled(tokens(text))))))


def _angled(found: list[Token]) -> list[Token]:
    """``<1, 2>`` as a vector."""
    is_vector = len(found) > 4 and found[0].is_sign("<") and found[-1].is_sign(">")
    if is_vector and any(token.is_sign(",") for token in found):
        return [Token("open", "⟨"), *found[1:-1], Token("close", "⟩")]
    return found


def separated(found: list[Token], *, everywhere: bool) -> list[Token]:
    """The tokens with the commas of a number as separators where they may be: between members of a bracket, in a text
    that puts no space behind a comma."""
    has_spaced_commas = any(token.is_sign(",") and after.has_space for token, after in itertools.pairwise(found))
    has_commas = any(token.is_sign(",") for token in found)
    result: list[Token] = []
    depth = 0
    for place, token in enumerate(found):
        if token.text != "{}":
            depth += (token.kind == "open") - (token.kind == "close")
        is_alone = 0 < place < len(found) - 1 and found[place - 1].kind == "open" and found[place + 1].kind == "close"
        is_split = everywhere or (depth > 0 and not has_spaced_commas and not (is_alone and not has_commas))
        if token.kind != "number" or "," not in token.text or not is_split:
            result.append(token)
            continue
        for position, member in enumerate(as_members(token)):
            result += [Token("sign", ",")] * bool(position) + [member]
    return result


def _is_balanced(found: list[Token]) -> bool:
    depth = 0
    for token in found:
        depth += (token.kind == "open") - (token.kind == "close")
        if depth < 0:
            return False
    return depth == 0


def _inward(found: list[Token]) -> list[Token]:
    """``]1,4[`` with the brackets of an open interval."""
    if _is_balanced(found):
        return found
    depth, turned = 0, list(found)
    for place, token in enumerate(found):
        if token.text == "]" and depth == 0:
            turned[place], depth = replace(token, kind="open", text="("), 1
        elif (
            token.text == "[" and depth == 1 and (place + 1 == len(found) or found[place + 1].kind in ("sign", "word"))
        ):
            turned[place], depth = replace(token, kind="close", text=")"), 0
        elif token.text != "{}":
            depth += (token.kind == "open") - (token.kind == "close")
    return turned if depth == 0 else found


def trimmed(found: list[Token]) -> list[Token]:
    """The tokens without closing punctuation, an opening equals sign or a group around all of them."""
    before = -1
    while found and before != len(found):
        before = len(found)
        while found and (found[-1].is_sign(".", ",", ";", ":", "\\\\", "quad", "&", "!") and not _counts(found)):
            found = found[:-1]
        while found and found[0].is_sign("quad", "&", ":", "."):
            found = found[1:]
        if len(found) > 1 and found[0].is_sign("=") and not _is_formula(found[1:]):
            found = found[1:]
        if len(found) > 1 and found[0].text == "{}" and found[0].kind == "open" and closing(found, 0) == len(found) - 1:
            found = found[1:-1]
    return found


def _counts(found: list[Token]) -> bool:
    """A closing exclamation mark is a factorial behind a number or a bracket."""
    return found[-1].is_sign("!") and len(found) > 1 and found[-2].kind != "word"


def _is_formula(found: Sequence[Token]) -> bool:
    """Whether the text behind an opening equals sign is a formula of a spreadsheet, which nobody has computed."""
    rest = found[1:] if found[0].is_sign("-") else found
    if not rest:
        return False
    has_operation = any(token.is_sign("+", "-", "*", "/", "^", "&") for token in rest[1:])
    cell = rest[0].kind == "name" and rest[0].text.isupper() and len(rest) > 1 and rest[1].kind == "number"
    return has_operation or cell or any(token.kind == "word" and token.text.isupper() for token in rest)


def _without_ordinals(found: Sequence[Token]) -> list[Token]:
    """The tokens without the ending of an ordinal number: ``7th``, ``7^{\\text{th}}``."""
    kept: list[Token] = []
    place = 0
    while place < len(found):
        token = found[place]
        after_number = bool(kept) and kept[-1].kind == "number" and not kept[-1].is_from_words
        if after_number and token.text in ORDINALS and (not token.has_space or token.mode == "text"):
            place += 1
            continue
        raised = [each.text for each in found[place : place + 4]]
        if after_number and raised[:1] == ["^"] and any(text in ORDINALS for text in raised):
            place += next(k for k, text in enumerate(raised) if text in ORDINALS) + 1
            while place < len(found) and found[place].text == "{}" and found[place].kind == "close":
                place += 1
            continue
        kept.append(token)
        place += 1
    return kept


def _bare(found: Sequence[Token]) -> list[Token]:
    """The tokens without groups that hold a single sign: ``4{:}45``."""
    kept: list[Token] = []
    place = 0
    while place < len(found):
        group = found[place : place + 3]
        if len(group) == 3 and group[0].text == "{}" and group[1].is_sign(":", "=", ",") and group[2].text == "{}":
            kept.append(replace(group[1], has_space=False))
            place += 3
        else:
            kept.append(found[place])
            place += 1
    return kept
