"""Extraction of the final answer from a completion."""

from __future__ import annotations

import re
from typing import Literal

from oncurve.rewards.choices import chosen_letter

AnswerPlace = Literal["boxed", "answer_tag", "hash", "any", "choice"]
"""Where the recipe asks for the answer; "any" takes every plausible place, "choice" the letter of an option there."""

MAX_TEXT_CHARACTERS = 50_000
"""Only the end of a longer text is searched: the answer comes last, and a megabyte must cost no more than this."""

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(
    r"""(?<![\w.])                     # neither inside a word nor after a decimal point
        [-−]?[$€£]?[-−]?
        (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?<=\d)
        (?:[eE][-+]?\d{1,3}|/(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+))?
        (?:\s?\\?%)?""",
    re.VERBOSE,
)


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced ``\boxed{...}``; None if there is none.

    Of nested boxes the outer one counts. A box that never closes, as in a completion that was cut off, is passed over.

    >>> last_boxed(r"so \boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    text = text[-MAX_TEXT_CHARACTERS:]
    open_braces: list[int | None] = []  # where the content of a box starts; None for any other brace
    found: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                found = (start, match.start())
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(match.end())
    return None if found is None else text[found[0] : found[1]].strip()


def after_hash(text: str) -> str | None:
    """What follows the last ``####`` on its line; None if there is no such mark or nothing follows it.

    >>> after_hash("9 + 9 = 18\\n#### 18")
    '18'
    """
    _, mark, rest = text[-MAX_TEXT_CHARACTERS:].rpartition("####")
    lines = rest.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def answer_tag(text: str) -> str | None:
    """What stands between the last ``<answer>`` and the first ``</answer>`` after it; None if either is missing.

    >>> answer_tag("... </think> <answer> 42 </answer>\\nUser: thanks")
    '42'
    """
    _, opening, rest = text[-MAX_TEXT_CHARACTERS:].rpartition("<answer>")
    content, closing, _ = rest.partition("</answer>")
    return content.strip() if opening and closing else None


def last_number(text: str) -> str | None:
    """The last thing in a text that looks like a number, with its sign, currency, commas and percent sign.

    >>> last_number("It costs $1,250.50 in total.")
    '$1,250.50'
    """
    found = None
    for found in _NUMBER.finditer(text[-MAX_TEXT_CHARACTERS:]):  # noqa: B007
        pass
    return None if found is None else found.group().strip()


def after_thinking(text: str) -> str:
    """The text after the last ``</think>``; all of it if nothing follows or the tag is missing."""
    rest = text.rpartition("</think>")[2]
    return rest if rest.strip() else text


def find_answer(text: str, place: AnswerPlace) -> str | None:
    r"""The final answer at the asked place, without a box around it; None if the place is empty or missing.

    >>> find_answer(r"</think> <answer> \boxed{15} </answer>", "answer_tag")
    '15'
    """
    match place:
        case "boxed":
            answer = last_boxed(text)
        case "answer_tag":
            answer = answer_tag(text)
        case "hash":
            answer = after_hash(text)
        case "any":
            answer = _any_answer(after_thinking(text))
        case "choice":
            rest = after_thinking(text)[-MAX_TEXT_CHARACTERS:]
            return chosen_letter(answer_tag(rest) or last_boxed(rest) or after_hash(rest) or rest)
    return _unboxed(answer) or None if answer is not None else None


def _any_answer(text: str) -> str | None:
    for find in (answer_tag, last_boxed, after_hash, last_number):
        answer = find(text)
        if answer:
            return answer
    return None


def _unboxed(answer: str) -> str:
    inner = last_boxed(answer)
    return answer if inner is None else inner
