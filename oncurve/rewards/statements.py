"""The statement of a sentence: the last formula, the only number, words, the answer of a solution."""

from __future__ import annotations

import re

from oncurve.rewards.answers import after_hash, last_boxed
from oncurve.rewards.doubt import BOUNDED, ROUNDED, UNSURE
from oncurve.rewards.latex import formulas, split_top, tidy
from oncurve.rewards.quantities import MAX_NUMBER_CHARACTERS, NUMBER_WORDS, Quantity, number_in_words, read_quantity
from oncurve.rewards.shapes import joins, with_commas
from oncurve.rewards.units import read_unit

CHOICE = re.compile(r"\(?\s*(?:\\text\{\s*)?\(?\s*([A-J])\s*\)?\s*\}?\s*\)?\.?")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_REASONED = re.compile(
    r"(yes|no|true|false)\s*[,.;:]\s(?!.*(?<![a-z])(?:yes|no|true|false|but|or|"
    rf"{UNSURE}|unless|if|sometimes|depends|although|though|however)(?![a-z])).*",
    re.DOTALL,
)
_ARTICLE = re.compile(r"^(?:the|an?) ")
_WORDS = re.compile(r"[^\W\d_][^\W\d_'’\-. ]*(?:[ '’\-.][^\W\d_]+)*\.?")
_DOUBT = re.compile(
    rf"(?<![a-zA-Z])(?:or|either|{UNSURE}|{ROUNDED}|approx|{BOUNDED}"
    r"|not|isn't|between|at least|at most|unless|unsure|guess|ish"
    r"|(?<!add )(?<!adds )(?<!sum )(?<!sums )up to)(?![a-zA-Z])",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    rf"{_DOUBT.pattern}"
    r"|\\lor|\\vee|\\implies|\\Rightarrow|\\approx|\\sim(?![a-z])|~|≈|\?|\\[lcd]?dots|\.\.\.|…",
    re.IGNORECASE,
)
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_MATHEMATICS = re.compile(r"\\(?!\$|%|text)|[\^_{}]")
_NUMBER_IN_PROSE = re.compile(
    r"(?<![\w.])[-+]?\\?[$€£]?-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?<=\d)(?:/\d+)?(?:\s?\\?%)?"
)
_COMPUTES = re.compile(
    r"(?<![a-z])(?:twice|thrice|double|triple|times|minus|negative|plus|(?:half|third|quarter|fourth|root|square|cube"
    r"|reciprocal|opposite|negation|logarithm)(?: of)?)(?: the)?(?: number)?\s*$",
    re.IGNORECASE,
)
"""Words before a number that make another one of it."""
_COMPUTED = re.compile(
    rf"\s*[-+*/^!(\[]|[a-zA-Z]|\s+(?:squared|cubed|factorial|and (?:{'|'.join(NUMBER_WORDS)}))(?![a-z])"
)
"""The same behind a number, or a number in words that is added to it."""
_RESTATED = re.compile(r"(.*\S)\s*\(\s*([a-zA-Z -]+)\s*\)", re.DOTALL)
_WORDED = re.compile(r"([a-zA-Z -]+?)\s*\(\s*([^()]*\d[^()]*)\)")
_SENTENCE = re.compile(r"[.;:]\s+[A-Z]|\n")
_LEAD = re.compile(
    r"^\s*(?:there (?:are|were)|(?:the )?answers (?:is|are)|we get|they are)[:\s]+(?=[\d$\\])", re.IGNORECASE
)
_BOLD = re.compile(r"(?<![\w)\]}])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w({\[])", re.DOTALL)
_INTEGERS = re.compile(
    r"[,;]?\s*\(?\s*(?:\\text\s*\{\s*)?(?:(?:where|for|with)\s+)?(?:(?:all|any|some|every|each)\s+)?"
    r"(?:integers?\s*\}?\s*\$?\s*([a-zA-Z])|\}?\s*\$?\s*([a-zA-Z])\s*\$?\s*"
    r"(?:(?:\\in(?![a-zA-Z])|∈)\s*(?:\\mathbb\s*\{?\s*Z\s*\}?|\\Z|ℤ|Z)|(?:\\text\s*\{\s*)?is an(?:y)? integer\s*\}?))"
    r"\s*\$?\s*\)?\.?\s*$"
)
_NO_LIMIT = re.compile(r"dne|(?:the |this )?(?:limit )?(?:does not|doesn['’]t) exist|no limit")
_SHORT_WORDS = frozenset(("go", "in", "no", "on", "up"))
"""Answers of two letters that are words and no products of two variables."""
MAX_REFERENCE_WORDS = 12
"""A reference with more words around its mathematics is a whole solution, whose answer nobody marked."""


def read_reference(text: str) -> str | None:
    r"""The answer in a reference: what a solution boxes or puts behind its last ``####``; None if it marks nothing.

    >>> read_reference(r"Since $3^2=9$, it is $\boxed{9}$.")
    '9'
    """
    marked = last_boxed(text) or (after_hash(text) if re.search(r"(?m)^####(?!#)", text) else None)
    if marked is not None or not re.search(r"\d|\\", text):
        return marked or text
    words = re.findall(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}", re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", _outside(text)))
    if len(words) > MAX_REFERENCE_WORDS or (len(words) > 4 and _SENTENCE.search(text.strip())):
        return None
    return text


