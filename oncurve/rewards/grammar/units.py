"""Units of measurement behind numbers: what they are, how they convert, and the words that are none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from oncurve.rewards.grammar.lexemes import Token

MAX_UNIT_TOKENS = 24
MAX_POWER = 9

_TABLE = """
m     1                  m            p meter metre
g     1/1000             kg           p gram gramme
s     1                  s            p second sec
A     1                  A            p ampere amp
K     1                  K            p kelvin
mol   1                  mol          p mole
cd    1                  cd           p candela
Hz    1                  s-1          p hertz
rpm   1/60               turn.s-1     - rpm
N     1                  kg.m.s-2     p newton
Nm    1                  kg.m2.s-2    p
Ns    1                  kg.m.s-1     -
Pa    1                  kg.m-1.s-2   p pascal
bar   100000             kg.m-1.s-2   p bar
atm   101325             kg.m-1.s-2   - atmosphere
J     1                  kg.m2.s-2    p joule
cal   523/125            kg.m2.s-2    p calorie
Js    1                  kg.m2.s-1    -
eV    1.602176634e-19    kg.m2.s-2    p electronvolt
Wh    3600               kg.m2.s-2    p
W     1                  kg.m2.s-3    p watt
C     1                  A.s          p coulomb
V     1                  kg.m2.s-3.A-1  p volt
Ω     1                  kg.m2.s-3.A-2  p ohm
S     1                  kg-1.m-2.s3.A2 p siemens
F     1                  kg-1.m-2.s4.A2 p farad
H     1                  kg.m2.s-2.A-2  p henry
T     1                  kg.s-2.A-1     p tesla
Wb    1                  kg.m2.s-2.A-1  p weber
l     1/1000             m3           p liter litre
L     1/1000             m3           p
cc    1/1000000          m3           -
ha    10000              m2           - hectare
acre  4046.8564224       m2           - acre
in    0.0254             m            - inch inche
ft    0.3048             m            - foot feet
yd    0.9144             m            - yard
mi    1609.344           m            - mile
kn    463/900            m.s-1        - knot
mph   0.44704            m.s-1        -
kmh   5/18               m.s-1        - kph kmph
fps   0.3048             m.s-1        -
lb    0.45359237         kg           - pound
oz    0.028349523125     kg           - ounce
floz  0.0000295735295625 m3           -
t     1000               kg           p tonne ton
gal   0.003785411784     m3           - gallon
qt    0.000946352946     m3           - quart
pt    0.000473176473     m3           - pint
cup   0.0002365882365    m3           - cup
tbsp  0.00001478676478125  m3         - tablespoon
tsp   0.00000492892159375  m3         - teaspoon
min   60                 s            - minute
h     3600               s            - hour hr
day   86400              s            - day
week  604800             s            - week wk
fortnight 1209600        s            - fortnight
month 1                  month        - month mo
yr    12                 month        - year
decade 120               month        - decade
century 1200             month        - century centurie
bit   1                  bit          p bit
B     8                  bit          p byte
$     1                  $            - dollar usd buck
¢     1/100              $            - cent
€     1                  €            - euro eur
£     1                  £            - gbp
°     1                  °            - degree deg
rad   1                  rad          p radian
rev   1                  turn         - revolution
°C    1                  °C           - celsius centigrade
°F    5/9                °F           - fahrenheit
%     1                  %            - percent percentage pct
"""  # symbol, factor, dimensions, whether it takes prefixes ("p"), names
_SHORT_PREFIXES = {
    "k": 3, "M": 6, "G": 9, "T": 12, "c": -2, "m": -3, "µ": -6, "μ": -6, "u": -6, "n": -9, "p": -12, "d": -1,
}  # fmt: skip
_LONG_PREFIXES = {
    "kilo": 3, "mega": 6, "giga": 9, "tera": 12, "centi": -2, "milli": -3, "micro": -6, "nano": -9, "pico": -12,
    "deci": -1,
}  # fmt: skip
_PLURAL_SYMBOLS = re.split(" ", "hr yr min sec lb kg cm mm km ft pt qt oz gal wk mi in bit mol")
_NOT_UNITS = frozenset(
    re.split(
        " ",
        "and are but by either equals for from if is let maybe minus mod nor not or plus than then times to undefined "
        "unless up versus vs when where with sin cos tan cot csc log ln exp sqrt pi arcsin arccos arctan max since "
        "because infinity factorial more less one two three four five six seven eight nine ten eleven twelve zero half",
    )
)
_FILLERS = frozenset(
    re.split(" ", "an the of in all total each unit units old long tall wide high deep away apart left remaining there")
)
_SQUARES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS = {"squared": 2, "cubed": 3}
_MULTIPLIED = frozenset("万亿千百十分点半倍零一二两三四五六七八九")
"""Signs of Chinese numbers: what they stand in is no noun."""
_SYMBOL = re.compile("[kMGmcdnμ]?(?:mol|rad|Pa|Hz|[mgNJWVCAKLT])|[sh]")
TOUCHING = frozenset(re.split(" ", "kg cm mm km ml mL lb lbs oz ft hr hrs min mins sec secs mph kWh USD km/h"))
"""Units that are no product of variables where they touch their number."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit behind a number."""

    dimensions: tuple[tuple[str, int], ...] = ()
    """Powers of base units, sorted; empty where no word is a known unit."""
    factor: Fraction = Fraction(1)
    """Factor to the base units."""
    label: frozenset[str] = frozenset()
    """The words that are no known unit, in the singular, such as "egg"."""
    top: Fraction = Fraction(1)
    """The factor of what stands before "per"."""

    @property
    def is_percent(self) -> bool:
        """A percent sign or the word."""
        return self.dimensions == (("%", 1),)

    def __bool__(self) -> bool:
        """Whether there is a unit."""
        return bool(self.dimensions or self.label)

    @property
    def money(self) -> str | None:
        """The currency of an amount of money, or of money per something else; None for anything else."""
        powers = dict(self.dimensions)
        positive = [base for base, power in powers.items() if power > 0]
        return positive[0] if len(positive) == 1 and positive[0] in "$€£" and powers[positive[0]] == 1 else None

    def agrees_with(self, other: Unit) -> bool:
        """Whether both can be said of one amount: the same dimensions, and no word that contradicts."""
        if not self or not other:
            return True
        if self.dimensions != other.dimensions:
            return False
        return not (self.label and other.label) or self.label <= other.label or other.label <= self.label


