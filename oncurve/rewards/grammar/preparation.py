"""Preparation of tokens: words become figures, brackets and commas what they mean, idle ones go."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from oncurve.rewards.grammar.forms import ORDINALS
from oncurve.rewards.grammar.lexemes import Token, closing
from oncurve.rewards.grammar.lexer import as_members, tokens

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
CARDINALS = {word: value for value, word in enumerate(_ONES)} | {
    word: 20 + 10 * place for place, word in enumerate(_TENS)
}
FACTORS = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
_FACTORS = FACTORS | {f"{word}s": value for word, value in FACTORS.items()}
_PARTS = {
    "half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9,
    "tenth": 10, "halve": 2, "hundredth": 100, "thousandth": 1000,
}  # fmt: skip
_SHORT_FACTORS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "bn": 10**9, "m": 10**6}
"""Letters behind an amount of money."""
MAX_WORDS = 20


def with_figures(found: Sequence[Token]) -> list[Token]:
    """The tokens with every number in words as one number.

    A fraction such as "half" counts only behind a number or an article, so that "half of 5" names none.
    """
    result: list[Token] = []
    place = 0
    while place < len(found):
        value, end = _numeral(found, place)
        power = {"squared": 2, "cubed": 3}.get(_word(found, place)) if result and result[-1].kind == "number" else None
        if power:
            result += [Token("sign", "^"), Token("number", str(power), value=Fraction(power))]
            place += 1
        elif end > place:
            token = found[place]
            is_all_words = all(each.kind != "number" for each in found[place:end])
            result.append(
                Token(
                    "number",
                    str(value),
                    value=value,
                    has_space=token.has_space,
                    mode=token.mode,
                    is_from_words=is_all_words,
                )
            )
            place = end
        else:
            result.append(found[place])
            place += 1
    return result


def _word(found: Sequence[Token], place: int) -> str:
    return found[place].text.lower() if 0 <= place < len(found) and found[place].kind in ("word", "name") else ""


def _numeral(found: Sequence[Token], start: int) -> tuple[Fraction, int]:
    """The number that begins here and the place behind it; the same place where none begins."""
    sign, place = 1, start
    if _word(found, place) in ("minus", "negative"):
        value, end = _numeral(found, place + 1)
        is_number = place + 1 < len(found) and found[place + 1].kind == "number"
        if end == place + 1 and is_number and found[place + 1].base is None:
            return -found[place + 1].value, place + 2
        return (-value, end) if end > place + 1 else (Fraction(0), start)
    if _word(found, place) in ("a", "an", "half") and (short := _with_article(found, place)):
        return short
    token = found[place]
    if token.kind == "number" and token.base is None and not token.is_from_words:
        value, end = _figures(found, place)
    else:
        value, end = _cardinal(found, place)
    if end == start or (end == start + 1 and token.kind == "number"):
        return Fraction(0), start
    return sign * value, end


def _with_article(found: Sequence[Token], place: int) -> tuple[Fraction, int] | None:
    """``a dozen``, ``a half``, ``half an hour``, and ``half`` alone."""
    first, second = _word(found, place), _word(found, place + 1)
    if first == "half":
        if second in ("a", "an"):
            return Fraction(1, 2), place + 2
        return (Fraction(1, 2), place + 1) if len(found) == 1 else None
    if second in FACTORS:
        return Fraction(FACTORS[second]), place + 2
    if second in _PARTS and len(found) == 2:
        return Fraction(1, _PARTS[second]), place + 2
    return None


def _figures(found: Sequence[Token], place: int) -> tuple[Fraction, int]:
    """``3 million``, ``2 dozen``, ``$10k``, ``5 and a half``, ``2 hundred and five``."""
    value, end = found[place].value, place + 1
    factor = 1
    while _word(found, end) in _FACTORS and (found[end].has_space or found[end].mode == "text"):
        factor *= _FACTORS[_word(found, end)]
        end += 1
    is_money = place > 0 and found[place - 1].is_sign("$", "€", "£")
    is_short = end < len(found) and found[end].kind in ("name", "word") and not found[end].has_space
    is_last = end + 1 == len(found) or (found[end + 1 : end + 2] and found[end + 1].kind != "number")
    if factor == 1 and is_money and is_short and is_last and found[end].text in _SHORT_FACTORS:
        factor, end = _SHORT_FACTORS[found[end].text], end + 1
    value *= factor
    if _word(found, end) == "and":
        more, behind = _cardinal(found, end + 1)
        if _word(found, end + 1) == "a" and _word(found, end + 2) in _PARTS:
            more, behind = Fraction(1, _PARTS[_word(found, end + 2)]), end + 3
        if behind > end + 1 and 0 < more < max(factor, 1):
            return value + more, behind
    return value, end


def _cardinal(found: Sequence[Token], start: int) -> tuple[Fraction, int]:
    """A number in words from here: ``three hundred and five``, ``two thirds``, ``two and a half``."""
    total, below, last, end, place = 0, 0, 10**9, start, start
    has_digit = False
    while place < len(found) and place - start < MAX_WORDS:
        word = _word(found, place)
        if word in CARDINALS and CARDINALS[word] < last:
            below += CARDINALS[word]
            last = 10 if CARDINALS[word] >= 20 else 0
        elif word.removesuffix("s") == "hundred" and 0 < below < 100:
            below, last = below * 100, 100
        elif word in _FACTORS and word.removesuffix("s") != "hundred" and below and has_digit:
            total, below, last = total + below * _FACTORS[word], 0, 10**9
        elif has_digit and ((word == "and" and _word(found, place - 1) in _FACTORS) or found[place].is_sign("-")):
            if _word(found, place + 1) not in CARDINALS:
                break
            place += 1
            continue
        else:
            break
        has_digit = True
        place += 1
        end = place
    value = Fraction(total + below)
    if end == start:
        return value, start
    return _with_part(found, start, end, value)


def _with_part(found: Sequence[Token], start: int, end: int, value: Fraction) -> tuple[Fraction, int]:
    """The number with a fraction behind it: ``thirds`` of ``two thirds``, ``and a half``."""
    place = end + 1 if end < len(found) and found[end].is_sign("-") else end
    part = _PARTS.get(_word(found, place).removesuffix("s"))
    is_fraction = part is not None and (value == 1) == (not _word(found, place).endswith("s"))
    if part is not None and is_fraction:
        return value / part, place + 1
    if _word(found, end) == "and":
        if _word(found, end + 1) in ("a", "one") and _word(found, end + 2) in _PARTS:
            return value + Fraction(1, _PARTS[_word(found, end + 2)]), end + 3
        top, behind = _cardinal(found, end + 1) if _word(found, end + 1) in CARDINALS else (Fraction(0), end)
        if 0 < top < 1:
            return value + top, behind
    del start
    return value, end


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
