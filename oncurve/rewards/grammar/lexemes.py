"""Tokens: numbers in figures, brackets, and the spellings of a sign in Unicode, LaTeX and plain text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MAX_DIGITS = 300
"""Digits of a number; longer ones cannot be read."""
MAX_EXPONENT = 300
MAX_BASE = 36
Kind = Literal["number", "name", "word", "sign", "open", "close", "function", "command", "operator", "begin", "end"]
Mode = Literal["bare", "text", "formula"]
"""Whether a token stands in a macro for text, between delimiters of mathematics, or in neither."""


class Unreadable(Exception):
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


_PERIODIC = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))")
_REPEATED = re.compile(r"(\d*)\.(\d{3,60})\s*(?:\.\.\.|\\[lcd]?dots(?:[bc](?![a-zA-Z]))?)")
_PERIOD = re.compile(r"(\d*?)(?:(\d\d+?)\2+|(\d)\3{2,})")
_NUMBER = re.compile(r"\d{1,3}(?:(?:,|\{,\}|,\\!\s*|\\,|\\ |~| )\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+|\{,\}\d+)?|\.\d+")
_TEN = re.compile(r"[eE]([-+]?\d{1,3})(?![\w.])")
_BASES = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASE_NAMES = {name: 2 + index for index, name in enumerate(re.split(" ", _BASES))} | {
    "binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16, "hex": 16,
}  # fmt: skip
_BASED = re.compile(
    r"(?:\\text\{)?\(?(?:\\text\{)?(?=[A-Z]*\d|[A-F]{2})([\dA-Z]+(?:\.[\dA-Z]+)?)\}?\)?\}?\s*_\s*"
    r"(?:\{\s*(?:\\text\s*\{\s*)?(\d{1,2}|[a-z]+)\s*\}?\s*\}|(\d))(?![\w])"
)
_PREFIXED = re.compile(r"0([xXbBoO])([\dA-Fa-f]+)(?!\w)")
_PREFIXES = {"x": 16, "b": 2, "o": 8}


class NumberLexer:
    """A position in a text, from which numbers are read."""

    def __init__(self, text: str) -> None:
        self.text, self.position, self.tokens = text, 0, list[Token]()
        self.has_space, self.in_formula = False, False
        self.groups: list[str] = []  # what each open brace belongs to: "text", "font", "group"

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The match at this position, behind which the next step begins."""
        match = pattern.match(self.text, self.position)
        if match is not None and match.end() > self.position:
            self.position = match.end()
            return match
        return None

    def add(self, kind: Kind, text: str, **more: object) -> None:
        """Puts a token behind the others."""
        self.tokens.append(Token(kind, text, has_space=self.has_space, mode=self.mode, **more))  # type: ignore[arg-type]
        self.has_space = False

    @property
    def mode(self) -> Mode:
        """Where the next token stands."""
        if "text" in self.groups:
            return "text"
        return "formula" if self.in_formula else "bare"

    def number(self) -> bool:
        """Reads a number; False if none stands here."""
        if self._prefixed() or self._based():
            return True
        at = self.position
        if (match := self.match(_PERIODIC)) is not None and match[1]:
            self._periodic(match[1], match[2], match[3] or match[4] or match[5], match.group())
            return True
        self.position = at
        if (match := self.match(_REPEATED)) is not None:
            period = _PERIOD.fullmatch(match[2])
            if period is not None:
                self._periodic(match[1], period[1], period[2] or period[3], match.group())
                return True
            self.position = at
        if (match := self.match(_NUMBER)) is None:
            return False
        self._plain_number(match.group())
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
        if (ten := self.match(_TEN)) is not None and len(ten[1].lstrip("+-")) <= 3:
            if abs(int(ten[1])) > MAX_EXPONENT:
                raise Unreadable("an exponent that is too large")
            value, text = value * Fraction(10) ** int(ten[1]), f"{text}{ten.group()}"
        self.add("number", text, value=value)

    def _periodic(self, whole: str, fixed: str, period: str, written: str) -> None:
        once = int(f"0{whole}{fixed}")
        value = (once + Fraction(int(period), 10 ** len(period) - 1)) / 10 ** len(fixed)
        self.add("number", written, value=value)

    def _prefixed(self) -> bool:
        match = self.match(_PREFIXED)
        if match is None:
            return False
        self._with_base(match[2], _PREFIXES[match[1].lower()])
        return True

    def _based(self) -> bool:
        if "_" not in self.text[self.position : self.position + 60]:
            return False
        at, match = self.position, self.match(_BASED)
        named = (match[2] or match[3]) if match else ""
        if match is None or not (named.isdigit() or named in _BASE_NAMES):
            self.position = at
            return False
        base = int(named) if named.isdigit() else _BASE_NAMES[named]
        digits = match[1].replace(".", "")
        if match.group().count("(") != match.group().count(")") or match.group().count("{") != match.group().count("}"):
            self.position = at
            return False
        if not 2 <= base <= MAX_BASE or any(int(digit, 36) >= base for digit in digits):
            self.position = at
            return False
        self._with_base(match[1], base)
        return True

    def _with_base(self, written: str, base: int) -> None:
        whole, _, fraction = written.partition(".")
        if len(written) > MAX_DIGITS or any(int(digit, 36) >= base for digit in whole + fraction):
            raise Unreadable("digits of another base")
        value = Fraction(int(whole + fraction, base), base ** len(fraction))
        self.add("number", written.upper(), value=value, base=base)


