"""The last number or formula of a text without marks, for recipes that ask for prose by name."""

from __future__ import annotations

import itertools
import re

from oncurve.rewards.grammar.forms import read_amounts, read_date
from oncurve.rewards.grammar.lexemes import Token, Unreadable
from oncurve.rewards.grammar.lexer import tokenize
from oncurve.rewards.grammar.preparation import CARDINALS, FACTORS
from oncurve.rewards.statement import DENIED, MARKUP, MAX_CLAUSE_CHARACTERS, REFUSED, formulas, is_computation

_DOUBTED = re.compile(
    r"(?:\b(?:no|non|не)\s+(?:es|son|è|é|sono|были)|(?:\b(?:not|cannot|never|nicht|keine?|pas|не)|n['’]t)(?:\s+(?:be|equal(?:\s+to)?))?|不是|except|exceed|wrong:?"
    r"|\b(?:about|approximately|around|roughly|nearly|almost|maybe|perhaps|possibly|probably|more than|less than"
    r"|(?:could|might|may) be))[\s:$]*$",
    re.IGNORECASE,
)
_NOT_BUT = re.compile(r"\bnot\s+\S+\s+but\s+", re.IGNORECASE)
_BETWEEN = re.compile(r"[\s$]*(?:,|;|(?:,\s*)?(?:and|or)|&)[\s$]*")
_MULTIPLIER = re.compile(rf"(?:{'|'.join(FACTORS)}|percent|a\.?m\.?|p\.?m\.?)[.,;:?]?", re.IGNORECASE)
_STEP_NAMES = frozenset(
    [
        "step",
        "equation",
        "eq",
        "eq.",
        "part",
        "figure",
        "line",
        "case",
        "method",
        "section",
        "table",
        "page",
        "example",
        "note",
    ]
)
"""Words whose number names a place in the text."""
_OF_WHAT = frozenset(
    ["in", "of", "for", "from", "per", "after", "every", "with", "than", "on", "at", "by", "over", "within", "during"]
)
"""Words before a number that is no result: it says in, of or for what the result is."""
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_CITATION = re.compile(r"\[\d{1,3}\]")
_WORD = re.compile(r"[a-zA-Z]{2,}")
_FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan)|ln|log|exp|sqrt|pi|mod")
_ENVIRONMENT = re.compile(r"\\begin\{(align|aligned|equation|gather|cases)\*?\}(.+?)\\end\{\1\*?\}", re.DOTALL)
MIN_LISTED = 5
"""So many numbers in a row are a listing and no answer."""


def last_expression(text: str) -> str | None:
    r"""The last whole expression of a text: a formula between delimiters, or the numbers, signs and letters around the
    last number; never a piece of one. A sum or product of numbers that nobody has worked out, such as the question's,
    is none; nor is one that is asked, "20?", denied, "not 20", or rounded, "about 20".

    >>> [last_expression(text) for text in (r"It is $\frac{1}{2}$.", "So 2x+3", "It costs $1,250.50 in total.")]
    ['\\frac{1}{2}', '2x+3', '$1,250.50']
    """
    text = text[-MAX_CLAUSE_CHARACTERS:]
    if (table := _last_environment(text)) is not None:
        return table
    text = re.sub(r"(?<=[：是は은는])(?=[-$\d])", " ", MARKUP.sub("", text)).rstrip()
    text = _NOT_BUT.sub("", REFUSED.sub("", _CITATION.sub("", text)))  # 36, not 35
    text = re.sub(r"^\s*\|.*", lambda row: row.group().replace("|", "\n"), text, flags=re.MULTILINE)  # cells of a table
    text = text.replace("```", " ").replace('"', " ").replace("\\blacksquare", "")
    text = re.sub(r"\$\s*\$", "", text)
    text = re.sub(r"[{}]", " ", text) if re.fullmatch(r"\s*\{[^{}\\]*\}\s*", text) and ":" in text else text
    spans = formulas(text)
    behind = text[spans[-1][1] :] if spans else text
    bare = _last_run(behind)
    if bare:
        before, _, after = text.rpartition(bare)
        return None if is_computation(bare) or _is_doubted(before, after) else bare
    if not spans:
        return None
    if is_computation(spans[-1][2]) or _is_doubted(text[: spans[-1][0]], behind):
        return None
    return _listed(text, spans, behind)


def last_number(text: str) -> str | None:
    """The last number of a text, in digits and without signs of currency, percent or thousands; None if there is none.

    That is how courses and many published figures of GSM8K read an answer (CS336 (2025), assignment 5). It takes
    whatever number comes last, so no reward of a recipe reads like this.

    >>> [last_number(text) for text in ("so 48+24 = 72 clips", "It costs $1,250.50.", "from 3 to -4", "none")]
    ['72', '1250.50', '-4', None]
    """
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def _last_environment(text: str) -> str | None:
    """A table of equations at the end of a text."""
    matches = list(_ENVIRONMENT.finditer(text))
    if matches and not any(sign.isalnum() for sign in text[matches[-1].end() :]):
        return matches[-1].group()
    return None


