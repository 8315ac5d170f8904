"""Extraction of the final answer from a completion."""

from __future__ import annotations

import re
from typing import Literal

from oncurve.core.records import Completion, Prompt
from oncurve.rewards.choices import chosen_letter
from oncurve.rewards.doubt import BOUNDED, ROUNDED, UNSURE
from oncurve.rewards.latex import formulas
from oncurve.rewards.quantities import read_amount
from oncurve.rewards.shapes import read_date

AnswerPlace = Literal["boxed", "answer_tag", "hash", "any", "choice"]
"""Where the recipe asks for the answer; "any" takes every plausible place, "choice" the letter of an option there."""

MAX_TEXT_CHARACTERS = 50_000
"""Only the end of a longer text is searched: the answer comes last, and a megabyte must cost no more than this."""

_BARE_BOX = re.compile(
    r"\\(?:boxed|fbox)(?![{a-zA-Z])\s*(?!\s*\{)"
    r"(?![a-zA-Z]{2}|[.,;:!?)\]])((?:\\[a-zA-Z]+(?:\{[^{}]*\})*|[^\s${}\\`*])+)"
)
"""A box without braces around what stands in it."""
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
MAX_CLAUSE_CHARACTERS = 2_000
"""Characters of a text without marks in which its last expression is looked for."""

