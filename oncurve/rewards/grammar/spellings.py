"""Spellings of mathematics in Unicode, LaTeX and plain text, and the sign that each of them stands for."""

from __future__ import annotations

import unicodedata

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
