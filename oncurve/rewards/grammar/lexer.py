"""Tokens of an answer: LaTeX, Unicode and plain text become one stream."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from fractions import Fraction

from oncurve.rewards.grammar.lexemes import (
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
    NumberLexer,
    Token,
    Unreadable,
    translation,
)

MAX_TOKENS = 700


_CHARACTERS = translation()
_RAISED = re.compile(f"[{''.join(SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(SUBSCRIPTS)}]+")
_QED = re.compile(r"(?<=[\s{(])\(?Q\.?\s?E\.?\s?D\.?\)?(?=\s*[})]*\s*$)")
"""The end of a proof."""
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


def tokenize(text: str) -> list[Token]:
    """The tokens of an answer. Raises Unreadable for what is no sign of mathematics, or too much of it.

    >>> [token.text for token in tokenize(r"2\\text{ cm}")]
    ['2', 'cm']
    """
    text = _RAISED.sub(lambda match: "^{" + "".join(SUPERSCRIPTS[sign] for sign in match.group()) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + "".join(SUBSCRIPTS[sign] for sign in match.group()) + "}", text)
    text = _QED.sub("", text).translate(_CHARACTERS)
    if not text.isascii():
        text = "".join(str(unicodedata.decimal(sign, sign)) for sign in text)
    return _Lexer(text).run()


class _Lexer(NumberLexer):
    """One pass over a text; every step reads at least one character."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.environments = 0
        self.delimiters = _delimiters(text)
        self.quote = ""

    def run(self) -> list[Token]:
        while self.position < len(self.text):
            self._step()
            if len(self.tokens) > MAX_TOKENS:
                raise Unreadable("too many signs")
        if self.groups or self.quote not in ("", '"', "'"):
            raise Unreadable("a brace does not close")
        return self.tokens

    def _step(self) -> None:
        sign = self.text[self.position]
        if sign.isspace():
            self.position, self.has_space = self.position + 1, True
        elif sign == "\\":
            self._backslash()
        elif sign.isdigit() or sign == "." or (sign in "ABCDEFGHIJKLMNOPQRSTUVWXYZ(" and not self._follows_letter()):
            if not self.number():
                self._other(sign)
        else:
            self._other(sign)

    def _follows_letter(self) -> bool:
        return self.position > 0 and self.text[self.position - 1].isalnum()

    def _other(self, sign: str) -> None:
        if sign in "{}":
            self._brace(sign)
        elif sign.isalpha():
            self._letters()
        elif sign in _OPENING or sign in _CLOSING:
            self.position += 1
            self.add("open" if sign in _OPENING else "close", sign)
        elif sign == "^" and self._raised():
            pass
        elif sign in "~'\"`" or self.text.startswith("**", self.position):
            {"*": self._stars, "~": self._tilde}.get(sign, self._quotes)()
        elif sign == "$" and self.position in self.delimiters:
            self.position, self.has_space, self.in_formula = self.position + 1, True, not self.in_formula
        elif sign == "-" and self._is_dash():
            self.position += 2
            self.add("sign", "-")
        elif match := self.match(_SYMBOLS):
            self.add("sign", _SAME_SIGN.get(match.group(), match.group()))
        else:
            raise Unreadable(f"the sign {sign!r}")

    def _is_dash(self) -> bool:
        """Two hyphens between the ends of a range."""
        before = self.tokens[-1] if self.tokens else None
        after = self.text[self.position + 2 :].lstrip()[:1]
        ends_number = before is not None and (before.kind == "number" or before.is_sign("%"))
        return self.text.startswith("--", self.position) and ends_number and (after.isdigit() or after in ("$", "\\"))

    def _raised(self) -> bool:
        """Reads a mark that stands as an exponent: a degree, primes, a complement."""
        if self.match(_DEGREE):
            self.add("sign", "°")
        elif (match := self.match(_PRIMES)) is not None:
            self.add("sign", "'" * max(1, (match[1] or "").count("'") + (match[1] or "").count("prime")))
        elif self.match(_COMPLEMENT):
            self.add("sign", "ᶜ")
        else:
            return False
        return True

    def _brace(self, sign: str) -> None:
        self.position += 1
        if sign == "{":
            self.groups.append("group")
            self.add("open", "{}")
            return
        if not self.groups:
            raise Unreadable("a brace that was not opened")
        kind = self.groups.pop()
        if kind == "group":
            self.add("close", "{}")
        elif kind == "text":
            self.has_space = True

    def _stars(self) -> None:
        before, after = self.text[: self.position], self.text[self.position + 2 :]
        self.position += 2
        is_tight = before[-1:].isalnum() or before[-1:] in (")", "]", "}")
        is_power = (is_tight and after[:1] not in ("", " ", ".", ",", "*", "\n")) or (
            before.endswith(" ") and after.startswith(" ") and before.rstrip()[-1:].isalnum()
        )
        if is_power:
            self.add("sign", "^")
        else:
            self.has_space = True

    def _tilde(self) -> None:
        """A space that binds, or, before a number with nothing on its left, "about"."""
        before, after = self.text[: self.position].rstrip(), self.text[self.position + 1 :].lstrip()
        self.position += 1
        is_about = before[-1:] in ("", "=", "(", ",", "$", ":") and (
            after[:1].isdigit() or after[:1] in ("$", "-", "\\", ".")
        )
        if is_about:
            self.add("sign", "≈")
        else:
            self.has_space = True

    def _quotes(self) -> None:
        """Quotes around something are not read; behind a number or letter they are primes or feet and inches."""
        sign, last = self.text[self.position], self.tokens[-1] if self.tokens and not self.has_space else None
        self.position += 1
        if sign == "`":
            self.has_space = True
        elif self.quote == sign:
            self.quote, self.has_space = "", True
        elif last is not None and (
            last.kind in ("number", "name", "word", "function") or last.text in (")", "'", "{}")
        ):
            self.add("sign", sign)
        elif sign in self.text[self.position :]:
            self.quote, self.has_space = sign, True
        else:
            self.has_space = True

    def _letters(self) -> None:
        match = self.match(_LETTERS)
        assert match is not None
        word = match.group()
        plain = SAME_FUNCTION.get(word, word)
        if plain in FUNCTIONS and self._is_function(word):
            self.add("function", plain)
        elif word in PLAIN and self.mode != "text":
            self.add("name", PLAIN[word])
        elif word == "infinity":
            self.add("name", "∞")
        elif word == "sqrt" and self._opens():
            self.add("command", "sqrt")
        elif word in ("mod", "choose"):
            self.add("sign", word)
        else:
            self.add("name" if len(word) == 1 else "word", word)

    def _is_function(self, word: str) -> bool:
        """The name of a function, and no word or unit: ``5 min`` is none, ``min(3, 5)`` is one."""
        if self._opens():
            return True
        if word in ("min", "sec") and self.tokens and self.tokens[-1].kind == "number":
            return False
        if self.mode == "text":
            return (
                self.text[: self.position].endswith("{" + word) and self.text[self.position : self.position + 1] == "}"
            )
        return word not in _BRACKETED

    def _opens(self) -> bool:
        return self.text[self.position :].lstrip(" }")[:1] in ("(", "{") or self.text[self.position :].lstrip(
            " }"
        ).startswith("\\{")

    def _backslash(self) -> None:
        after = self.text[self.position + 1 : self.position + 2]
        if after == "\\":
            self._row()
        elif after in "()[]" and after and self.position in self.delimiters:
            self.position, self.has_space, self.in_formula = self.position + 2, True, after in "(["
        elif after == "!":
            self.position += 2
        elif after in SPACES or not after:
            self.position, self.has_space = self.position + 2, True
        elif after in "{}":
            self.position += 2
            self.add("open" if after == "{" else "close", after)
        elif after in ESCAPED:
            self.position += 2
            if ESCAPED[after].strip():
                self.add("sign", ESCAPED[after])
        elif after == "|":
            self.position += 2
            self.add("sign", "‖")
        elif (match := self.match(_COMMAND)) is not None:
            self._command(match[1])
        else:
            raise Unreadable("a backslash")

    def _row(self) -> None:
        """The end of a row; outside of tables also a backslash that was escaped twice."""
        self.position += 2
        following = _LETTERS.match(self.text, self.position)
        if (
            not self.environments
            and following
            and following.group() in (BUILDERS | TEXTS | SIGNS.keys() | GREEK.keys())
        ):
            self.position -= 1
            return
        self.add("sign", "\\\\")

    def _command(self, name: str) -> None:  # noqa: C901, PLR0912 - one row for each class of commands
        if name in IDLE:
            if name in ("left", "right") and self.text[self.position : self.position + 1] == ".":
                self.position += 1
        elif name in GAPS:
            self.has_space = True
        elif name in HIDDEN:
            self.match(_HIDDEN_ARGUMENT)
        elif name in TEXTS:
            self._text(name)
        elif name in FONTS or name in ACCENTS:
            self._font(name)
        elif name.startswith("math") and name in ("mathbb", "mathds"):
            self._blackboard()
        elif name in SETS and name != "C":
            self.add("name", SETS[name])
        elif name in GREEK:
            self.add("name", GREEK[name])
        elif name in FUNCTIONS or name in SAME_FUNCTION:
            self.add("function", SAME_FUNCTION.get(name, name))
        elif name in OPERATORS:
            self.add("operator", OPERATORS[name])
        elif name in SIGNS:
            self.add("sign", SIGNS[name])
        elif name in BRACKETS:
            sign = BRACKETS[name]
            self.add("open" if sign in _OPENING else "close", sign)
        elif name in BUILDERS:
            self.add("command", "sqrt" if name == "sqrt" else "binom" if "binom" in name else "frac")
        elif name == "forall":
            self.add("word", "for")
            self.add("word", "all")
        elif name in ("begin", "end"):
            self._environment(name)
        else:
            raise Unreadable(f"the command \\{name}")

    def _text(self, name: str) -> None:
        self._skip_space()
        if self.text[self.position : self.position + 1] != "{":
            if name == "mathrm" and self.text[self.position : self.position + 1].isalpha():
                self.position += 1
                self.add("name", self.text[self.position - 1])
                return
            raise Unreadable("a macro for text without text")
        inside = re.compile(r"\{\s*([^{}\\]*?)\s*\}").match(self.text, self.position)
        if inside and name in ("mathrm", "operatorname", "text", "mathbf") and inside[1] in ("e", "i"):
            self.position = inside.end()
            self.add("name", inside[1])
            return
        if inside and name == "operatorname" and inside[1].isalpha():
            self.position = inside.end()
            is_known = inside[1] in FUNCTIONS or inside[1] in SAME_FUNCTION
            self.add("function" if is_known else "name", SAME_FUNCTION.get(inside[1], inside[1]))
            return
        self.position += 1
        self.groups.append("text")

    def _skip_space(self) -> None:
        while self.text[self.position : self.position + 1].isspace():
            self.position += 1

    def _font(self, name: str) -> None:
        """An argument in another font is the argument, but for the vectors i, j, k and the set R; an accent is kept."""
        inside = re.compile(r"\s*(?:\{\s*\\?([a-zA-Z]+)\s*\}|\\?([a-zA-Z](?![a-zA-Z])|[ij]math))").match(
            self.text, self.position
        )
        letter = ((inside[1] or inside[2]) if inside else "").replace("math", "")
        if name in ("mathbf", "bm", "boldsymbol", "hat", "vec") and letter in UNIT_VECTORS and inside is not None:
            self.position = inside.end()
            self.add("name", UNIT_VECTORS[letter])
        elif name in ("mathbf", "bm") and letter in SETS and letter == "R" and inside is not None:
            self.position = inside.end()
            self.add("name", SETS[letter])
        elif name in ACCENTS:
            self.add(
                "command",
                {"bar": "overline", "widehat": "hat", "widetilde": "tilde", "overrightarrow": "vec"}.get(name, name),
            )
        else:
            self._skip_space()
            if self.text[self.position : self.position + 1] == "{":
                self.position += 1
                self.groups.append("group" if name == "underline" else "font")
                if name == "underline":
                    self.add("open", "{}")

    def _blackboard(self) -> None:
        match = self.match(re.compile(r"\s*(?:\{\s*([A-Z])\s*\}|([A-Z])(?![a-zA-Z]))"))
        letter = (match[1] or match[2]) if match else ""
        if letter not in SETS:
            raise Unreadable("a letter that names no set of numbers")
        self.add("name", SETS[letter])

    def _environment(self, name: str) -> None:
        match = self.match(_ENVIRONMENT)
        if match is None:
            raise Unreadable("an environment without a name")
        if name == "begin":
            self.environments += 1
            if match[1] == "array":
                self.match(_COLUMNS)
        else:
            self.environments -= 1
        self.add("begin" if name == "begin" else "end", match[1])


