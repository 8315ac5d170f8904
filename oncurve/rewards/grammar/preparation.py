"""Preparation of tokens: words become figures, brackets and commas what they mean, idle ones go."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from oncurve.rewards.grammar.forms import ORDINALS
from oncurve.rewards.grammar.lexemes import Token, closing
from oncurve.rewards.grammar.lexer import as_members, tokenize

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
    word: 20 + 10 * index for index, word in enumerate(_TENS)
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


def with_figures(tokens: Sequence[Token]) -> list[Token]:
    """The tokens with every number in words as one number.

    A fraction such as "half" counts only behind a number or an article, so that "half of 5" names none.
    """
    result: list[Token] = []
    index = 0
    while index < len(tokens):
        value, end = _numeral(tokens, index)
        power = {"squared": 2, "cubed": 3}.get(_word(tokens, index)) if result and result[-1].kind == "number" else None
        part = _part_after_and(tokens, index) if index and index + 3 == len(tokens) else None
        if part is not None and (whole := _before_unit(result)) is not None:
            result[-2] = replace(whole, text=str(whole.value + part), value=whole.value + part)
            index = len(tokens)
        elif power:
            result += [Token("sign", "^"), Token("number", str(power), value=Fraction(power))]
            index += 1
        elif end > index:
            token = tokens[index]
            is_all_words = all(part.kind != "number" for part in tokens[index:end])
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
            index = end
        else:
            result.append(tokens[index])
            index += 1
    return result


def _part_after_and(tokens: Sequence[Token], index: int) -> Fraction | None:
    """The fraction of ``and a half``, which begins here; None for anything else."""
    first, second, third = (_word(tokens, index + behind) for behind in range(3))
    return Fraction(1, _PARTS[third]) if first == "and" and second in ("a", "one") and third in _PARTS else None


def _before_unit(tokens: Sequence[Token]) -> Token | None:
    """The number before the last word, ``an hour`` or ``2 hours``; None for anything else."""
    if len(tokens) < 2:
        return None
    number, unit = tokens[-2:]
    if unit.kind not in ("word", "name") or not (number.kind == "number" or number.text.lower() in ("a", "an")):
        return None
    return number if number.kind == "number" else replace(number, kind="number", value=Fraction(1), is_from_words=True)


def _word(tokens: Sequence[Token], index: int) -> str:
    return tokens[index].text.lower() if 0 <= index < len(tokens) and tokens[index].kind in ("word", "name") else ""


def _numeral(tokens: Sequence[Token], start: int) -> tuple[Fraction, int]:
    """The number that begins here and the index behind it; the same index where none begins."""
    sign, index = 1, start
    if _word(tokens, index) in ("minus", "negative"):
        value, end = _numeral(tokens, index + 1)
        is_number = index + 1 < len(tokens) and tokens[index + 1].kind == "number"
        if end == index + 1 and is_number and tokens[index + 1].base is None:
            return -tokens[index + 1].value, index + 2
        return (-value, end) if end > index + 1 else (Fraction(0), start)
    if _word(tokens, index) in ("a", "an", "half") and (short := _with_article(tokens, index)):
        return short
    token = tokens[index]
    if token.kind == "number" and token.base is None and not token.is_from_words:
        value, end = _figures(tokens, index)
    else:
        value, end = _cardinal(tokens, index)
    if end == start or (end == start + 1 and token.kind == "number"):
        return Fraction(0), start
    return sign * value, end


def _with_article(tokens: Sequence[Token], index: int) -> tuple[Fraction, int] | None:
    """``a dozen``, ``half a dozen``, ``a half``, ``half an hour``, and ``half`` alone."""
    first, second = _word(tokens, index), _word(tokens, index + 1)
    if first == "half":
        if second in ("a", "an"):
            factor = FACTORS.get(_word(tokens, index + 2))
            return (Fraction(1, 2), index + 2) if factor is None else (Fraction(factor, 2), index + 3)
        return (Fraction(1, 2), index + 1) if len(tokens) == 1 else None
    if second in FACTORS:
        return Fraction(FACTORS[second]), index + 2
    if second in _PARTS and len(tokens) == 2:
        return Fraction(1, _PARTS[second]), index + 2
    return None


def _figures(tokens: Sequence[Token], index: int) -> tuple[Fraction, int]:
    """``3 million``, ``2 dozen``, ``$10k``, ``5 and a half``, ``2 hundred and five``."""
    value, end = tokens[index].value, index + 1
    factor = 1
    while _word(tokens, end) in _FACTORS and (tokens[end].has_space or tokens[end].mode == "text"):
        factor *= _FACTORS[_word(tokens, end)]
        end += 1
    is_money = index > 0 and tokens[index - 1].is_sign("$", "€", "£")
    is_short = end < len(tokens) and tokens[end].kind in ("name", "word")
    is_short = is_short and (not tokens[end].has_space or len(tokens[end].text) > 1)  # `$5 m` may be a symbol
    is_last = end + 1 == len(tokens) or (tokens[end + 1 : end + 2] and tokens[end + 1].kind != "number")
    if factor == 1 and is_money and is_short and is_last and tokens[end].text in _SHORT_FACTORS:
        factor, end = _SHORT_FACTORS[tokens[end].text], end + 1
    value *= factor
    if _word(tokens, end) == "and":
        more, behind = _cardinal(tokens, end + 1)
        if (part := _part_after_and(tokens, end)) is not None:
            more, behind = part, end + 3
        if behind > end + 1 and 0 < more < max(factor, 1):
            return value + more, behind
    return value, end


def _cardinal(tokens: Sequence[Token], start: int) -> tuple[Fraction, int]:
    """A number in words from here: ``three hundred and five``, ``two thirds``, ``two and a half``."""
    total, below, last, end, index = 0, 0, 10**9, start, start
    has_digit = False
    while index < len(tokens) and index - start < MAX_WORDS:
        word = _word(tokens, index)
        if word in CARDINALS and CARDINALS[word] < last:
            below += CARDINALS[word]
            last = 10 if CARDINALS[word] >= 20 else 0
        elif word.removesuffix("s") == "hundred" and 0 < below < 100:
            below, last = below * 100, 100
        elif word in _FACTORS and word.removesuffix("s") != "hundred" and below and has_digit:
            total, below, last = total + below * _FACTORS[word], 0, 10**9
        elif has_digit and ((word == "and" and _word(tokens, index - 1) in _FACTORS) or tokens[index].is_sign("-")):
            if _word(tokens, index + 1) not in CARDINALS:
                break
            index += 1
            continue
        else:
            break
        has_digit = True
        index += 1
        end = index
    value = Fraction(total + below)
    if end == start:
        return value, start
    return _with_part(tokens, start, end, value)


def _with_part(tokens: Sequence[Token], start: int, end: int, value: Fraction) -> tuple[Fraction, int]:
    """The number with a fraction behind it: ``thirds`` of ``two thirds``, ``and a half``."""
    index = end + 1 if end < len(tokens) and tokens[end].is_sign("-") else end
    part = _PARTS.get(_word(tokens, index).removesuffix("s"))
    is_fraction = part is not None and (value == 1) == (not _word(tokens, index).endswith("s"))
    if part is not None and is_fraction:
        return value / part, index + 1
    if _word(tokens, end) == "and":
        if (part := _part_after_and(tokens, end)) is not None:
            return value + part, end + 3
        top, behind = _cardinal(tokens, end + 1) if _word(tokens, end + 1) in CARDINALS else (Fraction(0), end)
        if 0 < top < 1:
            return value + top, behind
    del start
    return value, end


def prepared(text: str) -> list[Token]:
    """The tokens of an answer with numbers in figures, without ordinal endings."""
    return _bare(_without_ordinals(with_figures(_inward(_angled(tokenize(text))))))


def _angled(tokens: list[Token]) -> list[Token]:
    """``<1, 2>`` as a vector."""
    is_vector = len(tokens) > 4 and tokens[0].is_sign("<") and tokens[-1].is_sign(">")
    if is_vector and any(token.is_sign(",") for token in tokens):
        return [Token("open", "⟨"), *tokens[1:-1], Token("close", "⟩")]
    return tokens


def separated(tokens: list[Token], *, everywhere: bool) -> list[Token]:
    """The tokens with the commas of a number as separators where they may be: between members of a bracket, in a text
    that puts no space behind a comma."""
    has_spaced_commas = any(token.is_sign(",") and after.has_space for token, after in itertools.pairwise(tokens))
    has_commas = any(token.is_sign(",") for token in tokens)
    result: list[Token] = []
    depth = 0
    for index, token in enumerate(tokens):
        if token.text != "{}":
            depth += (token.kind == "open") - (token.kind == "close")
        is_alone = (
            0 < index < len(tokens) - 1 and tokens[index - 1].kind == "open" and tokens[index + 1].kind == "close"
        )
        is_split = everywhere or (depth > 0 and not has_spaced_commas and not (is_alone and not has_commas))
        if token.kind != "number" or "," not in token.text or not is_split:
            result.append(token)
            continue
        for position, member in enumerate(as_members(token)):
            result += [Token("sign", ",")] * bool(position) + [member]
    return result


def _is_balanced(tokens: list[Token]) -> bool:
    depth = 0
    for token in tokens:
        depth += (token.kind == "open") - (token.kind == "close")
        if depth < 0:
            return False
    return depth == 0


def _inward(tokens: list[Token]) -> list[Token]:
    """``]1,4[`` with the brackets of an open interval."""
    if _is_balanced(tokens):
        return tokens
    depth, turned = 0, list(tokens)
    for index, token in enumerate(tokens):
        if token.text == "]" and depth == 0:
            turned[index], depth = replace(token, kind="open", text="("), 1
        elif (
            token.text == "["
            and depth == 1
            and (index + 1 == len(tokens) or tokens[index + 1].kind in ("sign", "word"))
        ):
            turned[index], depth = replace(token, kind="close", text=")"), 0
        elif token.text != "{}":
            depth += (token.kind == "open") - (token.kind == "close")
    return turned if depth == 0 else tokens


def trimmed(tokens: list[Token]) -> list[Token]:
    """The tokens without closing punctuation, an opening equals sign or a group around all of them."""
    before = -1
    while tokens and before != len(tokens):
        before = len(tokens)
        while tokens and (tokens[-1].is_sign(".", ",", ";", ":", "\\\\", "quad", "&", "!") and not _counts(tokens)):
            tokens = tokens[:-1]
        while tokens and tokens[0].is_sign("quad", "&", ":", "."):
            tokens = tokens[1:]
        if len(tokens) > 1 and tokens[0].is_sign("=") and not _is_formula(tokens[1:]):
            tokens = tokens[1:]
        if (
            len(tokens) > 1
            and tokens[0].text == "{}"
            and tokens[0].kind == "open"
            and closing(tokens, 0) == len(tokens) - 1
        ):
            tokens = tokens[1:-1]
    return tokens


def _counts(tokens: list[Token]) -> bool:
    """A closing exclamation mark is a factorial behind a number or a bracket."""
    return tokens[-1].is_sign("!") and len(tokens) > 1 and tokens[-2].kind != "word"


def _is_formula(tokens: Sequence[Token]) -> bool:
    """Whether the text behind an opening equals sign is a formula of a spreadsheet, which nobody has computed."""
    rest = tokens[1:] if tokens[0].is_sign("-") else tokens
    if not rest:
        return False
    has_operation = any(token.is_sign("+", "-", "*", "/", "^", "&") for token in rest[1:])
    cell = rest[0].kind == "name" and rest[0].text.isupper() and len(rest) > 1 and rest[1].kind == "number"
    return has_operation or cell or any(token.kind == "word" and token.text.isupper() for token in rest)


def _without_ordinals(tokens: Sequence[Token]) -> list[Token]:
    """The tokens without the ending of an ordinal number: ``7th``, ``7^{\\text{th}}``."""
    remaining: list[Token] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        after_number = bool(remaining) and remaining[-1].kind == "number" and not remaining[-1].is_from_words
        if after_number and token.text in ORDINALS and (not token.has_space or token.mode == "text"):
            index += 1
            continue
        raised = [following.text for following in tokens[index : index + 4]]
        if after_number and raised[:1] == ["^"] and any(text in ORDINALS for text in raised):
            index += next(k for k, text in enumerate(raised) if text in ORDINALS) + 1
            while index < len(tokens) and tokens[index].text == "{}" and tokens[index].kind == "close":
                index += 1
            continue
        remaining.append(token)
        index += 1
    return remaining


def _bare(tokens: Sequence[Token]) -> list[Token]:
    """The tokens without groups that hold a single sign: ``4{:}45``."""
    remaining: list[Token] = []
    index = 0
    while index < len(tokens):
        group = tokens[index : index + 3]
        if len(group) == 3 and group[0].text == "{}" and group[1].is_sign(":", "=", ",") and group[2].text == "{}":
            remaining.append(replace(group[1], has_space=False))
            index += 3
        else:
            remaining.append(tokens[index])
            index += 1
    return remaining