def closing(tokens: Sequence[Token], start: int) -> int:
    """The index of the bracket that closes the one at ``start``. Raises Unreadable."""
    depth = 0
    for index in range(start, len(tokens)):
        kind = tokens[index].kind
        depth += (kind in ("open", "begin")) - (kind in ("close", "end"))
        if depth == 0:
            return index
    raise Unreadable("a bracket does not close")


def split(tokens: Sequence[Token], *signs: str) -> list[list[Token]]:
    """The pieces between these signs, outside of brackets."""
    pieces, depth = [list[Token]()], 0
    for token in tokens:
        depth += (token.kind in ("open", "begin")) - (token.kind in ("close", "end"))
        if depth == 0 and token.is_sign(*signs):
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def top(tokens: Sequence[Token]) -> list[Token]:
    """The tokens outside of brackets."""
    outer, depth = [], 0
    for token in tokens:
        depth += (token.kind in ("open", "begin")) - (token.kind in ("close", "end"))
        if depth == 0:
            outer.append(token)
    return outer


CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-", "＋": "+",
    "×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*", "÷": "/", "∕": "/", "⁄": "/", "／": "/",
    "≤": " \\le ", "⩽": " \\le ", "≥": " \\ge ", "⩾": " \\ge ", "≠": " \\ne ", "≈": " \\approx ", "≡": " \\equiv ",
    "±": " \\pm ", "∓": " \\mp ", "√": "\\sqrt ", "∛": "\\sqrt[3]", "∞": " \\infty ", "∅": " \\emptyset ",
    "∪": " \\cup ", "∩": " \\cap ", "∈": " \\in ", "∖": " \\setminus ", "⟨": "\\langle ", "⟩": "\\rangle ",
    "→": " \\to ", "⇒": " \\implies ", "⟹": " \\implies ", "⇔": " \\iff ", "∧": " \\land ", "∨": " \\lor ",
    "¬": "\\neg ",
    "∠": " \\angle ", "△": " \\triangle ", "∂": "\\partial ", "∇": "\\nabla ", "∫": "\\int ", "∑": "\\sum ",
    "∏": "\\prod ",
    "π": "\\pi ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",
    "…": "\\dots ", "⋯": "\\dots ", "′": "'", "″": "''", "’": "'", "‘": "'", "“": '"', "”": '"',
    "％": "%", "＝": "=", "＜": "<", "＞": ">", "（": "(", "）": ")", "，": ", ", "、": ", ", "．": ".", "。": ".",
    "：": ":", "；": ";", "？": "?", "！": "!", "［": "[", "］": "]", "｛": "{", "｝": "}", "￥": "¥", "µ": "μ",
    "\u2126": "\u03a9",
    "✓": "", "✔": "", "✅": "", "☑": "", "👉": "", "\ufe0f": "", "■": "", "□": "", "∎": "",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2002": " ", "\u2003": " ", "\u200a": " ", "\u3000": " ",
    "\u200b": "", "\ufeff": "", "\u2061": "", "\u2062": "", "\u2060": "", "₹": " rupee ", "¢": "¢",
}  # fmt: skip
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱˣ", "0123456789+-nix", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙᵢ", "0123456789+-ni", strict=True))