def _outside(text: str) -> str:
    """The text around its formulas."""
    for start, end, _ in reversed(formulas(text)):
        text = f"{text[:start]} {text[end:]}"
    return re.sub(r"\\(?!text)[a-zA-Z]+", " ", text)


def stated(candidate: str, gold: str) -> str:
    """The last formula of a sentence with the unit behind it; any other text as it is, without marks of emphasis."""
    candidate = _LEAD.sub("", _BOLD.sub(r"\1", candidate))
    candidate = _once(candidate)
    found = formulas(candidate)
    around = _outside(candidate)
    if not found or not _PROSE.search(around):
        return candidate
    if not _PROSE.search(with_commas(around)):  # a list of formulas
        return re.sub(r"\$|\\[()\[\]]", "", candidate)
    if _HEDGE.search(around) and not _HEDGE.search(gold):
        return ""
    _, end, content = found[-1]
    behind = candidate[end:].strip(" .")
    unit = read_unit(f" {behind}") if behind and behind[0].isalpha() else None
    return content + (rf" \text{{ {behind} }}" if unit else "")


def _once(answer: str) -> str:
    """The figures of a number that is also given in words: "7" of "7 (seven)" and of "seven (7)"."""
    for pattern, figures, words in ((_RESTATED, 1, 2), (_WORDED, 2, 1)):
        match = pattern.fullmatch(answer.strip())
        number = number_in_words(match[words]) if match else None
        said = read_quantity(tidy(match[figures])) if match and number is not None else None
        if match and said is not None and said.value == number:
            return match[figures]
    return answer


def without_integers(candidate: str, gold: str) -> tuple[str, str]:
    r"""Both without a closing "where k is an integer", and the letter of the reference in both.

    >>> without_integers(r"n\pi, n\in\mathbb{Z}", r"\pi k for any integer k")
    ('k\\pi', '\\pi k')
    """
    texts, letters = [], []
    for text in (candidate, gold):
        match = _INTEGERS.search(text)
        letter = (match[1] or match[2]) if match else None
        rest = text[: match.start()] if match else text
        if letter is None or not re.search(rf"(?<![a-zA-Z\\]){letter}(?![a-zA-Z])", rest):
            letter, rest = None, text
        texts.append(rest + "$" if rest.count("$") % 2 > text.count("$") % 2 else rest)
        letters.append(letter)
    own, wanted = letters
    if own and wanted and not re.search(rf"(?<![a-zA-Z\\]){wanted}(?![a-zA-Z])", texts[0]):
        texts[0] = re.sub(rf"(?<![a-zA-Z\\]){own}(?![a-zA-Z])", wanted, texts[0])
    return texts[0], texts[1]


def is_prose(answer: str) -> bool:
    """Whether a text has words and no mathematics but numbers."""
    return _PROSE.search(answer) is not None and _MATHEMATICS.search(answer) is None


def number_in_prose(answer: str) -> Quantity | None:
    """The only number of a sentence; None if there are several or the sentence does not commit to it."""
    if _HEDGE.search(answer) or len(answer) > MAX_NUMBER_CHARACTERS:
        return None
    numbers = list(_NUMBER_IN_PROSE.finditer(answer))
    if len(numbers) != 1 or any(sign.isdigit() for sign in _NUMBER_IN_PROSE.sub("", answer)):
        return None
    before, number, after = answer[: numbers[0].start()], numbers[0].group().strip(), answer[numbers[0].end() :]
    if re.search(r"[-a-zA-Z*/+^(]$|[-*/+^(]\s$", before.removesuffix("**")) or _COMPUTES.search(before):
        return None
    if _COMPUTED.match(after.removeprefix("**")):
        return None
    unit = re.match(r"\s*[a-zA-Z]*", after)
    return read_quantity(number + (unit.group() if unit else "")) or read_quantity(number)


def plain_words(answer: str) -> str | None:
    """The words of an answer that is nothing but words, in lower case; None for mathematics."""
    text = _TEXT.sub(r"\1", answer).strip()
    is_product = len(text) == 2 and "\\text" not in answer and text.islower() and text not in _SHORT_WORDS
    if len(text) < 2 or is_product or not _WORDS.fullmatch(text):
        return None
    return _same_phrase(text.casefold().rstrip("."))


def _same_phrase(words: str) -> str:
    return "does not exist" if _NO_LIMIT.fullmatch(words) else words


def same_words(candidate: str, gold: str) -> bool:
    """Whether an answer is the words of the reference, without case, article and final stop.

    A "yes" or "no" may have its reason behind it.
    """
    text = _TEXT.sub(r"\1", candidate).strip(" .!").casefold()
    if verdict := _REASONED.fullmatch(text):
        text = verdict[1]
    text = _same_phrase(text)
    return text == gold or _ARTICLE.sub("", text) == _ARTICLE.sub("", gold)


def is_doubted(candidate: str, gold: str) -> bool:
    """The answer says in a word that it does not commit to its number, and the reference does not."""
    return _DOUBT.search(candidate) is not None and _DOUBT.search(gold) is None


def is_hedged(candidate: str, gold: str) -> bool:
    """The answer names more than it commits to, and the reference does not."""
    has_several = len(split_top(gold)) > 1 or r"\pm" in gold or joins(gold) or gold.startswith(r"\{")
    text = with_commas(candidate) if has_several else candidate
    return _HEDGE.search(text) is not None and _HEDGE.search(gold) is None
