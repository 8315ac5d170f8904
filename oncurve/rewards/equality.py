"""Equality of two final answers: exact rules first; what they cannot decide goes to an oracle."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from oncurve.rewards.exact import MAX_NUMBER_CHARACTERS, Quantity, read_quantity, same_quantity, split_unit
from oncurve.rewards.latex import compact, nesting, split_top, tidy

MAX_ANSWER_CHARACTERS = 600
"""A longer answer is wrong unless it is the reference letter by letter."""
MAX_NESTING = 12
"""Deeper brackets are compared as text only."""

MAX_DEGREE = 1_000
"""An answer whose brackets are raised to more than this, all exponents multiplied, is compared as text only."""

Oracle = Callable[[str, str], bool]
"""Decides about a tidied answer and a tidied reference, in that order, when no exact rule applies."""

_CHOICE = re.compile(r"\(?\s*(?:\\text\{\s*)?\(?\s*([A-J])\s*\)?\s*\}?\s*\)?\.?")
_CHOICE_WITH_VALUE = re.compile(
    r"(?:\\text\{\s*)?(?:\(([A-J])\)|([A-J])\s*[).:])\s*\}?(?![a-zA-Z]*\()\s*\S.*", re.DOTALL
)
_LABEL = re.compile(r"\(([A-J])\)|(?<![a-zA-Z0-9(])([A-J])(?=[).:](?!\w))")
_CHOICE_IN_PROSE = re.compile(
    r"(?:the )?(?:correct )?(?:answer|option|choice)(?: is)?:?\s*\(?([A-J])\)?\.?", re.IGNORECASE
)
_ARTICLE = re.compile(r"^(?:the|an?) ")
_WORDS = re.compile(r"[^\W\d_][^\W\d_'’\-. ]*(?:[ '’\-.][^\W\d_]+)*\.?")
_ASSIGNMENT = re.compile(
    r"(?:\\text\{[^{}]*\}|[a-zA-Z](?:_\{?\w+\}?)?(?:\([a-z]\))?'?|\\[a-z]+)\s*(?:=|\\in(?![a-zA-Z]))\s*"
)
_OPERATION = re.compile(r"(?:[\w)\]}]|\\%)\s*[-+*/^&]\s*\S|[a-zA-Z]\w*\s*\(|(?<![\\a-zA-Z])\$?[A-Z]{1,3}\$?\d")
_EQUATION = re.compile(r"(?<![<>!=\\])=(?!=)")
_MEMBER = re.compile(r"([a-zA-Z](?:_\{?\w+\}?)?)\s*\\in(?![a-zA-Z])")
_NAME = re.compile(r"\s*(?!.*\\(?:frac|sqrt|cdot|times)(?![a-zA-Z]))[^\d\s+\-*/^<>][^+\-*/^<>]*")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")
_HEDGE = re.compile(
    r"(?<![a-zA-Z])(?:or|either|maybe|perhaps|possibly|probably|about|approximately|approx|around|roughly|nearly|almost"
    r"|not|isn't|between|less than|more than|at least|at most|unless|unsure|guess)(?![a-zA-Z])"
    r"|\\lor|\\vee|\\implies|\\Rightarrow|\\approx|\\sim(?![a-z])|~|≈|\?|\\[lcd]?dots|\.\.\.|…",
    re.IGNORECASE,
)
_JOIN = re.compile(
    r"\\text\{\s*,?\s*(?:and|or)\s*\}|,?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\lor(?![a-z])|\\vee(?![a-z])|;"
)
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_MATHEMATICS = re.compile(r"\\(?!\$|%|text)|[\^_{}]")
_NUMBER_IN_PROSE = re.compile(
    r"(?<![\w.])[-+]?\\?[$€£]?-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?<=\d)(?:/\d+)?(?:\s?\\?%)?"
)
_POWER_OF_BRACKETS = re.compile(r"[)\]}]\s*\^\s*(?:\{\s*(\d{1,6})\s*\}|(\d))")
_SIDE_BY_SIDE = re.compile(r"(?<![_^\d])\d+\.?(?:\s+\.?|\s*\{\s*)\d|(?<![\w^\]}])\{\s*\d+\s*\}\s*\{?\s*\d")
"""Numbers with nothing between them; the symbolic grader would add them up."""

_EXPENSIVE = re.compile(
    r"\\(?:sum|int|prod|lim|iint|oint|limits)(?![a-zA-Z])|\\[dt]?binom\s*\{\s*\d{4,}"
    r"|\^\s*(?:\{[^{}]*(?:\^|\d{4,})|\d{4,}|[^\s{]\s*\^|\([^()]*\^)"  # towers of powers, exponents of four digits
    r"|\d{3,}\s*!|!\s*!|\)\s*!"
)


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
    is_same_time = same_time(candidate, gold)
    if is_same_time is not None:
        return is_same_time
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
    """The reference is a number, so the answer must be one number too, and nothing that is yet to be computed."""
    if candidate.startswith("="):
        candidate = candidate[1:].strip()
        if _OPERATION.search(candidate.lstrip("-+")):  # a formula of a spreadsheet
            return False
    quantity = read_quantity(candidate)
    if quantity is None and _is_prose(candidate):
        quantity = _number_in_prose(candidate)
        return quantity is not None and same_quantity(quantity, gold)
    if quantity is not None:
        return same_quantity(quantity, gold)
    value = _right_hand_side(candidate)
    if value != candidate:
        return _equal(value, gold_text, oracle)
    if _EQUATION.search(candidate) or len(split_top(candidate)) > 1 or "--" in candidate:
        return False
    if _is_hedged(candidate, gold_text):
        return False
    return _ask_without_units(candidate, gold_text, oracle)


def _is_prose(answer: str) -> bool:
    return _PROSE.search(answer) is not None and _MATHEMATICS.search(answer) is None


def _number_in_prose(answer: str) -> Quantity | None:
    """The only number of a sentence; None if there are several or the sentence does not commit to it."""
    if _HEDGE.search(answer) or len(answer) > MAX_NUMBER_CHARACTERS:
        return None
    numbers = list(_NUMBER_IN_PROSE.finditer(answer))
    if len(numbers) != 1 or any(sign.isdigit() for sign in _NUMBER_IN_PROSE.sub("", answer)):
        return None
    before, number, after = answer[: numbers[0].start()], numbers[0].group().strip(), answer[numbers[0].end() :]
    if re.search(r"[-a-zA-Z*/+^(]$|[-*/+^(]\s$", before.removesuffix("**")):
        return None
    if re.match(r"\s*[-+*/^!(\[]|[a-zA-Z]", after.removeprefix("**")):
        return None
    unit = re.match(r"\s*[a-zA-Z]*", after)
    return read_quantity(number + (unit.group() if unit else "")) or read_quantity(number)


def _chosen(candidate: str) -> str | None:
    """The letter of a multiple-choice answer, "C", "(C)", "C.", "(C) 12"; None where several are named."""
    if len(candidate) <= 3:
        candidate = candidate.upper()
    if len({first or second for first, second in _LABEL.findall(candidate)}) > 1:
        return None
    patterns = (_CHOICE, _CHOICE_WITH_VALUE, _CHOICE_IN_PROSE)
    match = next((match for match in (pattern.fullmatch(candidate) for pattern in patterns) if match), None)
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
    """What remains of ``x = 5``, ``A = bh = 15`` or ``2 + 3 = 5`` beside a reference that is no equation.

    An equation such as ``2x + 1 = 5`` states no value and stays whole.
    """
    is_named = _ASSIGNMENT.match(answer) is not None
    answer = _ASSIGNMENT.sub("", answer, count=1) if is_named else answer
    sides = _EQUATION.split(answer)
    if len(sides) < 2 or len(split_top(answer)) > 1:
        return answer
    if len(sides) == 2 and _VARIABLE.fullmatch(sides[1].strip()):  # 5 = x
        return sides[0].strip()
    if is_named or _NAME.fullmatch(sides[0]) or not any(_VARIABLE.search(side) for side in sides[:-1]):
        return sides[-1].strip()
    return answer


def _equal_structures(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Compares lists, tuples, sets and equations piece by piece, and the rest as expressions."""
    members = [match[1] for text in (candidate, gold) if (match := _MEMBER.match(text))]
    if len(set(members)) > 1:  # statements about different variables
        return False
    if len(split_top(gold, ":")) > 1 or len(split_top(candidate, ":")) > 1:
        return _same_ratio(candidate, gold, oracle)
    if _JOIN.search(candidate) and not _JOIN.search(gold):
        candidate = _JOIN.sub(",", candidate)
    if not _EQUATION.search(gold) and r"\in" not in gold:
        candidate = _right_hand_side(candidate)
        if _EQUATION.search(candidate) and len(split_top(candidate)) == 1:
            return False
    elif not _EQUATION.search(candidate) and _ASSIGNMENT.match(gold):
        gold = _right_hand_side(gold)
    if compact(candidate) == compact(gold):
        return True
    gold_opening, gold_inside, _ = _bracketed(gold)
    if len(_list_members(gold_inside)) > 1 and len(_list_members(_bracketed(candidate)[1])) > 1:
        same_members = _same_tuple if gold_opening in ("(", "[") else _same_set
        return same_members(candidate, gold, oracle)
    return _ask_without_units(candidate, gold, oracle)


