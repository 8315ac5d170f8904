"""Normalization of answers in LaTeX, before anything is compared."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_TIDIED_CHARACTERS = 2_000
"""A longer text is no answer and is left as it is."""
UNBALANCED = 10**9
"""The nesting of brackets that do not close."""

_SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-",
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
        "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "√": r"\sqrt ", "∅": r"\emptyset ",
        "⟨": r"\langle ", "⟩": r"\rangle ", "→": r"\to ", "⇒": r"\Rightarrow ", "∠": r"\angle ", "△": r"\triangle ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ",
        "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
        "⁰": "^0", "¹": "^1", "²": "^2", "³": "^3", "⁴": "^4", "⁵": "^5", "⁶": "^6", "⁷": "^7", "⁸": "^8", "⁹": "^9",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}",
        "⅙": r"\frac{1}{6}", "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}",
        "⅞": r"\frac{7}{8}",
        "％": "%", "＝": "=", "（": "(", "）": ")", "，": ",", "．": ".", "。": ".", "：": ":",
        "✓": "", "✔": "", "✅": "", "☑": "", "\ufe0f": "",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "\ufeff": "", "\u2061": "", "\u2062": "",
    }
    | {chr(0xFF10 + digit): str(digit) for digit in range(10)}
)  # fmt: skip

_CHINESE_NUMBERS = "万亿千百十分点半倍零一二两三四五六七八九"
_SAME = (  # patterns and what they are the same as
    (r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|biggl?|biggr?|middle)(?![a-zA-Z])\.?", ""),
    (r"\\(?:displaystyle|textstyle|limits|nolimits|bf|it|rm|tiny|small|large|Large|LARGE|huge|Huge)(?![a-zA-Z])", ""),
    (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    *2 * ((r"\\u(?:nder)?line\s*\{([^{}]*)\}", r"\1"),),
    (rf"^(-?\d[\d.,]*)\s*(?!.*[{_CHINESE_NUMBERS}])[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]{{1,8}}$", r"\1"),
    (r"^(\\?[$€£]\d[\d.,]*)\s*(?:([kK])|M)$", lambda match: f"{match[1]} {'thousand' if match[2] else 'million'}"),
    (r"^₹\s*(\d[\d.,]*)$", r"\1 rupees"),
    (r"^[¥￥]\s*(\d[\d.,]*)$", r"\1 yen"),
    (r",\\!\s*|\{,\}(?=\d{3})", ","),
    (r"(?<=\d)\{,\}(?=\d)", "."),
    (r"(?<!\\)\\[!,;:> ]|\\(?:quad|qquad|enspace|thinspace)(?![a-zA-Z])|~", " "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\mathb[bf]\s*(?:\{\s*R\s*\}|R(?![a-zA-Z]))|\\R(?![a-zA-Z])|ℝ", r"\\mathbb{R}"),
    (r"\\(?:mathrm|operatorname|text|mathit)\s*(?:\{\s*([ei])\s*\}|(?<=[a-z] )([ei])(?![a-zA-Z]))", r" \1\2 "),
    (r"\\(?:mathrm|operatorname|text)\s*\{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp)\s*\}", r"\\\1 "),
    (r"\\(?:vec|hat|mathbf)\s*(?:\{\s*([ijk])\s*\}|\{?\s*\\([ij])math(?![a-zA-Z])\s*\}?)", r" \1\2 "),
    (r"\\(?:mbox|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathit|mathsf|bm|boldsymbol|operatorname)(?![a-zA-Z])",
     r"\\text"),
    (r"\\leq(?:slant)?(?![a-zA-Z])", r"\\le"),
    (r"\\geq(?:slant)?(?![a-zA-Z])", r"\\ge"),
    (r"\\ne(?![a-zA-Z])", r"\\neq"),
    (r"\\(?:degree|deg)(?![a-zA-Z])|\^\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])", r"^{\\circ}"),
    (r"\\(?:varnothing|O)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
    (r"\\(?:lbrace|\{)", r"\\{"),
    (r"\\(?:rbrace|\})", r"\\}"),
    (r"\\lbrack", "["),
    (r"^<([^<>=|]*,[^<>=|]*)>$", r"\\langle \1\\rangle "),
    (r"\\(?:rightarrow|longrightarrow)(?![a-zA-Z])", r"\\to"),
    (r"\\(?:implies|Longrightarrow)(?![a-zA-Z])", r"\\Rightarrow"),
    (r"\\(?:iff|Longleftrightarrow)(?![a-zA-Z])", r"\\Leftrightarrow"),
    (r"\\(?:lnot|neg)(?![a-zA-Z])", r"\\neg"),
    (r"^(?:\\text\s*\{\s*)?(angle|triangle)\s*\}?\s+(?=[A-Z]{1,3}$)", r"\\\1 "),
    (r"(?<![\w.])(\d+)\s*(?:\\text\s*\{\s*choose\s*\}|\\?choose)\s*(\d+)(?![\w.])", r"\\binom{\1}{\2}"),
    (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
    (r"(?<![\w\\}])(?:nCr|C)\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)", r"\\binom{\1}{\2}"),
    (r"(?:\{\s*\}\s*|(?<![\w})]))[_^](?:\{(\d+)\}|(\d))\s*C\s*_(?:\{(\d+)\}|(\d))", r"\\binom{\1\2}{\3\4}"),
    (r"(?<![\w.}])(\d+)C_?(\d+)(?!\w)", r"\\binom{\1}{\2}"),
    (r"(?<![\w\\}])(?:nPr|P)\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)", r"\\frac{\1!}{(\1-\2)!}"),
    (r"(?:\\text\s*\{\s*(gcd|lcm|max|min)\s*\}|\\?(?<![a-zA-Z])(gcd|lcm|max|min))\s*(?=\(|\\\{)", r"\\\1\2"),
    (r"\\rbrack", "]"),
    (r"\\(overline|bar|dot)\s*(\d)", r"\\\1{\2}"),
    (r"\\log\s*_\s*(?:\{\s*e\s*\}|e(?![a-zA-Z]))", r"\\ln "),
    (r"(\\(?:sin|cos|tan|cot|sec|csc|ln)(?:\s*\^\s*(?:\{\d\}|\d))?)\s*(\d*(?:[a-z]|\\[a-z]+))\s*/\s*(?=\\(?:sin|cos|tan|cot|sec|csc|ln))",
     r"\1(\2)/"),
    (r"\*\*(?=\s*[\d({-])", "^"),
    (r"\\text\s*\{\s*infinity\s*\}", "infinity"),
    (r"(?<![a-zA-Z\\])(pi|infinity)(?![a-zA-Z])", lambda match: "\\pi " if match[1] == "pi" else "\\infty "),
    (r"(?<=[\d%])\s*--\s*(?=[\d$\\])", "-"),
    (r"\\text\s*\{([^{}]*?\S),?\s+(and|or)\s*\}", r"\\text{\1} \2 "),
    (r"\\text\s*\{\s*([-+$\d(\\][^{}]*\d[^{}]*|\d|[^{}]*[a-z:]\s+\$?\d[^{}]*)\}", r"\1"),
    (r"\{([^{}]*?)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"^\\text\s*\{\s*[bB]oth\s+([^{}]*\sand\s[^{}]*)\}$|^[bB]oth\s+(?=\S.*\sand\s)", r"\1"),
    (r"^(?:minus|negative)\s+(?=\d)", "-"),
    (r"^(\d+(?:\.\d+)?\b[^\d]{0,20}?)\s+below zero$", r"-\1"),
    (r"^(\d+(?:\.\d+)?)\s+(?:(squared)|cubed)$", lambda match: f"{match[1]}^{2 if match[2] else 3}"),
    (r"^half an?\s+(?=[a-z]+$)", r"\\frac{1}{2} "),
)  # fmt: skip
_SAME_COMPILED = tuple((re.compile(pattern), same) for pattern, same in _SAME)

_COMMAND = re.compile(r"\\(frac|sqrt|binom)(?![a-zA-Z])")
_PLAIN_ROOT = re.compile(r"(?<![a-zA-Z\\])sqrt(?=\s*[({])")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))


def tidy(answer: str) -> str:
    r"""The same mathematics in one spelling: ASCII and LaTeX signs, full fractions, no spacing macros.

    >>> tidy(r"$\dfrac12\,$.")
    '\\frac{1}{2}'
    """
    if len(answer) > MAX_TIDIED_CHARACTERS:
        return answer
    answer = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", answer).translate(_SIGNS).strip()
    answer = unwrap(answer)
    for pattern, same in _SAME_COMPILED:
        answer = pattern.sub(same, answer)
    answer = _PLAIN_ROOT.sub(r"\\sqrt", answer)
    return " ".join(unwrap(_brace_arguments(answer)).split())


def _brace_arguments(text: str) -> str:
    r"""The text with every argument of a fraction, binomial or root in braces: ``\frac12`` becomes ``\frac{1}{2}``."""
    for match in reversed(list(_COMMAND.finditer(text))):
        place, arguments = match.end(), ""
        if match.group(1) == "sqrt" and text[place : place + 1] == "[":
            closing = text.find("]", place) + 1
            place, arguments = (closing, text[place:closing]) if closing else (place, "")
        for _ in range(1 if match.group(1) == "sqrt" else 2):
            argument, place = _argument(text, place, takes_parentheses=match.group(1) == "sqrt")
            arguments += f"{{{argument}}}"
        text = text[: match.end()] + arguments + text[place:]
    return text


def _argument(text: str, place: int, *, takes_parentheses: bool) -> tuple[str, int]:
    """The next argument as LaTeX reads it, without its braces, and the place after it."""
    while text[place : place + 1] == " ":
        place += 1
    if text[place : place + 1] == "{" or (takes_parentheses and text[place : place + 1] == "("):
        for end, depth in bracket_depths(text[place:]):
            if depth == 0 and end > 0:
                return text[place + 1 : place + end], place + end + 1
    command = re.compile(r"\\[a-zA-Z]+(?:\{[^{}]*\})*|[\s\S]").match(text, place)
    return (command.group(), command.end()) if command else ("", place)


_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PLAIN_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}(?![a-zA-Z])")


def formulas(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of everything between delimiters of mathematics; two amounts in dollars are none.

    >>> formulas("It is $x$, for $5 and not $6")
    [(6, 9, 'x')]
    """
    found, place = [], 0
    while (match := _FORMULA.search(text, place)) is not None:
        content = next(group for group in match.groups() if group is not None)
        around = re.sub(r"\\text\s*\{[^{}]*\}", "", content)
        is_money = match[2] is not None and content[0].isdigit() and _PLAIN_WORD.search(around) is not None
        place = match.start() + 1 if is_money else match.end()
        if not is_money:
            found.append((match.start(), match.end(), content.strip()))
    return found


