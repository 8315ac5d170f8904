"""Are two final answers the same? Exact rules first; what they cannot decide goes to an oracle."""

from __future__ import annotations

import re
from collections.abc import Callable

from oncurve.rewards.exact import MAX_NUMBER_CHARACTERS, Quantity, read_quantity, same_quantity
from oncurve.rewards.latex import compact, nesting, split_top, tidy

MAX_ANSWER_CHARACTERS = 600
"""A longer answer is wrong unless it is the reference letter by letter."""
MAX_NESTING = 12
"""Deeper brackets are compared as text only."""

Oracle = Callable[[str, str], bool]
"""Decides about a tidied answer and a tidied reference, in that order, when no exact rule applies."""

_CHOICE = re.compile(r"\(?\s*(?:\\text\{\s*)?\(?\s*([A-J])\s*\)?\s*\}?\s*\)?\.?")
_CHOSEN = re.compile(r"(?:\\text\{\s*)?(?:\(([A-J])\)|([A-J])\s*[).:])\s*\}?(?![a-zA-Z]*\()\s*\S.*", re.DOTALL)
_ARTICLE = re.compile(r"^(?:the|an?) ")
_WORDS = re.compile(r"[^\W\d_][^\W\d_'’\-. ]*(?:[ '’\-.][^\W\d_]+)*\.?")
_ASSIGNMENT = re.compile(r"(?:\\text\{[^{}]*\}|[a-zA-Z](?:_\{?\w+\}?)?(?:\([a-z]\))?'?|\\[a-z]+)\s*(?:=|\\in(?![a-zA-Z]))\s*")
_EQUATION = re.compile(r"(?<![<>!=\\])=(?!=)")
_HEDGE = re.compile(
    r"(?<![a-zA-Z])(?:or|either|maybe|perhaps|possibly|probably|about|approximately|approx|around|roughly|nearly|almost"
    r"|not|isn't|between|less than|more than|at least|at most|unless|unsure|guess)(?![a-zA-Z])"
    r"|\\lor|\\vee|\\implies|\\Rightarrow|\\approx|\\sim(?![a-z])|~|≈|\?",
    re.IGNORECASE,
)
_JOIN = re.compile(r"\\text\{\s*,?\s*(?:and|or)\s*\}|,?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\lor(?![a-z])|\\vee(?![a-z])")
_NUMBER_WORD = re.compile(r"(?<![\w.])[-+]?\\?[$€£]?-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?<=\d)(?:/\d+)?(?:\s?\\?%)?")
_EXPENSIVE = re.compile(
    r"\\(?:sum|int|prod|lim|iint|oint|limits)(?![a-zA-Z])"  # may take for ever to evaluate
    r"|\^\s*(?:\{[^{}]*(?:\^|\d{4,})|\d{4,}|[^\s{]\s*\^|\([^()]*\^)"  # towers of powers, exponents of four digits
    r"|\d{3,}\s*!|!\s*!|\)\s*!"
)
_BRACKETS = {"(": ")", "[": "]", r"\{": r"\}"}


def equal_answers(candidate: str, gold: str, oracle: Oracle) -> bool:
    r"""Whether an answer states what the reference states.

    Exact rules decide about equal texts, numbers, words, choices, and lists of those, without an error of rounding;
    the oracle is asked only about what remains, such as ``\frac{\sqrt{12}}{2}`` against ``\sqrt{3}``.

    >>> equal_answers("1,000 dollars", "1000", oracle=lambda candidate, gold: False)
    True
    """
    if len(candidate) > MAX_ANSWER_CHARACTERS or len(gold) > MAX_ANSWER_CHARACTERS:
        return candidate.strip() == gold.strip() != ""
    return _equal(tidy(candidate), tidy(gold), oracle)