def _delimiters(text: str) -> frozenset[int]:
    """Places of the signs that begin and end formulas; a dollar sign before an amount is none."""
    delimiters: set[int] = set()
    dollars = [match.start() for match in re.finditer(r"(?<!\\)\$", text)]
    while len(dollars) > 1:
        start, end = dollars[0], dollars[1]
        inside = text[start + 1 : end]
        around = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", "", inside)
        is_money = inside[:1].isdigit() and _PLAIN_WORD.search(around) is not None
        if not inside or is_money:
            if not inside:
                delimiters |= {start, end}
                dollars = dollars[2:]
                continue
            dollars = dollars[1:]
        else:
            delimiters |= {start, end}
            dollars = dollars[2:]
    if len(dollars) == 1 and len(delimiters) and text[dollars[0] + 1 :].strip() == "":
        delimiters.add(dollars[0])
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        if opening in text and closing in text:
            delimiters |= {
                match.start()
                for sign in (opening, closing)
                for match in re.finditer(r"(?<!\\)" + re.escape(sign), text)
            }
    return frozenset(delimiters)


def as_members(token: Token) -> list[Token]:
    """The numbers between the commas of a number whose thousands have them."""
    first, *rest = token.text.split(",")
    members = [replace(token, text=first, value=Fraction(first))]
    return members + [replace(token, text=part, value=Fraction(part), has_space=False) for part in rest]
