"""Words in answers: hedges, clauses behind a value, and answers that are words themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from oncurve.rewards.grammar.lexemes import FUNCTIONS, Token, Unreadable, closing
from oncurve.rewards.grammar.values import Value, Words

_HEDGES = frozenset((
    "either", "neither", "nor", "maybe", "perhaps", "possibly", "probably", "about", "approximately", "approx",
    "around",
    "roughly", "nearly", "almost", "not", "cannot", "never", "unless", "unsure", "guess", "ish", "between", "except",
    "if", "isn", "doesn", "don", "nicht", "kein", "keine", "pas", "не", "kaum", "anything", "unknown", "else",
    "some", "any", "wrong", "incorrect", "mistaken",
))  # fmt: skip
"""Words by which a text does not commit to the number beside them."""
_BOUNDS = {
    ("at", "least"): ">=", ("no", "less", "than"): ">=", ("no", "fewer", "than"): ">=", ("more", "than"): ">",
    ("greater", "than"): ">", ("at", "most"): "<=", ("no", "more", "than"): "<=", ("up", "to"): "<=",
    ("less", "than"): "<", ("fewer", "than"): "<",
}  # fmt: skip
"""Words for the signs of inequalities."""
_HEDGING_PHRASES = frozenset((
    *(words[:2] for words in _BOUNDS),
    ("could", "be"), ("might", "be"), ("may", "be"), ("or", "more"), ("or", "less"), ("can", "hold"),
))  # fmt: skip
_ADDING = frozenset(("add", "adds", "sum", "sums"))
_LEADS = (
    ("there", "are"), ("there", "is"), ("the", "answers", "are"), ("the", "answer", "is"), ("answer",), ("we",
    "get"), ("they", "are"), ("the", "final", "answer", "is"),
    ("final", "answer"), ("the", "result", "is"), ("the", "value", "is"),
)  # fmt: skip
_ARTICLES = frozenset(("the", "a", "an"))
_SHORT_WORDS = frozenset(("go", "in", "no", "on", "up", "so", "if", "or", "is", "it", "we"))
"""Words of two letters that are no products of two variables."""
MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_CALENDAR = {name[:letters] if letters else name: name for name in (*_DAYS, *MONTHS) for letters in (0, 3, 4, 5)}
"""Days and months by name and by the first letters of it."""
_VERDICTS = frozenset(("yes", "no", "true", "false"))
_TURNING = frozenset((
    "yes", "no", "true", "false", "but", "or", "maybe", "perhaps", "possibly", "probably", "unless", "if",
    "sometimes", "depends",
    "although", "though", "however", "and",
))  # fmt: skip
"""Words after which a verdict may not hold."""
REALS = frozenset((
    "real numbers", "the real numbers", "all real values", "all real numbers", "all reals", "any real number",
    "all real x",
    "all real numbers x", "the set of real numbers", "the set of all real numbers", "every real number",
))  # fmt: skip
NO_SOLUTION = frozenset((
    "no solution", "no solutions", "no real solution", "no real solutions", "no real roots", "empty set",
    "the empty set",
    "there is no solution",
    "there are no solutions", "none exist",
))  # fmt: skip
_NO_LIMIT = frozenset((
    "dne", "does not exist", "doesn't exist", "the limit does not exist", "this limit does not exist",
    "limit does not exist",
    "the limit doesn't exist", "no limit", "it does not exist",
))  # fmt: skip
_BECAUSE = frozenset(("because", "since", "as"))
MAX_WORDS = 12


@dataclass(frozen=True, slots=True)
class Clause:
    """The words behind a value that say when it holds."""

    kind: Literal["always", "integers", "condition"]
    before: list[Token]
    letter: str = ""
    domain: str = "ℤ"


def phrase(tokens: Sequence[Token]) -> str:
    """The tokens as text in lower case, with spaces where they are."""
    text = "".join(
        (" " if token.has_space and index else "") + token.text.lower()
        for index, token in enumerate(tokens)
        if token.text != "{}"
    )
    return " ".join(text.split()).strip(" .!")


def is_hedged(tokens: Sequence[Token]) -> bool:
    """Whether words or signs say that the text does not commit to its value."""
    texts = [token.text.lower() for token in tokens]
    if any(token.is_sign("?", "≈", "...") for token in tokens) or not _HEDGES.isdisjoint(texts):
        return True
    for index, (word, following) in enumerate(itertools.pairwise(texts)):
        if (word, following) in _HEDGING_PHRASES and not (word == "up" and index and texts[index - 1] in _ADDING):
            return True
    return any(
        first.endswith("n") and second == "'" and third == "t"
        for first, second, third in zip(texts, texts[1:], texts[2:], strict=False)
    )


def split_bound(tokens: Sequence[Token]) -> tuple[str, list[Token]] | None:
    """The sign that words say of what is behind them, "at least 5"; None for any other text."""
    texts = tuple(token.text.lower() for token in tokens)
    for words, sign in _BOUNDS.items():
        if texts[: len(words)] == words and len(texts) > len(words):
            return sign, list(tokens[len(words) :])
    return None


def is_plain_words(tokens: Sequence[Token]) -> bool:
    """Whether the tokens are words of a language and nothing else."""
    has_word = False
    for token in tokens:
        if token.kind == "word":
            has_word = True
        elif (
            not (token.kind == "name" and token.text != "π")
            and not (token.kind == "number" and token.is_from_words)
            and not token.is_sign("-", "'", ".", ",", "!", ";", ":", '"')
        ):
            return False
    return has_word


def words_value(tokens: Sequence[Token]) -> Value | None:
    """The value of an answer that is words alone: words, or a short product; None for anything else."""
    if not is_plain_words(tokens):
        return None
    if any(token.kind == "number" for token in tokens):
        is_title = any(token.kind == "word" and token.text != token.text.lower() for token in tokens)
        return Words(phrase(tokens)) if is_title or tokens[0].kind != "number" else None
    text = phrase(tokens)
    if len(tokens) == 1 and tokens[0].mode != "text":
        return _single(tokens[0], text)
    if any(token.text.lower() in ("and", "or") for token in tokens) or any(
        token.is_sign(",", ";", ":") for token in tokens
    ):
        return None if len(tokens) <= MAX_WORDS and text not in NO_SOLUTION else Words(text)
    if text in REALS or text in NO_SOLUTION:
        return None
    if _is_formula_in_letters(tokens):
        return None
    return Words(same_phrase(text))


def _is_formula_in_letters(tokens: Sequence[Token]) -> bool:
    """A word of plain text beside signs and letters that may be a product: ``AB - x``."""
    if not any(token.is_sign("-", "'") for token in tokens):
        return False
    return all(token.kind == "name" or token.is_sign("-", "'") or len(token.text) == 2 for token in tokens) and not any(
        token.mode == "text" for token in tokens
    )


def _single(token: Token, text: str) -> Value | None:
    word = token.text
    is_product = len(word) == 2 and word.islower() and word.isascii() and word not in _SHORT_WORDS
    if is_product or any(word.startswith(name) and len(word) <= len(name) + 1 for name in FUNCTIONS):
        return None
    letters = "".join(sorted(word)) if len(word) <= 3 and word.isascii() and word.lower() not in _SHORT_WORDS else ""
    return Words(same_phrase(text), letters)


def same_phrase(text: str) -> str:
    """One spelling for phrases that say the same."""
    if text in _NO_LIMIT:
        return "does not exist"
    first, _, rest = text.partition(" ")
    if first in ("on", "in") and rest in _CALENDAR:
        return _CALENDAR[rest]
    bare = rest if first in _ARTICLES and rest else text
    return _CALENDAR.get(bare, bare)


def verdict_with_reason(tokens: Sequence[Token]) -> str | None:
    """The "yes" or "no" before its reason; None for anything else."""
    if len(tokens) < 3 or tokens[0].text.lower() not in _VERDICTS or not tokens[1].is_sign(",", ".", ";", ":"):
        return None
    rest = {token.text.lower() for token in tokens[2:]}
    return None if rest & _TURNING else tokens[0].text.lower()


def without_remark(tokens: list[Token]) -> list[Token]:
    """The tokens without a remark in brackets that gives the reason, ends a proof or says the number in words."""
    if len(tokens) < 3 or tokens[-1].text != ")":
        return tokens
    depth = 0
    for start in range(len(tokens) - 1, 0, -1):
        depth += (tokens[start].kind == "close") - (tokens[start].kind == "open")
        if depth == 0:
            break
    else:
        return tokens
    inside = tokens[start + 1 : -1]
    texts = [token.text.lower() for token in inside if token.text != "."]
    if texts and (texts[0] in _BECAUSE or texts in (["q", "e", "d"], ["qed"])):
        return tokens[:start]
    return _restated(tokens[:start], inside) or tokens


def _restated(outside: list[Token], inside: list[Token]) -> list[Token] | None:
    """The figures of a number that is also given in words: "7 (seven)" and "seven (7)"."""
    is_pair = len(outside) == len(inside) == 1 and outside[0].kind == inside[0].kind == "number"
    if not is_pair:
        return None
    if outside[0].value != inside[0].value or outside[0].is_from_words == inside[0].is_from_words:
        raise Unreadable("two numbers")
    return outside


def without_lead(tokens: list[Token]) -> list[Token]:
    """The tokens behind "there are", "the answer is" and the like."""
    texts = [token.text.lower() for token in tokens]
    for lead in _LEADS:
        if tuple(texts[: len(lead)]) == lead and len(texts) > len(lead):
            rest = tokens[len(lead) :]
            return rest[1:] if rest[0].is_sign(":") and len(rest) > 1 else rest
    return tokens


_OPENERS = frozenset(
    ("for", "where", "with", "if", "when", "then", "given", "provided", "assuming", "whenever", "since", "because")
)
_QUANTIFIERS = frozenset(("all", "any", "every", "each", "some"))


def split_clause(tokens: Sequence[Token]) -> Clause | None:
    """The value and the clause behind it, such as ``for all real x`` or ``k \\in \\mathbb{Z}``; None without one."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.kind in ("open", "begin")) - (token.kind in ("close", "end"))
        is_opener = token.kind == "word" and token.text.lower() in _OPENERS
        if (depth == 0 or (depth == 1 and tokens[index - 1].text == "(")) and index and is_opener:
            start = index - 1 if tokens[index - 1].is_sign(",", ";") or tokens[index - 1].text == "(" else index
            return _clause(list(tokens[:start]), list(tokens[index:]))
        if depth == 0 and token.is_sign(",", ";", "quad") and index:
            rest = [following for following in tokens[index + 1 :] if following.text not in ("(", ")", "quad")]
            if (domain := _integers(rest)) is not None and any(
                following.text == domain[0] for following in tokens[:index]
            ):
                return Clause("integers", list(tokens[:index]), *domain)
    rest = list(tokens)
    if rest and rest[-1].text == ")" and (start := _opening(rest)) and (domain := _integers(rest[start + 1 : -1])):
        return Clause("integers", rest[:start], *domain)
    return None


