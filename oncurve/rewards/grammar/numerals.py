"""Numbers in words: "thirty-two", "two and a half", "3 dozen" become numbers in figures."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from oncurve.rewards.grammar.figures import Token

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