def unwrap(answer: str) -> str:
    """The answer without mathematics delimiters, bold marks, quotes and closing punctuation around it."""
    before = None
    while before != answer:
        before = answer
        answer = answer.strip()
        if answer.endswith((".", ";", ":", ",", "\\")) and not answer.endswith(("\\;", "\\:", "\\,", "..", "\\\\")):
            answer = answer[:-1].rstrip()
        for left, right in _WRAPPERS:
            inner = answer[len(left) : -len(right)]
            if len(answer) > len(left) + len(right) and answer.startswith(left) and answer.endswith(right):
                answer = inner if left not in inner and right not in inner else answer
    return answer


def compact(answer: str) -> str:
    """A tidied answer without idle spaces: two answers with the same compact form are the same string of signs."""
    spaced = re.sub(r"\\text\{\s*([^{}]*?)\s*\}", r"\\text{\1}", answer)
    return re.sub(r"((?:\\[a-zA-Z]+|\d)) (?=[a-zA-Z\d])|\s+", lambda match: f"{match[1]} " if match[1] else "", spaced)


def split_top(text: str, separator: str = ",") -> list[str]:
    r"""The pieces between separators that stand in no bracket.

    >>> split_top(r"(1,2), \frac{a,b}{c}, 3")
    ['(1,2)', '\\frac{a,b}{c}', '3']
    """
    pieces, start = [], 0
    for place, depth in bracket_depths(text):
        if depth == 0 and text[place] == separator:
            pieces.append(text[start:place].strip())
            start = place + 1
    return [*pieces, text[start:].strip()]


def bracket_depths(text: str) -> Iterator[tuple[int, int]]:
    """Every place of a text with the number of brackets of any kind that are open there."""
    depth = 0
    for place, sign in enumerate(text):
        if sign in ")]}":
            depth -= 1
        yield place, depth
        if sign in "([{":
            depth += 1


def nesting(text: str) -> int:
    """The greatest number of brackets that are open at once, or ``UNBALANCED`` if one of them lacks its partner."""
    deepest, last = 0, 0
    for _, depth in bracket_depths(text + " "):
        deepest, last = max(deepest, depth), depth
        if depth < 0:
            return UNBALANCED
    return deepest if last == 0 else UNBALANCED