def _opening(tokens: Sequence[Token]) -> int:
    for start in range(len(tokens) - 1, 0, -1):
        try:
            if tokens[start].text == "(" and closing(tokens, start) == len(tokens) - 1:
                return start
        except Unreadable:
            return 0
    return 0


def _clause(before: list[Token], behind: list[Token]) -> Clause:
    rest = [token for token in behind if token.text not in ("(", ")", "{}", ",")]
    texts = [token.text.lower() for token in rest]
    opener, body = texts[0], rest[1:]
    words = set(texts)
    if (domain := _integers(body)) is not None:
        if all(token.text != domain[0] for token in before):
            return Clause("always", before)
        return Clause("integers", before, *domain)
    is_real = words & {"real", "reals", "ℝ", "x"} and not words & {"<", ">", "<=", ">=", "!=", "="}
    if (
        opener in ("for", "with", "where")
        and words & (_QUANTIFIERS | {"∈", "real"})
        and is_real
        and not words & {"positive", "negative"}
    ):
        return Clause("always", before)
    return Clause("condition", before)


def _integers(tokens: Sequence[Token]) -> tuple[str, str] | None:
    """The letter that a clause makes an integer, and where it is from; None for any other clause."""
    body = [
        token
        for token in tokens
        if token.text.lower() not in (*_QUANTIFIERS, "an", "a", "is", "are", "{}", "where", "for", ".", "number")
    ]
    texts = [token.text for token in body]
    lowered = [text.lower() for text in texts]
    letters = [
        token.text for token in body if token.kind == "name" and len(token.text) == 1 and token.text not in "ℤℕℝℚℂ"
    ]
    if len(letters) != 1:
        return None
    rest = [text for text in lowered if text != letters[0].lower()]
    if rest in (["∈", "ℤ"], ["integer"], ["integers"], ["∈", "z"]):
        return letters[0], "ℤ"
    if rest in (["∈", "ℕ"], ["natural"], ["natural", "numbers"]):
        return letters[0], "ℕ"
    if rest in (["positive", "integer"], ["nonnegative", "integer"], ["odd", "integer"], ["even", "integer"]):
        return letters[0], " ".join(rest)
    return None
