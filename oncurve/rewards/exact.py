"""Exact numbers and units in answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from oncurve.rewards.latex import tidy

MAX_NUMBER_CHARACTERS = 300
"""Longer numbers are compared as text."""
_MAX_EXPONENT = 300

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d{1,3}(?:[ ]\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_TEN = r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))|[eE]([-+]?\d{1,3}))"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*
    (?:(?:\\?\$|€|£|\\text\{{\\?\$\}})\s*(?P<sign_after_currency>-?)\s*)?
    (?:(?P<mixed_whole>\d+)(?:\s*\\frac\{{\s*(?P<mixed_top>\d+)\s*\}}\{{\s*(?P<mixed_bottom>\d+)\s*\}}
                            |\s+(?P<plain_top>\d+)/(?P<plain_bottom>\d+)(?![\d.]))
      |(?P<before>\d*)\.(?P<fixed>\d*)\\(?:overline|bar|dot)\{{(?P<period>\d+)\}}
      |\\frac\{{\s*(?P<top>[-+]?\s*{_DECIMAL})\s*\}}\{{\s*(?P<bottom>[-+]?\s*{_DECIMAL})\s*\}}
      |(?P<over>{_DECIMAL})\s*/\s*(?P<under>-?\s*{_DECIMAL})
      |(?P<decimal>{_DECIMAL})(?P<ten>{_TEN})?(?P<base>_(?:\{{\d{{1,2}}\}}|\d{{1,2}}))?
    )(?P<rest>.*)""",
    re.VERBOSE | re.DOTALL,
)
_UNIT = re.compile(
    r"\s*(?:\\text\{(?P<text>[^{}]*)\}|(?P<percent>\\?%)|(?P<degree>\^\{\\circ\})|(?P<currency>\\?\$|€|£)"
    r"|(?P<words>(?<=\s)[a-zA-Z°][a-zA-Z.'/ ]*))"
    r"\s*(?P<power>\^(?:\{\d\}|\d))?\s*"
)
_TRAILING_UNIT = re.compile(r"(.*?\S)(\s*(?:\\text\{[^{}]*\}\s*(?:\^(?:\{\d\}|\d))?|\^\{\\circ\}|\\?%))", re.DOTALL)
_NOT_UNITS = frozenset(
    re.split(
        " ",
        "and are but by either equals for from if is let maybe minus mod nor not or plus than then times to "
        "undefined unless up versus vs when where with",
    )
)
_FACTORS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NUMBER_WORDS = re.split(
    " ",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty",
)
_UNIT_NAMES = {
    "$": "dollar usd buck", "cent": "cent", "€": "euro eur", "£": "gbp",
    "mm": "millimeter millimetre mm", "cm": "centimeter centimetre cm", "m": "meter metre m",
    "km": "kilometer kilometre km", "in": "inch inche in", "ft": "foot feet ft", "yd": "yard yd", "mi": "mile mi",
    "mg": "milligram mg", "g": "gram g", "kg": "kilogram kg", "lb": "pound lb", "oz": "ounce oz", "ton": "tonne ton",
    "ml": "milliliter millilitre ml", "l": "liter litre l", "gal": "gallon gal",
    "s": "second sec s", "min": "minute min", "h": "hour hr h", "day": "day", "week": "week wk",
    "month": "month", "year": "year yr",
    "deg": "degree deg °", "rad": "radian rad", "%": "percent percentage pct",
}  # fmt: skip
_CANONICAL_UNIT = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact number with what stands next to it."""

    value: Fraction
    """The number itself; a percent sign does not divide it."""
    unit: str = ""
    """Canonical name of a known unit; empty when there is none or it is not known."""
    is_percent: bool = False
    """A percent sign or the word follows the number."""
    base: int | None = None
    """The base written as a subscript; None without one, and for 10."""

    @property
    def values(self) -> frozenset[Fraction]:
        """The numbers that this may mean beside a number without a percent sign: 50% is 1/2, and 50 of a hundred."""
        if not self.is_percent:
            return frozenset({self.value})
        whole = {self.value} if abs(self.value) >= 1 else set()
        return frozenset({self.value / 100} | whole)


def exact_number(text: str) -> Fraction | None:
    """The number that a text states, its unit and currency left aside; None if it states something else.

    >>> exact_number("$1,000")
    Fraction(1000, 1)
    """
    quantity = read_quantity(tidy(text)) if len(text) <= MAX_NUMBER_CHARACTERS else None
    return None if quantity is None else quantity.value / (100 if quantity.is_percent else 1)


def read_quantity(answer: str) -> Quantity | None:
    r"""The number and unit of a tidied answer; None if it is anything but one number.

    >>> read_quantity(r"137 \frac{1}{2} \text{ cm}").value
    Fraction(275, 2)
    """
    if answer.lower() in _NUMBER_WORDS:
        return Quantity(Fraction(_NUMBER_WORDS.index(answer.lower())))
    if len(answer) > MAX_NUMBER_CHARACTERS or not any(sign.isdigit() for sign in answer):
        return None
    match = _NUMBER.fullmatch(answer)
    unit = _read_unit(match["rest"]) if match else None
    value = _value(match) if match else None
    if match is None or unit is None or value is None:
        return None
    factor, name = unit
    currency = next((sign for sign in "$€£" if sign in answer), "")
    base = int(match["base"].strip("_{}")) if match["base"] else 10
    return Quantity(
        value=value * factor,
        unit="" if name == "%" else name or currency,
        is_percent=name == "%",
        base=None if base == 10 else base,
    )


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
    if match["period"]:
        once = int((match["before"] + match["fixed"]) or "0")
        nines = 10 ** len(match["period"]) - 1
        return (once + Fraction(int(match["period"]), nines)) / 10 ** len(match["fixed"])
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


def split_unit(answer: str) -> tuple[str, str]:
    r"""An expression and the canonical unit behind it; unknown units are dropped, ``x\text{ cm}`` gives ``x``, "cm"."""
    match = _TRAILING_UNIT.fullmatch(answer)
    unit = _read_unit(match[2]) if match else None
    if match is None or unit is None or unit[0] != 1:
        return answer, ""
    return match[1].strip(), unit[1]


def _read_unit(rest: str) -> tuple[int, str] | None:
    """Factor and canonical unit of what follows a number; None if it is no unit."""
    if not rest.strip():
        return 1, ""
    match = _UNIT.fullmatch(rest)
    if match is None:
        return None
    if match["percent"]:
        return 1, "%"
    if match["degree"] or match["currency"]:
        return 1, "deg" if match["degree"] else ""
    words = (match["text"] if match["text"] is not None else match["words"]).replace(".", "").lower().split()
    is_variable = len(words) == 1 and len(words[0]) == 1 and words[0] not in _CANONICAL_UNIT
    if len(words) > 5 or is_variable or any(word in _NOT_UNITS for word in words) or not _are_words(words):
        return None
    factor = 1
    while words and words[0] in _FACTORS:
        factor *= _FACTORS[words.pop(0)]
    return factor, _unit_name(words, match["power"])


def _are_words(words: list[str]) -> bool:
    return all(re.fullmatch(r"[a-z°'/$%]+(?:\^\d)?", word) for word in words)


def _unit_name(words: list[str], power: str | None) -> str:
    """The canonical name of a unit; empty for words that are no known unit, such as "eggs"."""
    exponent = power.strip("^{}") if power else ""
    if words and words[-1] in ("squared", "cubed"):
        exponent = "2" if words.pop() == "squared" else "3"
    if words and words[0] in ("square", "sq", "cubic", "cu"):
        exponent = "2" if words.pop(0).startswith("sq") else "3"
    names = [_CANONICAL_UNIT.get(word) or _CANONICAL_UNIT.get(word.removesuffix("s")) for word in words]
    if len(words) != 1 or names[0] is None:
        return ""
    return names[0] + (f"^{exponent}" if exponent and exponent != "1" else "")


def same_quantity(candidate: Quantity, gold: Quantity) -> bool:
    """Both state the same number, and neither contradicts the unit or the base of the other."""
    if candidate.base is not None and candidate.base != gold.base:
        return False
    if candidate.unit and gold.unit and candidate.unit != gold.unit:
        return False
    if candidate.is_percent == gold.is_percent:
        return candidate.value == gold.value
    return bool(candidate.values & gold.values)
