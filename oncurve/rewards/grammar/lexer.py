"""Tokens of an answer: LaTeX, Unicode and plain text become one stream."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from oncurve.rewards.grammar.spellings import (
    ACCENTS,
    BRACKETS,
    BUILDERS,
    ESCAPED,
    FONTS,
    FUNCTIONS,
    GAPS,
    GREEK,
    HIDDEN,
    IDLE,
    OPERATORS,
    PLAIN,
    SAME_FUNCTION,
    SETS,
    SIGNS,
    SPACES,
    SUBSCRIPTS,
    SUPERSCRIPTS,
    TEXTS,
    UNIT_VECTORS,
    translation,
)

MAX_DIGITS = 300
"""Digits of a number; longer ones cannot be read."""
MAX_EXPONENT = 300
MAX_TOKENS = 700
MAX_BASE = 36

Kind = Literal["number", "name", "word", "sign", "open", "close", "function", "command", "operator", "begin", "end"]
Mode = Literal["bare", "text", "formula"]
"""Whether a token stands in a macro for text, between delimiters of mathematics, or in neither."""


class Unreadable(Exception):  # noqa: N818 - a state of the answer, not an error of ours
    """The text is no answer that the grammar knows."""


@dataclass(frozen=True, slots=True)
class Token:
    """The smallest piece of an answer that means something."""

    kind: Kind
    text: str
    """The normal spelling; the digits of a number as they were written."""
    value: Fraction = Fraction(0)
    """Value of a number."""
    has_space: bool = False
    """It stands apart from the token before it."""
    mode: Mode = "bare"
    base: int | None = None
    """Base that a number is written with."""
    is_from_words: bool = False
    """A number that was written in words."""

    def is_sign(self, *texts: str) -> bool:
        """Whether it is one of these signs."""
        return self.kind == "sign" and self.text in texts


_CHARACTERS = translation()
_RAISED = re.compile(f"[{''.join(SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(SUBSCRIPTS)}]+")
_PERIODIC = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))")
_REPEATED = re.compile(r"(\d*)\.(\d{3,60})\s*(?:\.\.\.|\\[lcd]?dots(?:[bc](?![a-zA-Z]))?)")
_PERIOD = re.compile(r"(\d*?)(?:(\d\d+?)\2+|(\d)\3{2,})")
_NUMBER = re.compile(
    r"\d{1,3}(?:(?:,|\{,\}|,\\!\s*|\\,|\\ |~| )\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+|\{,\}\d+)?|\.\d+"
)
_TEN = re.compile(r"[eE]([-+]?\d{1,3})(?![\w.])")
_BASES = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASE_NAMES = {name: 2 + place for place, name in enumerate(re.split(" ", _BASES))} | {
    "binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16, "hex": 16,
}  # fmt: skip
_BASED = re.compile(
    r"(?:\\text\{)?\(?(?:\\text\{)?(?=[A-Z]*\d|[A-F]{2})([\dA-Z]+(?:\.[\dA-Z]+)?)\}?\)?\}?\s*_\s*"
    r"(?:\{\s*(?:\\text\s*\{\s*)?(\d{1,2}|[a-z]+)\s*\}?\s*\}|(\d))(?![\w])"
)
_PREFIXED = re.compile(r"0([xXbBoO])([\dA-Fa-f]+)(?!\w)")
_PREFIXES = {"x": 16, "b": 2, "o": 8}
_LETTERS = re.compile(r"[^\W\d_]+")
_COMMAND = re.compile(r"\\([a-zA-Z]+)\*?")
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\(?:circ|degree|deg)\s*\}|\\(?:circ|degree|deg)(?![a-zA-Z]))")
_PRIMES = re.compile(r"\^\s*(?:\{\s*((?:\\prime\s*|')+)\}|\\prime(?![a-zA-Z]))")
_COMPLEMENT = re.compile(r"\^\s*(?:\{\s*\\?(?:complement|c|C)\s*\}|[cC](?![a-zA-Z])|\\complement(?![a-zA-Z]))")
_HIDDEN_ARGUMENT = re.compile(r"\s*\{[^{}]*\}")
_ENVIRONMENT = re.compile(r"\s*\{([a-zA-Z]+)\*?\}")
_COLUMNS = re.compile(r"\s*\{[lcr|@{}\s]*\}")
_SYMBOLS = re.compile(r"\.\.\.|<=|>=|!=|==|=>|->|!!|[-+*/^_!'=<>%°$€£¥¢|,;:?&\"#@.]")
_PLAIN_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_SAME_SIGN = {"==": "=", "=>": "⇒", "->": "→"}
_OPENING, _CLOSING = "([{⟨⌊⌈", ")]}⟩⌋⌉"
_BRACKETED = frozenset(("min", "max", "gcd", "lcm", "arg", "det", "dim", "tr", "ker", "Re", "Im", "sgn", "lg"))
"""Functions of plain text that are followed by a bracket."""


def tokens(text: str) -> list[Token]:
    """The tokens of an answer. Raises Unreadable for what is no sign of mathematics, or too much of it.

    >>> [token.text for token in tokens(r"2\\text{ cm}")]
    ['2', 'cm']
    """
    text = _RAISED.sub(lambda found: "^{" + "".join(SUPERSCRIPTS[sign] for sign in found.group()) + "}", text)
    text = _LOWERED.sub(lambda found: "_{" + "".join(SUBSCRIPTS[sign] for sign in found.group()) + "}", text)
    text = text.translate(_CHARACTERS)
    if not text.isascii():
        text = "".join(str(unicodedata.decimal(sign, sign)) for sign in text)
    return _Lexer(text).run()


class _Lexer:
    """One pass over a text; every step reads at least one character."""

    def __init__(self, text: str) -> None:
        self.text, self.place, self.found = text, 0, list[Token]()
        self.has_space, self.environments = False, 0
        self.groups: list[str] = []  # what each open brace belongs to: "text", "font", "group", "box"
        self.delimiters = _delimiters(text)
        self.in_formula = False
        self.quote = ""

    def run(self) -> list[Token]:
        while self.place < len(self.text):
            self._step()
            if len(self.found) > MAX_TOKENS:
                raise Unreadable("too many signs")
        if self.groups or self.quote not in ("", '"', "'"):
            raise Unreadable("a brace does not close")
        return self.found

    @property
    def mode(self) -> Mode:
        if "text" in self.groups:
            return "text"
        return "formula" if self.in_formula else "bare"

    def _add(self, kind: Kind, text: str, **more: object) -> None:
        self.found.append(Token(kind, text, has_space=self.has_space, mode=self.mode, **more))  # type: ignore[arg-type]
        self.has_space = False

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The match at this place, behind which the next step begins."""
        found = pattern.match(self.text, self.place)
        if found is not None and found.end() > self.place:
            self.place = found.end()
            return found
        return None

    def _step(self) -> None:
        sign = self.text[self.place]
        if sign.isspace():
            self.place, self.has_space = self.place + 1, True
        elif sign == "\\":
            self._backslash()
        elif sign.isdigit() or sign == "." or (sign in "ABCDEFGHIJKLMNOPQRSTUVWXYZ(" and not self._follows_letter()):
            if not self._number():
                self._other(sign)
        else:
            self._other(sign)

    def _follows_letter(self) -> bool:
        return self.place > 0 and self.text[self.place - 1].isalnum()

    def _other(self, sign: str) -> None:
        if sign in "{}":
            self._brace(sign)
        elif sign.isalpha():
            self._letters()
        elif sign in _OPENING or sign in _CLOSING:
            self.place += 1
            self._add("open" if sign in _OPENING else "close", sign)
        elif sign == "^" and self._raised():
            pass
        elif sign == "*" and self.text.startswith("**", self.place):
            self._stars()
        elif sign == "~":
            self._tilde()
        elif sign in "'\"`":
            self._quotes(sign)
        elif sign == "$" and self.place in self.delimiters:
            self.place, self.has_space, self.in_formula = self.place + 1, True, not self.in_formula
        elif sign == "-" and self._is_dash():
            self.place += 2
            self._add("sign", "-")
        elif found := self._match(_SYMBOLS):
            self._add("sign", _SAME_SIGN.get(found.group(), found.group()))
        else:
            raise Unreadable(f"the sign {sign!r}")

    def _is_dash(self) -> bool:
        """Two hyphens between the ends of a range."""
        before = self.found[-1] if self.found else None
        after = self.text[self.place + 2 :].lstrip()[:1]
        ends_number = before is not None and (before.kind == "number" or before.is_sign("%"))
        return self.text.startswith("--", self.place) and ends_number and (after.isdigit() or after in ("$", "\\"))

    def _raised(self) -> bool:
        """Reads a mark that stands as an exponent: a degree, primes, a complement."""
        if self._match(_DEGREE):
            self._add("sign", "°")
        elif (found := self._match(_PRIMES)) is not None:
            self._add("sign", "'" * max(1, (found[1] or "").count("'") + (found[1] or "").count("prime")))
        elif self._match(_COMPLEMENT):
            self._add("sign", "ᶜ")
        else:
            return False
        return True

    def _brace(self, sign: str) -> None:
        self.place += 1
        if sign == "{":
            self.groups.append("group")
            self._add("open", "{}")
            return
        if not self.groups:
            raise Unreadable("a brace that was not opened")
        kind = self.groups.pop()
        if kind == "group":
            self._add("close", "{}")
        elif kind == "text":
            self.has_space = True

    def _stars(self) -> None:
        before, after = self.text[: self.place], self.text[self.place + 2 :]
        self.place += 2
        is_tight = before[-1:].isalnum() or before[-1:] in (")", "]", "}")
        is_power = (is_tight and after[:1] not in ("", " ", ".", ",", "*", "\n")) or (
            before.endswith(" ") and after.startswith(" ") and before.rstrip()[-1:].isalnum()
        )
        if is_power:
            self._add("sign", "^")
        else:
            self.has_space = True

    def _tilde(self) -> None:
        """A space that binds, or, before a number with nothing on its left, "about"."""
        before, after = self.text[: self.place].rstrip(), self.text[self.place + 1 :].lstrip()
        self.place += 1
        is_about = before[-1:] in ("", "=", "(", ",", "$", ":") and (after[:1].isdigit() or after[:1] in ("$", "-", "\\", "."))
        if is_about:
            self._add("sign", "≈")
        else:
            self.has_space = True

    def _quotes(self, sign: str) -> None:
        """Quotes around something are not read; behind a number or letter they are primes or marks of feet and inches."""
        last = self.found[-1] if self.found and not self.has_space else None
        self.place += 1
        if sign == "`":
            self.has_space = True
        elif self.quote == sign:
            self.quote, self.has_space = "", True
        elif last is not None and (last.kind in ("number", "name", "word", "function") or last.text in (")", "'", "{}")):
            self._add("sign", sign)
        elif sign in self.text[self.place :]:
            self.quote, self.has_space = sign, True
        else:
            self.has_space = True

    def _letters(self) -> None:
        found = self._match(_LETTERS)
        assert found is not None
        word = found.group()
        plain = SAME_FUNCTION.get(word, word)
        if plain in FUNCTIONS and self._is_function(word):
            self._add("function", plain)
        elif word in PLAIN and self.mode != "text":
            self._add("name", PLAIN[word])
        elif word == "infinity":
            self._add("name", "∞")
        elif word == "sqrt" and self._opens():
            self._add("command", "sqrt")
        elif word in ("mod", "choose"):
            self._add("sign", word)
        else:
            self._add("name" if len(word) == 1 else "word", word)

    def _is_function(self, word: str) -> bool:
        """The name of a function, and no word or unit: ``5 min`` is none, ``min(3, 5)`` is one."""
        if self._opens():
            return True
        if self.mode == "text":
            return self.text[: self.place].endswith("{" + word) and self.text[self.place : self.place + 1] == "}"
        is_behind_number = bool(self.found) and self.found[-1].kind == "number"
        return word not in _BRACKETED and not (word == "sec" and is_behind_number)

    def _opens(self) -> bool:
        return self.text[self.place :].lstrip(" }")[:1] in ("(", "{") or self.text[self.place :].lstrip(" }").startswith("\\{")

    def _number(self) -> bool:
        """Reads a number; False if none stands here."""
        if self._prefixed() or self._based():
            return True
        at = self.place
        if (found := self._match(_PERIODIC)) is not None and found[1]:
            self._periodic(found[1], found[2], found[3] or found[4] or found[5], found.group())
            return True
        self.place = at
        if (found := self._match(_REPEATED)) is not None:
            period = _PERIOD.fullmatch(found[2])
            if period is not None:
                self._periodic(found[1], period[1], period[2] or period[3], found.group())
                return True
            self.place = at
        if (found := self._match(_NUMBER)) is None:
            return False
        self._plain_number(found.group())
        return True

    def _plain_number(self, written: str) -> None:
        parts = re.split(r"\D+", written.replace("{,}", ",").replace("\\!", ""))
        is_grouped = len(parts) > 1 and "." not in written.replace("{,}", ",")[: -len(parts[-1])]
        digits = "".join(sign for sign in written if sign.isdigit() or sign == ".")
        if len(digits) > MAX_DIGITS:
            raise Unreadable("a number that is too long")
        value = Fraction(digits)
        text = digits
        if "{,}" in written and len(parts) == 2 and len(parts[1]) != 3:  # a decimal comma
            value, text = Fraction(f"{parts[0]}.{parts[1]}"), f"{parts[0]}.{parts[1]}"
        elif is_grouped and "," in written and not written.replace(",", "").strip("0123456789."):
            text = written  # the commas may separate members as well
        if (ten := self._match(_TEN)) is not None and len(ten[1].lstrip("+-")) <= 3:
            if abs(int(ten[1])) > MAX_EXPONENT:
                raise Unreadable("an exponent that is too large")
            value, text = value * Fraction(10) ** int(ten[1]), f"{text}{ten.group()}"
        self._add("number", text, value=value)

    def _periodic(self, whole: str, fixed: str, period: str, written: str) -> None:
        once = int(f"0{whole}{fixed}")
        value = (once + Fraction(int(period), 10 ** len(period) - 1)) / 10 ** len(fixed)
        self._add("number", written, value=value)

    def _prefixed(self) -> bool:
        found = self._match(_PREFIXED)
        if found is None:
            return False
        self._with_base(found[2], _PREFIXES[found[1].lower()])
        return True

    def _based(self) -> bool:
        if "_" not in self.text[self.place : self.place + 60]:
            return False
        at, found = self.place, self._match(_BASED)
        named = (found[2] or found[3]) if found else ""
        if found is None or not (named.isdigit() or named in _BASE_NAMES):
            self.place = at
            return False
        base = int(named) if named.isdigit() else _BASE_NAMES[named]
        digits = found[1].replace(".", "")
        if found.group().count("(") != found.group().count(")") or found.group().count("{") != found.group().count("}"):
            self.place = at
            return False
        if not 2 <= base <= MAX_BASE or any(int(digit, 36) >= base for digit in digits):
            self.place = at
            return False
        self._with_base(found[1], base)
        return True

    def _with_base(self, written: str, base: int) -> None:
        whole, _, fraction = written.partition(".")
        if len(written) > MAX_DIGITS or any(int(digit, 36) >= base for digit in whole + fraction):
            raise Unreadable("digits of another base")
        value = Fraction(int(whole + fraction, base), base ** len(fraction))
        self._add("number", written.upper(), value=value, base=base)

    def _backslash(self) -> None:
        after = self.text[self.place + 1 : self.place + 2]
        if after == "\\":
            self._row()
        elif after in "()[]" and after and self.place in self.delimiters:
            self.place, self.has_space, self.in_formula = self.place + 2, True, after in "(["
        elif after == "!":
            self.place += 2
        elif after in SPACES or not after:
            self.place, self.has_space = self.place + 2, True
        elif after in "{}":
            self.place += 2
            self._add("open" if after == "{" else "close", after)
        elif after in ESCAPED:
            self.place += 2
            if ESCAPED[after].strip():
                self._add("sign", ESCAPED[after])
        elif after == "|":
            self.place += 2
            self._add("sign", "‖")
        elif (found := self._match(_COMMAND)) is not None:
            self._command(found[1])
        else:
            raise Unreadable("a backslash")

    def _row(self) -> None:
        """The end of a row; outside of tables also a backslash that was escaped twice."""
        self.place += 2
        following = _LETTERS.match(self.text, self.place)
        if not self.environments and following and following.group() in (BUILDERS | TEXTS | SIGNS.keys() | GREEK.keys()):
            self.place -= 1
            return
        self._add("sign", "\\\\")

    def _command(self, name: str) -> None:  # noqa: C901, PLR0912 - one row for each class of commands
        if name in IDLE:
            if name in ("left", "right") and self.text[self.place : self.place + 1] == ".":
                self.place += 1
        elif name in GAPS:
            self.has_space = True
        elif name in HIDDEN:
            self._match(_HIDDEN_ARGUMENT)
        elif name in TEXTS:
            self._text(name)
        elif name in FONTS or name in ACCENTS:
            self._font(name)
        elif name.startswith("math") and name in ("mathbb", "mathds"):
            self._blackboard()
        elif name in SETS and name != "C":
            self._add("name", SETS[name])
        elif name in GREEK:
            self._add("name", GREEK[name])
        elif name in FUNCTIONS or name in SAME_FUNCTION:
            self._add("function", SAME_FUNCTION.get(name, name))
        elif name in OPERATORS:
            self._add("operator", OPERATORS[name])
        elif name in SIGNS:
            self._add("sign", SIGNS[name])
        elif name in BRACKETS:
            sign = BRACKETS[name]
            self._add("open" if sign in _OPENING else "close", sign)
        elif name in BUILDERS:
            self._add("command", "sqrt" if name == "sqrt" else "binom" if "binom" in name else "frac")
        elif name in ("begin", "end"):
            self._environment(name)
        else:
            raise Unreadable(f"the command \\{name}")

    def _text(self, name: str) -> None:
        self._skip_space()
        if self.text[self.place : self.place + 1] != "{":
            if name == "mathrm" and self.text[self.place : self.place + 1].isalpha():
                self.place += 1
                self._add("name", self.text[self.place - 1])
                return
            raise Unreadable("a macro for text without text")
        inside = re.compile(r"\{\s*([^{}\\]*?)\s*\}").match(self.text, self.place)
        if inside and name in ("mathrm", "operatorname", "text", "mathbf") and inside[1] in ("e", "i"):
            self.place = inside.end()
            self._add("name", inside[1])
            return
        if inside and name == "operatorname" and inside[1].isalpha():
            self.place = inside.end()
            is_known = inside[1] in FUNCTIONS or inside[1] in SAME_FUNCTION
            self._add("function" if is_known else "name", SAME_FUNCTION.get(inside[1], inside[1]))
            return
        self.place += 1
        self.groups.append("text")

    def _skip_space(self) -> None:
        while self.text[self.place : self.place + 1].isspace():
            self.place += 1

    def _font(self, name: str) -> None:
        """An argument in another font is the argument, but for the vectors i, j, k and the set R; an accent is kept."""
        inside = re.compile(r"\s*(?:\{\s*\\?([a-zA-Z]+)\s*\}|\\?([a-zA-Z](?![a-zA-Z])|[ij]math))").match(self.text, self.place)
        letter = ((inside[1] or inside[2]) if inside else "").replace("math", "")
        if name in ("mathbf", "bm", "boldsymbol", "hat", "vec") and letter in UNIT_VECTORS and inside is not None:
            self.place = inside.end()
            self._add("name", UNIT_VECTORS[letter])
        elif name in ("mathbf", "bm") and letter in SETS and letter == "R" and inside is not None:
            self.place = inside.end()
            self._add("name", SETS[letter])
        elif name in ACCENTS:
            self._add("command", {"bar": "overline", "widehat": "hat", "widetilde": "tilde", "overrightarrow": "vec"}.get(name, name))
        else:
            self._skip_space()
            if self.text[self.place : self.place + 1] == "{":
                self.place += 1
                self.groups.append("group" if name == "underline" else "font")
                if name == "underline":
                    self._add("open", "{}")

    def _blackboard(self) -> None:
        found = self._match(re.compile(r"\s*(?:\{\s*([A-Z])\s*\}|([A-Z])(?![a-zA-Z]))"))
        letter = (found[1] or found[2]) if found else ""
        if letter not in SETS:
            raise Unreadable("a letter that names no set of numbers")
        self._add("name", SETS[letter])

    def _environment(self, name: str) -> None:
        found = self._match(_ENVIRONMENT)
        if found is None:
            raise Unreadable("an environment without a name")
        if name == "begin":
            self.environments += 1
            if found[1] == "array":
                self._match(_COLUMNS)
        else:
            self.environments -= 1
        self._add("begin" if name == "begin" else "end", found[1])