NO_UNIT = Unit()
DEGREES, RADIANS = (Unit(((name, 1),)) for name in ("°", "rad"))


def _rows() -> dict[str, tuple[Fraction, dict[str, int]]]:
    rows: dict[str, tuple[Fraction, dict[str, int]]] = {}
    for line in _TABLE.strip().splitlines():
        symbol, factor, dimensions, takes_prefixes, *names = line.split()
        powers = {}
        for part in dimensions.split("."):
            base, power = re.fullmatch(r"(\D+?)(-?\d+)?", part).groups()  # type: ignore[union-attr]
            powers[base] = int(power or 1)
        entry = (Fraction(factor), powers)
        rows[symbol] = entry
        for name in names:
            rows[name] = rows[f"{name}s"] = entry
        if takes_prefixes == "p":
            for prefix, exponent in _SHORT_PREFIXES.items():
                rows.setdefault(prefix + symbol, (entry[0] * Fraction(10) ** exponent, powers))
            for prefix, exponent in _LONG_PREFIXES.items():
                for name in names:
                    prefixed = (entry[0] * Fraction(10) ** exponent, powers)
                    rows[prefix + name] = rows[f"{prefix}{name}s"] = prefixed
    for line in _TABLE.strip().splitlines():  # what has a row of its own is not a prefix with a unit
        symbol, factor, *_ = line.split()
        rows[symbol] = (Fraction(factor), rows[symbol][1])
    for symbol in _PLURAL_SYMBOLS:
        rows[f"{symbol}s"] = rows[symbol] if symbol in rows else rows[symbol.removesuffix("s")]
    return rows


_KNOWN = _rows()
_LOWERED = {name.lower(): entry for name, entry in reversed(list(_KNOWN.items())) if len(name) > 1}


def _known(word: str) -> tuple[Fraction, dict[str, int]] | None:
    """A unit by its symbol, whose case counts, or by its name, whose case does not."""
    return _KNOWN.get(word) or _LOWERED.get(word.lower())


