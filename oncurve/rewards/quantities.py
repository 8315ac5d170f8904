"""Exact numbers and units in answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from oncurve.rewards.latex import tidy
from oncurve.rewards.units import Unit, read_unit

MAX_NUMBER_CHARACTERS = 300
"""Longer numbers are compared as text."""
_MAX_EXPONENT = 300
NO_UNIT = Unit()

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d{1,3}(?:[ ]\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_TEN = r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))|[eE]([-+]?\d{1,3}))"
_DOTS = r"(?:\.\.\.|…|\\[lcd]?dots)"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*
    (?:(?:\\?\$|€|£|\\text\{{\\?\$\}})\s*(?P<sign_after_currency>-?)\s*)?
    (?:(?P<mixed_whole>\d+)(?:\s*\\frac\{{\s*(?P<mixed_top>\d+)\s*\}}\{{\s*(?P<mixed_bottom>\d+)\s*\}}
                            |\s+(?P<plain_top>\d+)/(?P<plain_bottom>\d+)(?![\d.]))
      |(?P<before>\d*)\.(?P<fixed>\d*)(?:\\(?:overline|bar|dot)\{{|\()(?P<period>\d+)[}})]
      |(?=\d*\.\d{{3,60}}{_DOTS})(?P<whole>\d*)\.(?P<first>\d*?)
       (?:(?P<pair>\d\d+?)(?P=pair)+|(?P<single>\d)(?P=single){{2,}}){_DOTS}
      |\\frac\{{\s*(?P<top>[-+]?\s*{_DECIMAL})\s*\}}\{{\s*(?P<bottom>[-+]?\s*{_DECIMAL})\s*\}}
      |(?P<over>{_DECIMAL})\s*/\s*(?P<under>-?\s*{_DECIMAL})
      |(?P<decimal>{_DECIMAL})(?P<ten>{_TEN})?
    )(?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)
_BASES = re.split(" ", "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen")
_PREFIXES = {"0b": 2, "0o": 8, "0x": 16}
_BASED = re.compile(
    rf"""(?P<sign>-?)\s*(?:
      \(?\s*(?:\\text\{{\s*)?(?P<digits>\d+(?:\.\d+)?|(?=[A-Z]*\d|[A-F]{{2}})[\dA-Z]+)(?:\s*\}})?\s*\)?
      \s*_\s*\{{?\s*(?:\\text\s*\{{?\s*)?(?P<base>\d{{1,2}}|{"|".join(_BASES)})[\s}}]*
     |(?:\\text\{{\s*)?(?P<prefix>0[xX]|0[bB]|0[oO])(?P<prefixed>[\dA-Fa-f]+)(?:\s*\}})?
    )""",
    re.VERBOSE,
)
_AMOUNTS = re.compile(
    r"(\d+(?:\.\d+)?)\s*(?:\\text\{\s*)?([a-zA-Z]+)\.?\s*\}?(?:\s*(?:,|\\text\{\s*and\s*\}|and(?=\s)))?\s*"
)
_FEET_AND_INCHES = re.compile(r"(\d+)\s*(?:'|\^\{?\\prime\}?)\s*(\d+(?:\.\d+)?)\s*(?:\"|''|\^\{\\prime\\prime\})")
_TRAILING_UNIT = re.compile(
    r"(.*?\S)((?:\s*(?:\\text\{[^{}]*\}|\^\{\\circ\}|\\?%|\\Omega(?![a-zA-Z])|\\cdot(?=\s*\\text)|\^(?:\{-?\d\}|\d))"
    r"|(?:(?<=[\d})])|(?<=\\pi))\s+[a-zA-Z]{2,}[a-zA-Z/ ]*)+)",
    re.DOTALL,
)
_ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\{?)?\s*(?:\\text\{)?(?:st|nd|rd|th)(?![a-zA-Z])\}{0,2}")
_UNIT_BEGINS = re.compile(r"\s|\\(?:text|Omega|%|\$|frac\{\\text)|\^\{\\circ\}|[%$€£°¢]")
_TOUCHING = re.compile(r"kg|cm|mm|km|ml|mL|lbs?|oz|ft|hrs?|min|mins|sec|secs|mph|kWh|USD")
"""Units that are no product of variables where they touch their number."""
_FACTORS = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
_FIGURES_AND_WORDS = re.compile(
    rf"(?P<figures>\d+(?:,\d{{3}})*(?:\.\d+)?)\s*(?P<factor>{'|'.join(_FACTORS)})?\s+and\s+"
    r"(?P<words>[a-z][a-z -]*[a-z])"
)
_ONES = re.split(
    " ",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.split(" ", "twenty thirty forty fifty sixty seventy eighty ninety")
NUMBER_WORDS = {word: value for value, word in enumerate(_ONES)} | {
    word: 20 + 10 * place for place, word in enumerate(_TENS)
}
_PARTS = {
    "half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9,
    "tenth": 10, "halve": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact number with what stands next to it."""

    value: Fraction
    """The number itself; a percent sign does not divide it."""
    unit: Unit = NO_UNIT
    """The unit behind it; a percent sign is one."""
    base: int | None = None
    """The base written as a subscript or prefix; None without one."""
    digits: str = ""
    """The text before it."""

    @property
    def values(self) -> frozenset[Fraction]:
        """The numbers that this may mean beside a number without a percent sign: 50% is 1/2, and 50 of a hundred."""
        if not self.unit.is_percent:
            return frozenset({self.value})
        whole = {self.value} if abs(self.value) >= 1 else set()
        return frozenset({self.value / 100} | whole)


def exact_number(text: str) -> Fraction | None:
    """The number that a text states, its unit and currency left aside; None if it states something else.

    >>> exact_number("$1,000")
    Fraction(1000, 1)
    """
    quantity = read_quantity(tidy(text)) if len(text) <= MAX_NUMBER_CHARACTERS else None
    return None if quantity is None else quantity.value / (100 if quantity.unit.is_percent else 1)


def read_quantity(answer: str) -> Quantity | None:
    r"""The number and unit of a tidied answer; None if it is anything but one number.

    >>> read_quantity(r"137 \frac{1}{2} \text{ cm}").value
    Fraction(275, 2)
    """
    if len(answer) > MAX_NUMBER_CHARACTERS:
        return None
    if (based := _BASED.fullmatch(answer)) is not None:
        return _read_based(based)
    if not any(sign.isdigit() for sign in answer):
        answer = re.sub(r"\\text\{([^{}]*)\}", r"\1", answer).strip()
        if (value := number_in_words(answer)) is not None:
            return Quantity(value)
        words, _, last = answer.rpartition(" ")
        value, unit = number_in_words(words), read_unit(f" {last}")
        is_count = last.islower() and value is not None and value > 1  # a title is none, nor is "one of them"
        return Quantity(value, unit) if value is not None and unit and (is_count or not unit.label) else None
    if (mixed := _FIGURES_AND_WORDS.fullmatch(answer)) is not None:
        return _read_mixed(mixed)
    match = _NUMBER.fullmatch(_ORDINAL.sub("", answer))
    value = _value(match) if match else None
    if match is None or value is None:
        return None
    factor, rest = _multiplier(match["rest"])
    currency = next((sign for sign in "$€£" if sign in answer[: match.start("rest")]), "")
    unit = read_unit(rest) if currency and rest.startswith("/") else _unit_behind(rest)
    if unit is None:
        return None
    if currency and all(power < 0 for _, power in unit.dimensions):
        unit = Unit(tuple(sorted(((currency, 1), *unit.dimensions))), unit.factor, unit.label)
    return Quantity(value * factor, unit)


def _read_mixed(match: re.Match[str]) -> Quantity | None:
    """A number in figures and words: ``5 and a half hours``, ``2 hundred and five``; None for two numbers."""
    first, factor, unit = _decimal(match["figures"]), _FACTORS.get(match["factor"] or "", 1), NO_UNIT
    words = match["words"]
    second = number_in_words(words)
    if second is None:
        words, _, last = words.rpartition(" ")
        second, unit = number_in_words(words), read_unit(f" {last}") or NO_UNIT
    if second is None or not (second < 1 or second < factor):
        return None
    return Quantity(first * factor + second, unit)


def _read_based(match: re.Match[str]) -> Quantity | None:
    """A number with its base: ``110_2``, ``1F_{16}``, ``0x1F``; None where a digit is none of the base."""
    prefix, named = match["prefix"], match["base"]
    base = _PREFIXES[prefix.lower()] if prefix else int(named) if named.isdigit() else 2 + _BASES.index(named.lower())
    digits = (match["digits"] or match["prefixed"]).upper()
    whole, _, fraction = digits.partition(".")
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in whole + fraction):
        return None
    sign = -1 if match["sign"] == "-" else 1
    value = Fraction(sign * int(whole + fraction, base), base ** len(fraction))
    return Quantity(value, base=base, digits=match["sign"] + digits)


def _multiplier(rest: str) -> tuple[int, str]:
    r"""The factor of words such as "million" or "dozen" at the beginning, and what follows them."""
    factor = 1
    while (word := re.match(r"\s*(?:\\text\{\s*)?([a-z]+?)s?(?![a-z])", rest.lower())) and word[1] in _FACTORS:
        factor *= _FACTORS[word[1]]
        opening = r"\text{" if "\\text" in word.group() else ""
        rest = opening + rest[word.end() :]
        rest = rest.removeprefix(r"\text{}")
    return factor, rest


def _unit_behind(rest: str) -> Unit | None:
    """The unit that follows a number; letters that touch it are variables."""
    if not rest.strip():
        return NO_UNIT
    return read_unit(rest) if _UNIT_BEGINS.match(rest) or _TOUCHING.fullmatch(rest) else None


def number_in_words(text: str) -> Fraction | None:
    """The number that words such as "thirty-two", "minus seven" or "two thirds" state; None for any others.

    >>> [str(number_in_words(text)) for text in ("one hundred and five", "three quarters", "twenty people")]
    ['105', '3/4', 'None']
    """
    words = re.findall(r"[a-z]+", text.lower()) if re.fullmatch(r"[A-Za-z\s-]{3,80}", text.strip()) else []
    sign, more = 1, Fraction(0)
    if words[:1] in (["minus"], ["negative"]):
        sign, words = -1, words[1:]
    if words[-3:] == ["and", "a", "half"]:
        more, words = Fraction(1, 2), words[:-3]
    if words == ["a", "dozen"]:
        return sign * Fraction(12)
    bottom = None if more else _PARTS.get(words[-1].removesuffix("s")) if words and len(words) > 1 else None
    if bottom:
        top = Fraction(1) if words[:-1] in (["a"], ["one"]) else _cardinal(words[:-1])
        return None if top is None else sign * top / bottom
    value = _cardinal(words)
    return None if value is None else sign * (value + more)


def _cardinal(words: list[str]) -> Fraction | None:
    total, below_thousand, last = 0, 0, 10**9
    for place, word in enumerate(words):
        if word == "and" and 0 < place < len(words) - 1 and words[place - 1] in _FACTORS:
            continue
        if word in NUMBER_WORDS and NUMBER_WORDS[word] < last:
            value = NUMBER_WORDS[word]
            below_thousand += value
            last = 10 if value >= 20 else 0
        elif word == "hundred" and 0 < below_thousand < 10:
            below_thousand, last = below_thousand * 100, 100
        elif word in _FACTORS and word not in ("hundred", "dozen") and below_thousand:
            total, below_thousand, last = total + below_thousand * _FACTORS[word], 0, 10**9
        else:
            return None
    return Fraction(total + below_thousand) if words else None


def _value(match: re.Match[str]) -> Fraction | None:
    try:
        value = _unsigned(match)
    except ZeroDivisionError:
        return None
    is_negative = (match["sign"] == "-") != (match["sign_after_currency"] == "-")
    return None if value is None else -value if is_negative else value


def _unsigned(match: re.Match[str]) -> Fraction | None:
    if match["mixed_whole"]:
        top = match["mixed_top"] or match["plain_top"]
        bottom = match["mixed_bottom"] or match["plain_bottom"]
        part = Fraction(int(top), int(bottom))
        return int(match["mixed_whole"]) + part
    if match["top"]:
        return _decimal(match["top"]) / _decimal(match["bottom"])
    if period := match["period"] or match["pair"] or match["single"]:
        fixed = match["fixed"] or match["first"] or ""
        once = int(f"0{match['before'] or match['whole'] or ''}{fixed}")
        return (once + Fraction(int(period), 10 ** len(period) - 1)) / 10 ** len(fixed)
    if match["over"]:
        return _decimal(match["over"]) / _decimal(match["under"])
    power = 0
    if match["ten"]:
        power = int(re.sub(r".*\^|^[eE]|[{}\s]", "", match["ten"]))
    if abs(power) > _MAX_EXPONENT:
        return None
    return _decimal(match["decimal"]) * Fraction(10) ** power


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[,\s]", "", text).removesuffix("."))


def split_unit(answer: str) -> tuple[str, Unit]:
    r"""An expression and the unit behind it: ``\sqrt{2}\text{ cm}`` gives ``\sqrt{2}`` and centimetres."""
    match = _TRAILING_UNIT.fullmatch(answer)
    if match is None or match[1].endswith(("\\cdot", "+", "-", "=", "*", "/")):
        return answer, NO_UNIT
    unit = read_unit(match[2])
    is_word = not match[2].lstrip().startswith(("\\", "^", "%"))
    if unit is None or (is_word and (unit.label or r"\int" in answer)) or _multiplier(match[2])[0] != 1:
        return answer, NO_UNIT
    return match[1].strip(), unit


def read_amount(answer: str) -> Quantity | None:
    r"""The sum of an amount in several units, each smaller than the one before; None for anything else.

    >>> str(read_amount("5 feet 6 inches").value)
    '11/2'
    """
    answer = _FEET_AND_INCHES.sub(r"\1 ft \2 in", answer)
    pieces = _AMOUNTS.findall(answer) if len(answer) <= MAX_NUMBER_CHARACTERS else []
    if len(pieces) < 2 or _AMOUNTS.sub("", answer).strip():
        return None
    found = [read_quantity(" ".join(piece)) for piece in pieces]
    parts = [part for part in found if part is not None and part.unit.dimensions and not part.unit.label]
    units = [part.unit for part in parts]
    if len(parts) != len(pieces) or any(
        one.dimensions != other.dimensions or one.factor <= other.factor for one, other in pairwise(units)
    ):
        return None
    total = sum((part.value * part.unit.factor for part in parts), Fraction(0))
    return Quantity(total / units[0].factor, units[0])


def same_quantity(candidate: Quantity, gold: Quantity) -> bool:
    """Both state the same number, and neither contradicts the unit or the base of the other.

    A unit may be missing on one side, and so may the "per day" of an amount of money; where both have one, they are
    converted.
    """
    if gold.base not in (None, 10):  # the base that is asked for, which may be left out
        if candidate.base is not None:
            return (candidate.base, candidate.value) == (gold.base, gold.value)
        return gold.digits.replace(".", "").lstrip("-").isdigit() and candidate.value == Fraction(gold.digits)
    if candidate.unit.is_percent != gold.unit.is_percent:
        return not (candidate.unit and gold.unit) and bool(candidate.values & gold.values)
    is_rate = [len(quantity.unit.dimensions) > 1 for quantity in (candidate, gold)]
    if candidate.unit.money is not None and candidate.unit.money == gold.unit.money and is_rate[0] != is_rate[1]:
        return candidate.value * candidate.unit.top == gold.value * gold.unit.top
    kelvins = [_kelvins(quantity) for quantity in (candidate, gold)]
    if None not in kelvins:
        return kelvins[0] == kelvins[1]
    if not candidate.unit.agrees_with(gold.unit):
        return False
    if candidate.unit.dimensions and gold.unit.dimensions:
        return candidate.value * candidate.unit.factor == gold.value * gold.unit.factor
    return candidate.value == gold.value


_ZERO_IN_KELVINS = {"K": Fraction(0), "°C": Fraction(27315, 100), "°F": Fraction(45967, 180)}


def _kelvins(quantity: Quantity) -> Fraction | None:
    """A temperature on the absolute scale; None for any other quantity."""
    [(base, power), *others] = quantity.unit.dimensions or (("", 0),)
    if others or power != 1 or base not in _ZERO_IN_KELVINS:
        return None
    return quantity.value * quantity.unit.factor + _ZERO_IN_KELVINS[base]