def _delimiters(text: str) -> frozenset[int]:
    """Places of the signs that begin and end formulas; a dollar sign before an amount is none."""
    places: set[int] = set()
    dollars = [found.start() for found in re.finditer(r"(?<!\\)\$", text)]
    while len(dollars) > 1:
        start, end = dollars[0], dollars[1]
        inside = text[start + 1 : end]
        around = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", "", inside)
        is_money = inside[:1].isdigit() and _PLAIN_WORD.search(around) is not None
        if not inside or is_money:
            if not inside:
                places |= {start, end}
                dollars = dollars[2:]
                continue
            dollars = dollars[1:]
        else:
            places |= {start, end}
            dollars = dollars[2:]
    if len(dollars) == 1 and len(places) and text[dollars[0] + 1 :].strip() == "":
        places.add(dollars[0])
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        if opening in text and closing in text:
            places |= {found.start() for sign in (opening, closing) for found in re.finditer(r"(?<!\\)" + re.escape(sign), text)}
    return frozenset(places)


def as_members(token: Token) -> list[Token]:
    """The numbers between the commas of a number whose thousands have them."""
    first, *rest = token.text.split(",")
    members = [replace(token, text=first, value=Fraction(first))]
    return members + [replace(token, text=part, value=Fraction(part), has_space=False) for part in rest]