def _equal(candidate: str, gold: str, oracle: Oracle) -> bool:
    if not candidate or not gold:
        return False
    if compact(candidate) == compact(gold):
        return True
    quantity = read_quantity(gold)
    if quantity is not None:
        return _equals_number(candidate, quantity, gold, oracle)
    choice = _CHOICE.fullmatch(gold)
    if choice is not None:
        return _chosen(candidate) == choice[1]
    words = _plain_words(gold)
    if words is not None:
        return _same_words(candidate, words)
    if _is_hedged(candidate, gold):
        return False
    return _equal_structures(candidate, gold, oracle)


def _equals_number(candidate: str, gold: Quantity, gold_text: str, oracle: Oracle) -> bool:
    """The reference is a number, so the answer must be one number too."""
    quantity = read_quantity(candidate)
    if quantity is None and _is_prose(candidate):
        quantity = _number_in_prose(candidate)
        return quantity is not None and same_quantity(quantity, gold)
    if quantity is not None:
        return same_quantity(quantity, gold)
    value = _right_hand_side(candidate)
    if value != candidate:
        return _equal(value, gold_text, oracle)
    if _is_hedged(candidate, gold_text) or len(split_top(candidate)) > 1 or ":" in candidate:
        return False
    return _ask(candidate, gold_text, oracle)