def _listed(text: str, spans: list[tuple[int, int, str]], behind: str) -> str | None:
    """The last formula with the unit behind it and those that are listed before it."""
    unit = re.match(r"\s*(?:\\?%|" + _MULTIPLIER.pattern + r")", behind, re.IGNORECASE)
    listed = [spans[-1][2] + (f" {unit.group().strip()}" if unit else "")]
    for left, right in zip(spans[-2::-1], spans[:0:-1], strict=True):
        if not _BETWEEN.fullmatch(text[left[1] : right[0]]) or _is_doubted(text[: left[0]], ""):
            break
        listed.insert(0, left[2])
    return ", ".join(listed)


def _is_doubted(before: str, after: str) -> bool:
    """An expression is denied, rounded or asked by what stands directly around it."""
    return _DOUBTED.search(before[-40:]) is not None or after.lstrip().startswith("?")


def _last_run(text: str) -> str | None:
    """The words around the last number that are mathematics."""
    for line in reversed(text.splitlines()):
        words = line.split()
        last = next((index for index in range(len(words) - 1, -1, -1) if _has_number(words, index)), None)
        if last is not None:
            last = _result(words, last)
            is_share = re.search(r"\d (?:in|out of|of)$", " ".join(words[max(last - 3, 0) : last])) is not None
            return _amount_or_date(words, last) or (None if is_share else _run(words, last))
        if (number := _in_words(words)) is not None:
            return number
    return None


def _in_words(words: list[str]) -> str | None:
    """The last number in words of a line, if it has one alone."""
    plain = [word.lower().strip(".,;:!?") for word in words]
    indices = [
        index
        for index, word in enumerate(plain)
        if word and all(part in CARDINALS or part in FACTORS for part in word.split("-"))
    ]
    indices = [index for index in indices if plain[index] not in ("one", "zero")]
    if not indices:
        return None
    start = indices[0]
    is_single = all(second - first == 1 for first, second in itertools.pairwise(indices))
    return " ".join(plain[start : indices[-1] + 1]) if is_single else None


def _result(words: list[str], last: int) -> int:
    """The index of the result of the last equation, if what follows it only says of what: 9 of ``4+5=9 in the 40
    minutes``; else the last number."""
    begins = next((index for index in range(last - 1, -1, -1) if words[index].endswith((".", "?", "!", ";"))), -1)
    equal = next((index for index in range(last - 1, begins, -1) if "=" in words[index]), None)
    if equal is None:
        return last
    result = next((index for index in range(equal, last + 1) if re.search(r"=.*\d|^[^=]*\d", words[index])), last)
    between = [word.lower() for word in words[result + 1 : last]]
    return result if between and not between[-1].endswith(",") and _OF_WHAT.intersection(between[-2:]) else last


def _has_number(words: list[str], index: int) -> bool:
    """A word has a digit that numbers no step or equation."""
    named = index > 0 and words[index - 1].lower().lstrip("(") in _STEP_NAMES
    return any(sign.isdecimal() for sign in words[index]) and not (
        named and re.fullmatch(r"\(?\d+\)?[.:,)]*", words[index])
    )


def _amount_or_date(words: list[str], index: int) -> str | None:
    """An amount in several units, or a date with its month, that ends with a number."""
    for start in range(max(index - 4, 0), index):
        amount = " ".join(words[start : index + 2]).rstrip(".,;:")
        day = " ".join(words[start : index + 1]).rstrip(".,;:")
        if read_amounts(_tokens(amount)) is not None:
            return amount
        if read_date(_tokens(day)) is not None:
            return day
    return None


def _tokens(text: str) -> list[Token]:
    try:
        return tokenize(text)
    except Unreadable:
        return []


def _run(words: list[str], index: int) -> str | None:
    start = end = index
    while start > 0 and not words[start - 1].endswith((".", ":", "?", "。", "：")) and (
        _is_mathematics(words[start - 1])
        or (words[start - 1].lower() in ("and", "or") and start > 1 and _is_mathematics(words[start - 2]))
    ):  # fmt: skip
        if words[start - 1].endswith(",") and _WORD.search(words[start - 1]):
            break
        start -= 1
    while end + 1 < len(words) and (
        _MULTIPLIER.fullmatch(words[end + 1])
        or (_is_mathematics(words[end + 1]) and not words[end].endswith((",", ".", ";")))
    ):
        end += 1
    run = " ".join(words[start : end + 1])
    run = re.sub(r"^(?:and|or)\s+|^[A-Za-z]+:(?=.*\d)", "", run, flags=re.IGNORECASE).rstrip(".,;:?")
    if re.match(r"[-+*/×=]\s.*=|=\s", run) and (result := run.rpartition("=")[2].strip()):
        run = result  # the end of an equation whose beginning has words in it
    while run.count("(") < run.count(")") and run.endswith(")"):
        run = run[:-1]
    while run.startswith("(") and run.count("(") > run.count(")"):
        run = run[1:]
    is_listing = len(run.split()) >= MIN_LISTED and all(part.isdigit() for part in run.split())
    return None if is_listing or not run or DENIED.search(run) else run


def _is_mathematics(word: str) -> bool:
    """Digits, signs, single letters, commands, functions; not a word of a language."""
    letters = _WORD.findall(re.sub(r"\\[a-zA-Z]+", "", word))
    if word.lower() in ("a", "i", "-", "–", "—", "i'm"):
        return word in ("-", "–") or word == "i"
    return bool(re.search(r"[\d=+*/^<>\\{}()|]|^.$", word.strip(".,;:"))) and all(
        _FUNCTION.fullmatch(piece) for piece in letters if not any(sign.isdigit() for sign in word)
    )