_TAGS = ("think", "thinking", "thought", "thoughts", "reasoning", "seed:think")
_THINKING_BEGINS = re.compile(
    rf"<(?:{'|'.join(_TAGS)})>|\[THINK\]|◁think▷|<\|begin_of_thought\|>|<\|channel\|>\s*analysis(?:\s*<\|message\|>)?",
    re.IGNORECASE,
)
_THINKING_ENDS = (
    *(f"</{tag}>" for tag in _TAGS),
    "[/think]",
    "◁/think▷",
    "<|end_of_thought|>",
    "<|channel|>final<|message|>",
)
"""In lower case."""
_HASH = re.compile(r"(?<!#)####(?!#)")
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:,|;|(?:,\s*)?\\?(?:text\{\s*)?(?:and|or)(?:\s*\})?|&)[\s$]*")
_NAMED = re.compile(r"[a-zA-Z]\s*=[\s$]*$")
_MARKUP = re.compile(r"\*\*|`|<\|\w+\|>|^[ \t]*=?>\s+", re.MULTILINE)
_DOUBTED = re.compile(
    r"(?:(?:\b(?:not|cannot|never|nicht|keine?|pas|не)|n['’]t)(?:\s+(?:be|equal(?:\s+to)?))?|不是"
    rf"|\b(?:{ROUNDED}|{UNSURE}|{BOUNDED}|(?:could|might|may) be))"
    r"[\s:$]*$",
    re.IGNORECASE,
)
_STATED = re.compile(
    r"(?<![a-z])answer(?:\s+(?:to|of|for)\s[^.:\n]{1,60}?)?\s*(?:\*\*)?"
    r"(?::|(?:is|would be|must be|should be|=)(?![a-z]):?)(?:\*\*)?\s*(?P<said>\S[^\n]*)",
    re.IGNORECASE,
)
_CLAUSE_ENDS = re.compile(
    r"(?<=[^\s.])\.(?=\s|$)|(?<=[a-zA-Z])!(?=\s|$)|\s\((?=[a-zA-Z]{2})|,?\s(?:because|since|as|where|which|so that)\s"
)
_REVISED = re.compile(
    r"(?<![a-z])(?:wait|no|not|actually|correct(?:ion|ing|ed)|sorry|instead|wrong|incorrect|mistake|error|but|or"
    r"|however|should|hmm|oops|re-?check(?:ed|ing)?|alternatively|rather|except|unless|final|cannot)(?![a-z])"
    r"|n['’]t(?![a-z])|\?",
    re.IGNORECASE,
)
"""Words behind a stated answer after which another one may count."""
_ANNOTATION = re.compile(r"<<[^<>\n]{0,200}>>")
"""The calculator's part of GSM8K's solutions: ``3+4=<<3+4=7>>7``."""
_NEXT_TURN = re.compile(r"^[ \t]*(?:human|user)\s*:.*", re.MULTILINE | re.DOTALL | re.IGNORECASE)
_PLACE_NAMES = frozenset(
    re.split(" ", "step equation eq eq. part figure line case method section table page example note")
)
"""Words whose number names a place in the text."""
_OF_WHAT = frozenset(re.split(" ", "in of for from per after every with than on at by over within during"))
"""Words before a number that is no result: it says in, of or for what the result is."""
_SAYS_NOTHING = re.compile(
    r"(?:the |as |given |shown |found |stated )*(?:above|below|clear|obvious|simple|correct|right|wrong|follows|this"
    r"|that|it|same|unknown)",
    re.IGNORECASE,
)
_NO_PROSE = re.compile(r"\\text\s*\{[^{}]*\}|\\[a-zA-Z]+(?:\{[a-z]+\})?")
"""Commands of LaTeX, with their words."""
MAX_ANSWER_WORDS = 6
"""Words without a number that may be an answer where no place is asked for."""
_REFUSED = re.compile(r"(?:,|\s+and|,\s+and)\s+not\s+[-$\\\d.,/]+\W*$")
_WORD = re.compile(r"[a-zA-Z]{2,}")
_FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan)|ln|log|exp|sqrt|pi|mod")
_MULTIPLIER = re.compile(r"(?:hundred|thousand|million|billion|trillion|dozen|percent|a\.?m\.?|p\.?m\.?)[.,;:?]?", re.I)


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced ``\boxed{...}``; None if there is none.

    Of nested boxes the outer one counts. Boxes with nothing but commas, "and" or "or" between them are one list. A box
    that never closes, as in a completion that was cut off, is passed over.

    >>> last_boxed(r"so \boxed{3}, no: \boxed{\frac{1}{2}}"), last_boxed(r"\boxed{3} and \boxed{5}")
    ('\\frac{1}{2}', '3, 5')
    """
    text = _BARE_BOX.sub(lambda box: f"\\boxed{{{box[1].rstrip('.,;:')}}}", text[-MAX_TEXT_CHARACTERS:])
    open_braces: list[tuple[int, int] | None] = []  # where a box and its content start; None for any other brace
    found: list[tuple[int, int, int]] = []
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                while found and found[-1][0] > box[0]:
                    found.pop()  # inside of this one
                found.append((*box, match.start()))
        elif token.endswith("{") and len(token) > 2:
            open_braces.append((match.start(), match.end()))
    if not found:
        return None
    contents = [text[found[-1][1] : found[-1][2]].strip()]
    for left, right in zip(found[-2::-1], found[:0:-1], strict=True):
        name = _NAMED.search(text[max(left[0] - 20, 0) : left[0]])  # x = 3 or x = 5
        if not _BETWEEN_BOXES.fullmatch(text[left[2] + 1 : right[0]].removesuffix(name.group() if name else "")):
            break
        contents.insert(0, text[left[1] : left[2]].strip())
    return ", ".join(contents)


def after_hash(text: str) -> str | None:
    """The text behind the last ``####`` on its line; None if there is no such mark or nothing follows it.

    >>> after_hash("9 + 9 = 18\\n#### 18")
    '18'
    """
    marks = list(_HASH.finditer(text[-MAX_TEXT_CHARACTERS:]))
    lines = text[-MAX_TEXT_CHARACTERS:][marks[-1].end() :].strip().splitlines() if marks else []
    return lines[0].strip() if lines else None


def answer_tag(text: str) -> str | None:
    """The text between the last ``<answer>`` and the first ``</answer>`` after it; None if either is missing.

    >>> answer_tag("... </think> <answer> 42 </answer>\\nUser: thanks")
    '42'
    """
    _, opening, rest = text.rpartition("<answer>")
    content, closing, _ = rest.partition("</answer>")
    return content.strip() if opening and closing else None


def last_expression(text: str) -> str | None:
    r"""The last whole expression of a text: a formula between delimiters, or the numbers, signs and letters around the
    last number; never a piece of one. A sum or product of numbers that nobody has worked out, such as the question's,
    is none; nor is one that is asked, "20?", denied, "not 20", or rounded, "about 20".

    >>> [last_expression(text) for text in (r"It is $\frac{1}{2}$.", "So 2x+3", "It costs $1,250.50 in total.")]
    ['\\frac{1}{2}', '2x+3', '$1,250.50']
    """
    text = re.sub("(?<=[：是])(?=[-$\\d])", " ", _MARKUP.sub("", text[-MAX_CLAUSE_CHARACTERS:])).rstrip()
    text = _REFUSED.sub("", text)  # 36, not 35
    found = formulas(text)
    formula = found[-1] if found else None
    behind = text[formula[1] :] if formula else text
    bare = _last_run(behind)
    if bare:
        before, _, after = text.rpartition(bare)
        return None if _is_computation(bare) or _is_doubted(before, after) else bare
    if formula is None or _is_computation(formula[2]) or _is_doubted(text[: formula[0]], behind):
        return None
    unit = re.match(r"\s*(?:\\?%|" + _MULTIPLIER.pattern + r")", behind, re.I)
    listed = [formula[2] + (f" {unit.group().strip()}" if unit else "")]
    for left, right in zip(found[-2::-1], found[:0:-1], strict=True):
        if not _BETWEEN_BOXES.fullmatch(text[left[1] : right[0]]) or _is_doubted(text[: left[0]], ""):
            break
        listed.insert(0, left[2])
    return ", ".join(listed)


def stated_answer(text: str) -> str | None:
    """The expression, or the few words, of the last "the answer is ..." or "Answer: ..."; None if there is none, or if
    what stands behind it may take it back.

    >>> [stated_answer(text) for text in ("The answer is 12. (Check: 12 - 7 = 5.)", "Answer: 12. No, it is 13.")]
    ['12', None]
    """
    text = text[-MAX_CLAUSE_CHARACTERS:]
    found = list(_STATED.finditer(text))
    if not found:
        return None
    said = found[-1]["said"]
    end = _CLAUSE_ENDS.search(said)
    clause = said[: end.start()] if end else said
    behind = text[found[-1].start("said") + len(clause) :]
    if _REVISED.search(behind):
        return None
    if re.search(r"\d|[$\\]", clause):
        plain = _MARKUP.sub("", clause).strip().rstrip(" .")
        is_formula = not _WORD.search(_NO_PROSE.sub("", plain)) and "$" not in plain and not _is_computation(plain)
        return plain if is_formula else last_expression(clause)
    words = _MARKUP.sub("", clause).strip(" .,:;\"'")
    is_answer = words and len(words.split()) <= MAX_ANSWER_WORDS and not re.search(r"\d", behind)
    return words if is_answer and not _SAYS_NOTHING.fullmatch(words) else None


def _is_doubted(before: str, after: str) -> bool:
    """An expression is denied, rounded or asked by what stands directly around it."""
    return _DOUBTED.search(before[-40:]) is not None or after.lstrip().startswith("?")


def _is_computation(expression: str) -> bool:
    """Arithmetic of numbers alone, with a sign between two of them and no result."""
    expression = re.sub(r"(?<=\d)\s*\\[dt]?frac\s*(?:\d\d|\{\d+\}\s*\{\d+\})", "", expression)  # mixed numbers
    plain = re.sub(r"\\(?:frac|[dt]frac|cdot|times|div|left|right)(?![a-zA-Z])", " * ", expression)
    has_result = re.search(r"[=a-zA-Z\\<>:]", plain) is not None
    return not has_result and re.search(r"[\d)}]\s*(?:[+×·÷]|\s-\s|\s/\s|\s?\*)\s*[-(\d.{*]", plain) is not None


def _last_run(text: str) -> str | None:
    """The words around the last number that are mathematics."""
    for line in reversed(text.splitlines()):
        words = line.split()
        last = next((place for place in range(len(words) - 1, -1, -1) if _has_number(words, place)), None)
        if last is not None:
            last = _result(words, last)
            is_share = re.search(
                r"\d (?:in|out of|of)$", " ".join(words[max(last - 3, 0) : last])
            )  # 1 in 4, 5 out of 9
            return _amount_or_date(words, last) or (None if is_share else _run(words, last))
    return None


def _result(words: list[str], last: int) -> int:
    """The place of the result of the last equation, if what follows it only says of what: 9 of ``4+5=9 in the 40
    minutes``; else the last number."""
    begins = next((place for place in range(last - 1, -1, -1) if words[place].endswith((".", "?", "!", ";"))), -1)
    equal = next((place for place in range(last - 1, begins, -1) if "=" in words[place]), None)
    if equal is None:
        return last
    result = next(place for place in range(equal, last + 1) if re.search(r"=.*\d|^[^=]*\d", words[place]))
    between = [word.lower() for word in words[result + 1 : last]]
    return result if between and not between[-1].endswith(",") and _OF_WHAT.intersection(between[-2:]) else last


def _has_number(words: list[str], place: int) -> bool:
    """A word has a digit that numbers no step or equation."""
    named = place > 0 and words[place - 1].lower().lstrip("(") in _PLACE_NAMES
    return re.search(r"\d", words[place]) is not None and not (
        named and re.fullmatch(r"\(?\d+\)?[.:,)]*", words[place])
    )


def _amount_or_date(words: list[str], place: int) -> str | None:
    """An amount in several units, or a date with its month, that ends with a number."""
    for start in range(max(place - 4, 0), place):
        amount = " ".join(words[start : place + 2]).rstrip(".,;:")
        day = " ".join(words[start : place + 1]).rstrip(".,;:")
        if read_amount(amount) is not None:
            return amount
        if read_date(day) is not None:
            return day
    return None


def _run(words: list[str], place: int) -> str:
    start = end = place
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
    run = re.sub(r"^(?:and|or)\s+|^[A-Za-z]+:(?=.*\d)", "", run, flags=re.I).rstrip(".,;:?")
    if re.match(r"[-+*/×=]\s.*=|=\s", run) and (result := run.rpartition("=")[2].strip()):
        run = result  # the end of an equation whose beginning has words in it
    while run.count("(") < run.count(")") and run.endswith(")"):
        run = run[:-1]
    while run.startswith("(") and run.count("(") > run.count(")"):
        run = run[1:]
    return run


def _is_mathematics(word: str) -> bool:
    """Digits, signs, single letters, commands, functions; not a word of a language."""
    plain = re.sub(r"\\[a-zA-Z]+", "", word)
    letters = _WORD.findall(plain)
    if word.lower() in ("a", "i", "-", "–", "—", "i'm"):
        return word in ("-", "–") or word == "i"
    return bool(re.search(r"[\d=+*/^<>\\{}()|]|^.$", word.strip(".,;:"))) and all(
        _FUNCTION.fullmatch(found) for found in letters if not re.search(r"\d", word)
    )


def after_thinking(text: str, *, is_open: bool = False) -> str:
    """The text of a completion outside of its thinking: behind ``</think>``, before a ``<think>`` that stays open.

    Marks of other model families count as well: ``<thinking>``, ``<reasoning>``, ``<thought>``, ``[THINK]``,
    ``<seed:think>``, the signs of Kimi, and the analysis channel of harmony. ``is_open`` says that the completion
    begins within its thinking, and has to close it.

    >>> after_thinking("<think>5</think> 6"), after_thinking("<think> 5"), after_thinking("5 or 6", is_open=True)
    (' 6', '', '')
    """
    lowered = text.lower() if text.isascii() else re.sub("[A-Z]", lambda letter: letter[0].lower(), text)
    end = max(place + len(mark) if (place := lowered.rfind(mark)) >= 0 else 0 for mark in _THINKING_ENDS)
    if not end and is_open:
        return ""
    rest = text[end:]
    opening = _THINKING_BEGINS.search(rest)
    return rest[: opening.start()] if opening else rest


def said_by(prompt: Prompt, completion: Completion) -> str:
    """The text of a completion outside of its thinking, which the prompt may have begun.

    A completion that ends by itself has ended its thinking, whether it says so or not; one that was cut off has not.
    """
    begins = list(_THINKING_BEGINS.finditer(prompt.text.rstrip()))
    is_open = completion.is_truncated and bool(begins) and begins[-1].end() == len(prompt.text.rstrip())
    return after_thinking(completion.text, is_open=is_open)


def find_answer(text: str, place: AnswerPlace) -> str | None:
    r"""The final answer at the asked place, without a box around it; None if the place is empty or missing.

    The thinking is never read.

    >>> find_answer(r"</think> <answer> \boxed{15} </answer>", "answer_tag")
    '15'
    """
    said = after_thinking(text)
    match place:
        case "boxed":
            answer = last_boxed(said)
        case "answer_tag":
            answer = answer_tag(said)
        case "hash":
            answer = after_hash(said)
        case "any":
            answer = _any_answer(said)
        case "choice":
            said = said[-MAX_TEXT_CHARACTERS:]
            for marked in (answer_tag(said), last_boxed(said), after_hash(said)):
                if marked and ((letter := chosen_letter(marked)) or re.search(r"\b[A-J]\b", marked)):
                    return letter
            return chosen_letter(said)
    inner = None if answer is None else last_boxed(answer)
    return (answer if inner is None else inner) or None


def marked_answer(text: str) -> str | None:
    """The answer in its tag, in a box or behind ####, wherever it stands."""
    return answer_tag(text) or last_boxed(text) or after_hash(text)


def _any_answer(text: str) -> str | None:
    text = _ANNOTATION.sub("", text)
    text = turn if (turn := _NEXT_TURN.sub("", text)).strip() else text
    lines = text.strip().splitlines()
    is_marked = bool(lines) and _HASH.match(lines[-1].lstrip()) is not None  # else it is a heading
    marked = answer_tag(text) or last_boxed(text) or (after_hash(text) if is_marked else None)
    return marked or stated_answer(text) or last_expression(text)