SPACES = frozenset(" ,;:>") | {"\n", "\t"}
"""Signs that make a space behind a backslash."""
WIDE = frozenset(("quad", "qquad"))
"""Spaces that may separate two statements."""
GAPS = frozenset(("enspace", "thinspace", "medspace", "thickspace", "space", "negthinspace", "hfill", "newline"))
IDLE = frozenset((
    "left", "right", "big", "bigl", "bigr", "Big", "Bigl", "Bigr", "bigg", "biggl", "biggr", "Bigg", "middle",
    "displaystyle",
    "textstyle", "scriptstyle", "limits", "nolimits", "bf", "it", "rm", "sf", "tt", "tiny", "small", "normalsize",
    "large",
    "Large", "LARGE", "huge", "Huge", "boldmath", "mathstrut", "strut", "nonumber", "notag", "blacksquare", "square",
    "Box", "qed", "checkmark", "hline", "centering", "therefore", "because",
))  # fmt: skip
"""Commands that change the look alone."""
HIDDEN = frozenset(
    ("color", "tag", "label", "phantom", "hphantom", "vphantom", "hspace", "vspace", "kern", "textcolor")
)
"""Commands whose first argument is not shown."""
FONTS = frozenset((
    "mathbf", "mathit", "mathsf", "mathtt", "mathcal", "mathscr", "mathfrak", "bm", "boldsymbol", "underline", "uline",
    "boxed", "fbox", "framebox", "ensuremath", "emph",
))  # fmt: skip
"""Commands whose argument is mathematics."""
TEXTS = frozenset((
    "text", "mbox", "hbox", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "textup", "mathrm",
    "operatorname",
    "textsl", "textsc", "rm", "unit", "si",
)) - {"rm"}  # fmt: skip
"""Commands whose argument is text."""
ACCENTS = frozenset(
    ("hat", "widehat", "tilde", "widetilde", "vec", "bar", "overline", "dot", "ddot", "dddot", "overrightarrow")
)
GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "varepsilon": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "vartheta": "θ", "iota": "ι", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ",
    "rho": "ρ",
    "sigma": "σ", "tau": "τ", "upsilon": "υ", "phi": "φ", "varphi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω",
    "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Xi": "Ξ", "Pi": "Π", "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ",
    "Omega": "Ω", "pi": "π", "ell": "ℓ", "hbar": "ħ", "imath": "i", "jmath": "j", "aleph": "ℵ", "infty": "∞",
    "emptyset": "∅", "varnothing": "∅", "O": "∅", "partial": "∂", "nabla": "∇",
}  # fmt: skip
"""Commands that are one letter or symbol."""
SIGNS = {
    "cdot": "*", "times": "*", "ast": "*", "star": "*", "div": "/", "slash": "/", "pm": "±", "mp": "∓",
    "le": "<=", "leq": "<=", "leqslant": "<=", "lt": "<", "ge": ">=", "geq": ">=", "geqslant": ">=", "gt": ">",
    "ne": "!=", "neq": "!=", "approx": "≈", "sim": "≈", "simeq": "≈", "approxeq": "≈", "cong": "≅", "propto": "∝",
    "equiv": "≡", "to": "→", "rightarrow": "→", "longrightarrow": "→", "mapsto": "→", "implies": "⇒", "Rightarrow": "⇒",
    "Longrightarrow": "⇒", "iff": "⇔", "Leftrightarrow": "⇔", "Longleftrightarrow": "⇔", "leftrightarrow": "⇔",
    "land": "∧", "wedge": "∧",
    "lor": "∨", "vee": "∨", "neg": "¬", "lnot": "¬", "cup": "∪", "bigcup": "∪", "cap": "∩", "bigcap": "∩",
    "setminus": "∖", "backslash": "∖", "in": "∈", "notin": "∉", "subset": "⊂", "subseteq": "⊆", "mid": "|", "vert": "|",
    "lvert": "|", "rvert": "|", "Vert": "‖", "lVert": "‖", "rVert": "‖", "ldots": "...", "dots": "...", "cdots": "...",
    "dotsc": "...", "dotsb": "...", "circ": "∘", "degree": "°", "deg": "°", "prime": "'", "textdegree": "°",
    "perp": "⊥", "parallel": "∥",
    "bmod": "mod", "mod": "mod", "pmod": "mod", "choose": "choose", "over": "over", "colon": ":", "percent": "%",
    "textdollar": "$", "euro": "€", "pounds": "£", "top": "⊤", "intercal": "⊤", "angle": "∠", "measuredangle": "∠",
    "triangle": "△",
    "quad": "quad", "qquad": "quad",
}  # fmt: skip
BRACKETS = {
    "{": "{", "}": "}", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "langle": "⟨", "rangle": "⟩",
    "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "lparen": "(", "rparen": ")",
}  # fmt: skip
"""Commands that are brackets which are seen; a bare brace only groups."""
ESCAPED = {"%": "%", "$": "$", "&": "&", "#": "#", "_": " "}
FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "coth",
    "ln",
    "log", "lg", "exp", "cis", "max", "min", "gcd", "lcm", "det", "arg", "Re", "Im", "sgn", "tr", "dim", "ker",
))  # fmt: skip
"""Functions that are known by a name of several letters, in LaTeX and in plain text."""
SAME_FUNCTION = {
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "lg": "log",
    "tg": "tan",
    "ctg": "cot",
    "cosec": "csc",
    "arctg": "arctan",
}
OPERATORS = {"int": "int", "iint": "iint", "iiint": "iiint", "oint": "oint", "sum": "sum", "prod": "prod", "lim": "lim"}
BUILDERS = frozenset(("frac", "dfrac", "tfrac", "cfrac", "sqrt", "binom", "dbinom", "tbinom"))
SETS = {"R": "ℝ", "Z": "ℤ", "N": "ℕ", "Q": "ℚ", "C": "ℂ"}

PLAIN = {
    "pi": "π", "infinity": "∞", "inf": "∞", "theta": "θ", "alpha": "α", "beta": "β", "lambda": "λ", "phi": "φ",
    "omega": "ω",
}  # fmt: skip
"""Words of plain text that are one symbol."""
UNIT_VECTORS = {"i": "î", "j": "ĵ", "k": "k̂"}


def translation() -> dict[int, str]:
    """The table by which single characters are rewritten: signs, digits of every script, fractions."""
    table = {ord(sign): same for sign, same in CHARACTERS.items()}
    table |= {ord(sign): "" for sign in "\u200e\u200f"}
    for code in (*range(0x00BC, 0x00BF), *range(0x2150, 0x215F)):
        top, slash, bottom = unicodedata.normalize("NFKC", chr(code)).partition("\u2044")
        if slash and bottom:
            table[code] = rf"\frac{{{top}}}{{{bottom}}}"
    return table