def _is_prose(answer: str) -> bool:
    return len(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", answer)) >= 1 and not re.search(r"\\(?!\$|%|text)|[\^_{}]", answer)


def _number_in_prose(answer: str) -> Quantity | None:
    """The only number of a sentence; None if there are several or the sentence does not commit to it."""
    if _HEDGE.search(answer) or len(answer) > MAX_NUMBER_CHARACTERS:
        return None
    numbers = list(_NUMBER_WORD.finditer(answer))
    if len(numbers) != 1 or sum(sign.isdigit() for sign in answer) != sum(sign.isdigit() for sign in numbers[0].group()):
        return None
    before, after = answer[: numbers[0].start()], answer[numbers[0].end() :]
    if re.search(r"[a-zA-Z*/+.^(]\s?$", before) and not before.endswith((" ", "\n", ". ", "**")):
        return None
    if re.match(r"\s*[-+*/^!(\[]|[a-zA-Z]", after) and not after.startswith("**"):
        return None
    unit = re.match(r"\s*[a-zA-Z]*", after)
    with_unit = read_quantity(numbers[0].group().strip() + (unit.group() if unit else ""))
    return with_unit or read_quantity(numbers[0].group().strip())


def _chosen(candidate: str) -> str | None:
    """The letter of a multiple-choice answer: "C", "(C)", "C.", "(C) 12"."""
    if len(candidate) <= 3:
        candidate = candidate.upper()
    match = _CHOICE.fullmatch(candidate) or _CHOSEN.fullmatch(candidate)
    if match is None:
        match = re.fullmatch(r"(?:the )?(?:correct )?(?:answer|option|choice)(?: is)?:?\s*\(?([A-J])\)?\.?", candidate, re.I)
    return next((letter.upper() for letter in match.groups() if letter), None) if match else None


def _plain_words(answer: str) -> str | None:
    """The words of an answer that is nothing but words, in lower case; None for mathematics."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", answer).strip()
    if len(text) < 2 or not _WORDS.fullmatch(text) or (len(text) == 2 and "\\text" not in answer and text.islower()):
        return None
    return text.casefold().rstrip(".")


def _same_words(candidate: str, gold: str) -> bool:
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", candidate).strip(" .").casefold()
    return text == gold or _ARTICLE.sub("", text) == _ARTICLE.sub("", gold)


def _is_hedged(candidate: str, gold: str) -> bool:
    """The answer names more than it commits to, and the reference does not."""
    has_several = len(split_top(gold)) > 1 or r"\pm" in gold or _JOIN.search(gold) is not None or gold.startswith(r"\{")
    text = _JOIN.sub(",", candidate) if has_several else candidate
    return _HEDGE.search(text) is not None and _HEDGE.search(gold) is None


def _right_hand_side(answer: str) -> str:
    """What remains of ``x = 5`` or of ``2 + 3 = 5`` beside a reference that is no equation."""
    answer = _ASSIGNMENT.sub("", answer, count=1) if _ASSIGNMENT.match(answer) else answer
    sides = _EQUATION.split(answer)
    if len(sides) < 2 or len(split_top(answer)) > 1:
        return answer
    is_turned = len(sides) == 2 and re.fullmatch(r"\s*[a-zA-Z]\s*", sides[1])  # 5 = x
    return sides[0 if is_turned else -1].strip()


def _equal_structures(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Compares lists, tuples, sets and equations piece by piece, and the rest as expressions."""
    if ":" in gold or ":" in candidate:
        return _same_ratio(candidate, gold, oracle)
    if _JOIN.search(candidate) and not _JOIN.search(gold):
        candidate = _JOIN.sub(",", candidate)
    if not _EQUATION.search(gold) and r"\in" not in gold:
        candidate = _right_hand_side(candidate)
    elif not _EQUATION.search(candidate) and _ASSIGNMENT.match(gold):
        gold = _right_hand_side(gold)
    if compact(candidate) == compact(gold):
        return True
    gold_open, gold_inside, gold_close = _bracketed(gold)
    opening, inside, closing = _bracketed(candidate)
    gold_pieces, pieces = split_top(_JOIN.sub(",", gold_inside)), split_top(_JOIN.sub(",", inside))
    if len(gold_pieces) > 1 and len(pieces) > 1:
        is_ordered = gold_open in ("(", "[")
        if is_ordered and (opening, closing) != (gold_open, gold_close):
            return False
        if is_ordered:
            return len(pieces) == len(gold_pieces) and all(
                _equal(piece, gold_piece, oracle) for piece, gold_piece in zip(pieces, gold_pieces, strict=True)
            )
        if opening in ("(", "["):
            return False
        return _same_set(pieces, gold_pieces, oracle)
    return _ask(candidate, gold, oracle)


def _same_ratio(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Every member of ``1:2:3`` equals the one at its place: a ratio is no division."""
    members, gold_members = split_top(candidate, ":"), split_top(gold, ":")
    return len(members) == len(gold_members) and all(
        _equal(member, gold_member, oracle) for member, gold_member in zip(members, gold_members, strict=True)
    )


def _bracketed(text: str) -> tuple[str, str, str]:
    """Opening, inside and closing of an answer in one pair of brackets; empty strings around it without one."""
    for opening in _BRACKETS:
        for closing in (")", "]", r"\}"):
            inside = text[len(opening) : -len(closing)]
            is_interval = opening != r"\{" and closing != r"\}"
            if not text.startswith(opening) or not text.endswith(closing) or (closing != _BRACKETS[opening] and not is_interval):
                continue
            if nesting(inside.replace(r"\{", "{").replace(r"\}", "}")) <= MAX_NESTING:
                return opening, inside, closing
    return "", text, ""


def _same_set(pieces: list[str], gold_pieces: list[str], oracle: Oracle) -> bool:
    """Every piece has its own equal among the others, in any order; what ± means is left to the oracle."""
    if any(r"\pm" in piece for piece in pieces + gold_pieces):
        return _ask(r"\{" + ",".join(pieces) + r"\}", r"\{" + ",".join(gold_pieces) + r"\}", oracle)
    left = list(gold_pieces)
    for piece in pieces:
        match = next((gold_piece for gold_piece in left if _equal(piece, gold_piece, oracle)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _ask(candidate: str, gold: str, oracle: Oracle) -> bool:
    """The oracle's word, unless the answer could keep it busy for ever."""
    if nesting(candidate.replace("\\{", "{").replace("\\}", "}").replace("\\", "")) > MAX_NESTING:
        return False
    if _EXPENSIVE.search(candidate) and not _EXPENSIVE.search(gold):
        return False
    return oracle(candidate, gold)
