"""Places of the final answer in a completion: tag, box, ####, statement."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from oncurve.rewards.grammar.choices import chosen_letter
from oncurve.rewards.prose import last_expression
from oncurve.rewards.statement import stated_answer
from oncurve.rewards.thinking import after_thinking

AnswerSource = Literal["marked", "boxed", "answer_tag", "hash", "prose", "choice"]
"""Where the recipe asks for the answer. "marked" takes the first of these that there is: the tag, the box, #### on the
last line, a statement; "prose" also the last expression; "choice" the letter of an option there."""

AnswerLocation = Literal["box", "tag", "hash", "statement", "prose", "nowhere"]
"""Where an answer was found."""
LOCATIONS: tuple[AnswerLocation, ...] = get_args(AnswerLocation)

MAX_TEXT_CHARACTERS = 50_000
"""Only the end of a longer text is searched: the answer comes last, and a megabyte must cost no more than this."""

_BARE_BOX = re.compile(
    r"\\(?:boxed|fbox)(?![{a-zA-Z])\s*(?!\s*\{)"
    r"(?![a-zA-Z]{2}|[.,;:!?)\]])((?:\\[a-zA-Z]+(?:\{[^{}]*\})*|[^\s${}\\`*])+)"
)
"""A box without braces around what stands in it."""
_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)
_HASH = re.compile(r"(?<!#)####(?!#)")
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:,|;|(?:,\s*)?\\?(?:text\{\s*)?(?:and|or)(?:\s*\})?|&)[\s$]*")
_NAMED = re.compile(r"[a-zA-Z]\s*=[\s$]*$")
_ANNOTATION = re.compile(r"<<[^<>\n]{0,200}>>")
"""The calculator's part of GSM8K's solutions: ``3+4=<<3+4=7>>7``."""
_NEXT_TURN = re.compile(r"^[ \t]*(?:human|user)\s*:.*", re.MULTILINE | re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LocatedAnswer:
    """The answer of a completion and where it was found."""

    text: str | None
    """None if there is none."""
    location: AnswerLocation


def last_boxed(text: str) -> str | None:
    r"""The content of the last box that closes and holds something; "" if all are empty, None if there is none.

    Of nested boxes the outer one counts. Boxes with nothing but commas, "and" or "or" between them are one list.

    >>> last_boxed(r"so \boxed{3}, no: \boxed{\frac{1}{2}}"), last_boxed(r"\boxed{3} and \boxed{5}")
    ('\\frac{1}{2}', '3, 5')
    """
    text = text[-MAX_TEXT_CHARACTERS:].replace("\\\\boxed", "\\boxed").replace("\\\\fbox", "\\fbox")
    text = _BARE_BOX.sub(lambda box: f"\\boxed{{{box[1].rstrip('.,;:')}}}", text)
    boxes = _boxes(text)
    while len(boxes) > 1 and not text[boxes[-1][1] : boxes[-1][2]].strip():
        boxes.pop()
    if not boxes:
        return None
    contents = [text[boxes[-1][1] : boxes[-1][2]].strip()]
    for left, right in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        name = _NAMED.search(text[max(left[0] - 20, 0) : left[0]])  # x = 3 or x = 5
        if not _BETWEEN_BOXES.fullmatch(text[left[2] + 1 : right[0]].removesuffix(name.group() if name else "")):
            break
        contents.insert(0, text[left[1] : left[2]].strip())
    return ", ".join(contents)


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Where each outermost box begins, and where its content begins and ends."""
    open_braces: list[tuple[int, int] | None] = []  # where a box and its content start; None for any other brace
    boxes: list[tuple[int, int, int]] = []
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                while boxes and boxes[-1][0] > box[0]:
                    boxes.pop()  # inside of this one
                boxes.append((*box, match.start()))
        elif token.endswith("{") and len(token) > 2:
            open_braces.append((match.start(), match.end()))
    return boxes


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


def marked_answer(text: str) -> str | None:
    """The answer in its tag, in a box or behind ####, wherever it stands."""
    return answer_tag(text) or last_boxed(text) or after_hash(text)


def find_answer(text: str, source: AnswerSource) -> str | None:
    r"""The final answer at the asked place, without a box around it; None if the place is empty or missing.

    The thinking is never read.

    >>> find_answer(r"</think> <answer> \boxed{15} </answer>", "answer_tag")
    '15'
    """
    return locate_answer(text, source).text


def locate_answer(text: str, source: AnswerSource) -> LocatedAnswer:
    """The same, and where it was found."""
    spoken = after_thinking(text)
    match source:
        case "boxed":
            located = _first((("box", last_boxed(spoken)),))
        case "answer_tag":
            located = _first((("tag", _stated_in(answer_tag(spoken))),))
        case "hash":
            located = _first((("hash", _stated_in(after_hash(spoken))),))
        case "choice":
            return _choice(spoken[-MAX_TEXT_CHARACTERS:])
        case "marked" | "prose":
            located = _marked(spoken, takes_prose=source == "prose")
    inner = None if located.text is None else last_boxed(located.text)
    return located if inner is None else LocatedAnswer(inner or None, located.location if inner else "nowhere")


def _first(candidates: tuple[tuple[AnswerLocation, str | None], ...]) -> LocatedAnswer:
    for name, text in candidates:
        if text:
            return LocatedAnswer(text, name)
    return LocatedAnswer(None, "nowhere")


def _stated_in(content: str | None) -> str | None:
    """The answer that a sentence in a marked place states; the whole content where it states none."""
    return content and (stated_answer(content) or content)


def _marked(spoken: str, *, takes_prose: bool) -> LocatedAnswer:
    text = _ANNOTATION.sub("", spoken[-MAX_TEXT_CHARACTERS:])
    text = turn if (turn := _NEXT_TURN.sub("", text)).strip() else text
    lines = text.strip().splitlines()
    is_hashed = bool(lines) and _HASH.match(lines[-1].lstrip()) is not None  # else it is a heading
    located = _first(
        (
            ("tag", _stated_in(answer_tag(text))),
            ("box", last_boxed(text)),
            ("hash", _stated_in(after_hash(text)) if is_hashed else None),
            ("statement", stated_answer(text)),
        )
    )
    if located.text is None and takes_prose:
        return _first((("prose", last_expression(text)),))
    return located


def _choice(spoken: str) -> LocatedAnswer:
    """The letter in a marked place, or else the one that the text commits to."""
    for name, marked in (("tag", answer_tag(spoken)), ("box", last_boxed(spoken)), ("hash", after_hash(spoken))):
        if marked and ((letter := chosen_letter(marked)) or re.search(r"\b[A-J]\b", marked)):
            return _first(((name, letter),))  # type: ignore[arg-type]
    return _first((("statement", chosen_letter(spoken)),))