def _same_tuple(candidate: str, gold: str, oracle: Oracle) -> bool:
    """The same brackets, and in them equal members at equal places."""
    opening, inside, closing = _bracketed(candidate)
    gold_opening, gold_inside, gold_closing = _bracketed(gold)
    members, gold_members = _list_members(inside), _list_members(gold_inside)
    if (opening, closing) != (gold_opening, gold_closing) or len(members) != len(gold_members):
        return False
    return all(_equal(member, other, oracle) for member, other in zip(members, gold_members, strict=True))


def _same_set(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Every member has its own equal among the others, in any order; what ± means is left to the oracle."""
    opening, inside, _ = _bracketed(candidate)
    if opening in ("(", "["):
        return False
    members, left = _list_members(inside), _list_members(_bracketed(gold)[1])
    if any(r"\pm" in member for member in members + left):
        return _ask(r"\{" + ",".join(members) + r"\}", r"\{" + ",".join(left) + r"\}", oracle)
    for member in members:
        match = next((other for other in left if _equal(member, other, oracle)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _ask_without_units(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Compares what stands before the units, which may be missing but must not differ."""
    expression, unit = split_unit(candidate)
    gold_expression, gold_unit = split_unit(gold)
    if unit and gold_unit and unit != gold_unit:
        return False
    if compact(expression) == compact(gold_expression):
        return True
    return _ask(expression, gold_expression, oracle)


def _list_members(text: str) -> list[str]:
    """What stands between commas, "and" or "or"; ``1,000, 2,000`` has two members."""
    text = _JOIN.sub(",", text)
    if re.search(r",\s", text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return split_top(text)


def _same_ratio(candidate: str, gold: str, oracle: Oracle) -> bool:
    """Every member of ``1:2:3`` equals the one at its place: a ratio is no division."""
    members, gold_members = split_top(candidate, ":"), split_top(gold, ":")
    return len(members) == len(gold_members) and all(
        _equal(member, gold_member, oracle) for member, gold_member in zip(members, gold_members, strict=True)
    )


def _bracketed(text: str) -> tuple[str, str, str]:
    """Opening, inside and closing of an answer in one pair of brackets; empty strings around it without one."""
    opening, inside, closing = text[:1], text[1:-1], text[-1:]
    if opening == "\\":
        opening, inside, closing = text[:2], text[2:-2], text[-2:]
    is_pair = (opening in ("(", "[") and closing in (")", "]")) or (opening, closing) == (r"\{", r"\}")
    if is_pair and nesting(_plain_braces(inside)) <= MAX_NESTING:
        return opening, inside, closing
    return "", text, ""


def _plain_braces(text: str) -> str:
    return text.replace(r"\{", "{").replace(r"\}", "}")


def _ask(candidate: str, gold: str, oracle: Oracle) -> bool:
    """The oracle's word, unless the answer could keep it busy for ever."""
    if nesting(_plain_braces(candidate)) > MAX_NESTING or ":" in candidate:
        return False
    if _is_expensive(candidate) and not _is_expensive(gold):
        return False
    if _SIDE_BY_SIDE.search(candidate) and not _SIDE_BY_SIDE.search(gold):
        return False
    return oracle(candidate, gold)


def _is_expensive(answer: str) -> bool:
    """Whether an expression may take for ever to evaluate: sums, towers of powers, huge factorials, long expansions."""
    degree = math.prod(int(first or second) for first, second in _POWER_OF_BRACKETS.findall(answer))
    return degree > MAX_DEGREE or _EXPENSIVE.search(answer) is not None


_HALF = re.compile(
    r"(?<=\d)\s*(?:\\text\s*\{)?\s*(?:(?P<letter>[ap])\.?\s?m(?![a-zA-Z])"
    r"|(?:in the|at)\s+(?P<word>morning|afternoon|evening|night)|(?P<twelve>noon|midnight))",
    re.IGNORECASE,
)
_TIME = re.compile(r"(?:at\s+)?(?P<hour>\d{1,2})(?:\s*:\s*(?P<minute>\d{2})(?:\s*:\s*(?P<second>\d{2}))?)?")


def same_time(candidate: str, gold: str) -> bool | None:
    """Whether two tidied answers are the same time of day; None where that is not what they are about.

    A time that does not say its half of the day may mean either, as a number without a unit may.

    >>> [same_time(answer, "3:00 PM") for answer in ("3 p.m.", "15:00", "3:00 AM", "3:00", "three")]
    [True, True, False, True, None]
    """
    halves = [_half(text) for text in (candidate, gold)]
    if not any(halves):
        return None
    times = [_seconds(text, half) for text, half in zip((candidate, gold), halves, strict=True)]
    if None in halves:
        bare = times[halves.index(None)]
        other = times[1 - halves.index(None)]
        if bare is None or other is None:
            return None
        return bare == other or (bare < 43_200 and bare % 43_200 == other % 43_200)
    if halves[0] != halves[1] and None not in times:
        return False
    if None in times:  # a time inside of something else: the other rules compare that
        return False if halves[0] != halves[1] else None
    return times[0] == times[1]


def _half(text: str) -> str | None:
    """Which half of the day a text names: "a" or "p"."""
    found = _HALF.search(text)
    if found is None:
        return None
    word = (found["letter"] or found["word"] or found["twelve"]).lower()
    return "a" if word in ("a", "morning", "midnight") else "p"


def _seconds(text: str, half: str | None) -> int | None:
    """The seconds since midnight of a text that is a time and nothing else."""
    bare = _HALF.sub("", text).strip(" .}")
    found = _TIME.fullmatch(bare)
    if found is None or (half is None and found["minute"] is None):
        return None
    hour, minute, second = int(found["hour"]), int(found["minute"] or 0), int(found["second"] or 0)
    if hour > (12 if half else 23) or (half and hour == 0) or minute > 59 or second > 59:
        return None
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return hour * 3600 + minute * 60 + second