def unit_suffix(tokens: Sequence[Token], *, with_letters: bool = True) -> tuple[int, Unit]:
    """The index where the unit at the end of some tokens begins, and the unit; the end itself where there is none.

    ``with_letters`` False takes single letters outside of text for variables.
    """
    best, unit = len(tokens), NO_UNIT
    for start in range(len(tokens) - 1, max(len(tokens) - MAX_UNIT_TOKENS, 0) - 1, -1):
        if not _may_belong(tokens[start]):
            break
        if start > 0 and not _ends_value(tokens[start - 1]):
            continue
        if start == 0 or not _may_begin(tokens, start, with_letters=with_letters):
            continue
        if (composed := compose(tokens[start:])) is not None and composed:
            best, unit = start, composed
    return best, unit


def _may_belong(token: Token) -> bool:
    is_power = token.kind == "number" and token.value.denominator == 1 and abs(token.value) <= MAX_POWER
    return (
        token.kind in ("word", "name")
        or is_power
        or token.text in ("{}", "(", ")", "frac")
        or token.is_sign("/", "*", "^", "°", "%", "$", "€", "£", "¢", "-", ".", "'")
    )


def _ends_value(token: Token) -> bool:
    return token.kind in ("number", "close", "name", "word") or token.is_sign("!", "°", "%", ".", "'", "ᶜ")


def _may_begin(tokens: Sequence[Token], start: int, *, with_letters: bool) -> bool:
    """Whether the unit may begin with this token: a letter that touches its number is a variable."""
    token, before = tokens[start], tokens[start - 1]
    if token.is_sign("%", "°", "$", "€", "£", "¢") or token.text == "Ω" or token.mode == "text":
        return not token.is_sign("*", "^", "-", ".", "'")
    if token.text == "frac":
        return any(part.mode == "text" for part in tokens[start:])
    is_number = before.kind == "number"
    are_names = all(part.kind in ("name", "word", "sign") for part in tokens[start:])
    is_rate = are_names and any(part.is_sign("/") for part in tokens[start:])
    if is_number and is_rate and not token.has_space and with_letters and token.text not in ("/", "*"):
        return True
    if token.kind == "name":
        after = tokens[start + 1].text if start + 1 < len(tokens) else ""
        is_prefix = (token.text == "μ" and after != "") or after == "Ω"
        return (
            with_letters
            and (token.has_space or is_prefix)
            and is_number
            and (_known(token.text) is not None or is_prefix)
        )
    if token.kind != "word":
        return token.is_sign("/") and is_number and all(part.kind == "word" for part in tokens[start + 1 :])
    if is_number and not token.has_space:
        return token.text in TOUCHING or not token.text.isascii()
    return is_number or before.is_sign("!") or _known(token.text) is not None or token.text in _SQUARES


def compose(tokens: Sequence[Token]) -> Unit | None:
    """The unit that tokens write; None if they write something else, such as a variable.

    >>> from oncurve.rewards.grammar.lexer import tokenize
    >>> compose(tokenize(r"\\text{ km/h}")).factor
    Fraction(5, 18)
    """
    reader = _Reader()
    for word in _words(list(tokens)):
        if not reader.take(word):
            return None
    return reader.unit() if not reader.needs_name else None


def _words(tokens: list[Token]) -> Iterator[str]:
    """The tokens as words, powers and signs of multiplication and division."""
    index = 0
    while index < len(tokens):
        token, after = tokens[index], tokens[index + 1] if index + 1 < len(tokens) else None
        index += 1
        if token.is_sign("^"):
            text, index = _power(tokens, index)
            yield text
        elif token.text in ("{}", ".") or token.is_sign("-", "'"):
            continue
        elif token.text == "frac":
            middle = next((k for k in range(index, len(tokens)) if tokens[k].kind == "close"), len(tokens))
            yield from _words(tokens[index:middle])
            yield "/"
            index = middle
        elif token.kind == "number":
            yield f"^{token.text}" if index > 1 and not token.has_space else "?"
        elif token.is_sign("°") and after is not None and after.text in ("C", "F", "K"):
            index += 1
            yield f"°{after.text}" if after.text != "K" else "K"
        elif after is not None and (token.text == "μ" or (token.text in ("k", "M", "G", "m") and after.text == "Ω")):
            index += 1
            yield token.text + after.text
        elif token.text in ("fl", "fluid") and after is not None:
            index += 1 + (after.text == "." and index + 1 < len(tokens))
            yield "floz"
        elif token.text == "per" and after is not None and after.text == "cent":
            index += 1
            yield "percent"
        else:
            yield from _symbols(token.text, tokens[index : index + 3])


def _symbols(word: str, behind: Sequence[Token]) -> list[str]:
    """The symbols that are written as one word before a negative power, ``ms`` of ``ms^{-1}``; else the word itself."""
    symbols = _SYMBOL.findall(word)
    has_power = bool(behind) and behind[0].is_sign("^") and any(token.is_sign("-") for token in behind)
    return symbols if has_power and "".join(symbols) == word else [word]


def _power(tokens: list[Token], index: int) -> tuple[str, int]:
    """The exponent that stands here as ``^2``, and the index behind it."""
    sign = ""
    while index < len(tokens) and (tokens[index].text in ("{}", "(", ")") or tokens[index].is_sign("-")):
        sign += "-" if tokens[index].is_sign("-") else ""
        index += 1
    if index == len(tokens) or tokens[index].kind != "number":
        return "?", index
    end = index + 1
    while end < len(tokens) and tokens[end].kind == "close":
        end += 1
    return f"^{sign}{tokens[index].text}", end


class _Reader:
    """A unit that is put together word by word."""

    def __init__(self) -> None:
        self.factor, self.powers, self.label = Fraction(1), dict[str, int](), set[str]()
        self.top, self.sign, self.pending = Fraction(1), 1, 1
        self.last: tuple[tuple[Fraction, dict[str, int]], int] | None = None
        self.needs_name = False

    def take(self, token: str) -> bool:
        """Adds a word; False for one that no unit has."""
        word = token.lower()
        if token in ("/", "per"):
            self.sign, self.last, self.needs_name = -1, None, True
            self.label |= {"per"} if self.label else set()
        elif token in "*()":
            self.last = None
        elif word in _SQUARES:
            self.pending = _SQUARES[word]
        elif word in _POWERS or re.fullmatch(r"\^-?\d", token):
            return self._raise(_POWERS.get(word) or int(token.strip("^")))
        else:
            self.needs_name = False
            return self._name(token)
        return True

    def unit(self) -> Unit:
        """The unit that was read; degrees beside Celsius or Fahrenheit are none of their own."""
        if self.powers.keys() & {"°C", "°F"}:
            self.powers.pop("°", None)
        dimensions = tuple(sorted((base, power) for base, power in self.powers.items() if power))
        return Unit(dimensions, self.factor, frozenset(self.label), self.top)

    def _raise(self, power: int) -> bool:
        if self.last is None or abs(power) > MAX_POWER:
            return False
        self.factor, self.powers = _times(self.factor, self.powers, self.last[0], self.last[1] * (power - 1))
        self.last = None
        return True

    def _name(self, token: str) -> bool:
        word, entry = token.lower(), _known(token)
        is_variable = len(token) == 1 and entry is None and token.isascii()
        if word in _NOT_UNITS or is_variable or not (token.isalpha() or entry) or not _MULTIPLIED.isdisjoint(token):
            return False
        if entry is not None and not (self.label and self.sign < 0):
            self.last = (entry, self.sign * self.pending)
            self.factor, self.powers = _times(self.factor, self.powers, *self.last)
            self.pending = 1
            self.top *= entry[0] if self.sign > 0 else 1
        elif word not in _FILLERS:
            self.label.add(_singular(word))
        return True


def _times(
    factor: Fraction, powers: dict[str, int], entry: tuple[Fraction, dict[str, int]], power: int
) -> tuple[Fraction, dict[str, int]]:
    scale, dimensions = entry
    merged = dict(powers)
    for base, exponent in dimensions.items():
        merged[base] = merged.get(base, 0) + exponent * power
    return factor * scale**power, merged


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if re.search(r"(?:ss|sh|ch|x|z)es$", word):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word
