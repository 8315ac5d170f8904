"""The letter that a completion chooses among the options of a question, in the forms that MMLU's answers take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

UNSURE = "maybe|perhaps|possibly|probably"

LETTERS = "ABCDEFGHIJ"
"""As many options as MMLU-Pro has."""

_NOUN = r"answer|choice|option|antwort|lösung|respuesta|réponse|reponse|risposta|resposta|答案|答え|정답|ответ"
_VERB = r"(?:is|would be|must be|should be|has to be|ist|lautet|es|est|è|é)(?![a-z])|[是为為:：=-]"
_STATED = re.compile(
    rf"(?:{_NOUN})(?:\s+(?:correct[ae]|corretta|finale?))?\W{{0,8}}?\s*(?:{_VERB})[:\s]*(?:(?:therefore|thus|then|clearly|indeed)[,\s]+)?"
    rf"(?:not (?:option |choice )?\(?[A-J]\)?,? but )?"
    rf"(?:the\s+)?(?:option|choice|letter|answer|选项)?\s*(?:{_VERB})?\s*",
    re.IGNORECASE,
)
"""The words before a stated answer."""
_PICKED = re.compile(
    r"(?<![a-z])(?:option|choice|pick|choose|select|go with|chose)\s+(?:option\s+|choice\s+|answer\s+)?"
    r"(?=\(?[A-J]\)?(?![a-zA-Z]))"
    r"|(?<![a-z])(?:it['’]?s|it is|it (?:has to|must) be|so|going with|opt for)\s+(?=\(?(?-i:[A-H])\)?[.!]?\s*$)"
    r"|(?<!不)选择?\s*(?=[A-J](?![a-zA-Z]))",
    re.IGNORECASE,
)
"""The words before a letter that is picked in passing."""
_IS_RIGHT = re.compile(
    r"(?:^|[,.:;]\s*|\s)(?:option |choice )?(?P<letter>\([A-J]\)|[A-J]) is (?:the )?"
    r"(?:correct|right|true|best|answer)(?: (?:one|answer|choice|option))?\s*[.!]?$"
    r"|(?:^|[,.:;]\s*)[Oo]nly (?P<only>\([A-J]\)|[A-J]) (?:fits|works|matches|remains)(?: best)?\s*[.!]?$"
)
_LETTER = re.compile(
    r"(?:option|choice|answer)?\s*:?\s*"
    r"(?:\((?P<bracketed>[A-Ja-j])\)|(?P<marked>[A-J])(?=\s*[).:,;=])|(?P<alone>[A-J])(?!\w))"
    r"(?P<rest>.*)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\(([A-J])\)|(?<![a-zA-Z0-9(])([A-J])(?=[).:](?!\w))")
_REFUSED = re.compile(
    r"(?:,|;|and|but|–|—|\()?\s*(?:not|rather than|instead of)\s+(?:option\s+|choice\s+)?\(?[A-J]\)?\W*$", re.IGNORECASE
)
_ALONE = re.compile(r"(?:option|choice)?\s*\(?[A-J]\)?[.):]?(?:\s+\S.{0,80})?", re.IGNORECASE)
"""A line that begins with a letter and is a choice, with the text of its option."""
_TURNS = re.compile(r"\b(?:wait|actually|however|instead|but|maybe|perhaps|could|might)\b.*\b[A-J]\b", re.IGNORECASE)
"""A line that may take an earlier letter back."""
_BESIDE = re.compile(
    r"^\s*[).:,;]*\s*[\[(]?(?:[,;/|&]|\b(?:x?or|and|nor|not|plus|as well as|oder|und|ou|et|o|y|e|but|though)\b)+\s*"
    r"(?:(?:or|and|also|maybe|perhaps|possibly|(?:could|may|might) be|option|choice)\s+)*\(?[A-J]\b"
    r"|^\(?[A-J]\b"
)
_DOUBTED = re.compile(
    rf"^\W*(?:but |though )?(?:{UNSURE}|(?:[iI]'?m |[iI] am )?(?:unsure|not sure)|[iI] guess)\b|^\W*\?"
)
_DENIED = re.compile(
    r"^\s*[).:]?\s*(?:(?:is|are|was)\s*(?:not|n't|never|ruled|out|impossible|unlikely|doubtful|excluded)"
    r"|(?:is|are|was)\s*(?:clearly |obviously |also )?(?:wrong|incorrect|false)"
    r"|(?:is|are|was|ca|wo|could|would)n['’]?t\b|cannot|can not)",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"^(?:so|thus|hence|therefore|finally|it's|it is|it must be|(?:i'd|i would) say|then)(?![a-z])[,:]?\s*",
    re.IGNORECASE,
)
_REASON = re.compile(r"^\s*(?:[).:,;=。–—-]|$|\(|because\b|since\b|as\b|for\b|is\b|only\b)", re.IGNORECASE)
_MARKS = re.compile(r"\*\*|__|[`$\"“”'‘’「」]|\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}|[{}\\]")


def chosen_letter(text: str) -> str | None:
    """The letter, in upper case, that a text commits to; None if there is none, or more than one.

    A text is "C", "(C)", "C. Paris", "Answer: C", or prose whose last statement of an answer, or whose last line, is
    one of these.

    >>> [chosen_letter(text) for text in ("So the answer is (C).", "Answer:\\n\\nB. Paris", "A or B", "A cat")]
    ['C', 'B', None, None]
    """
    plain = _MARKS.sub(lambda mark: mark[1] or "", text).strip()
    plain = re.sub(r"\[([A-J])\]", r"(\1)", plain)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        if stated := list(_STATED.finditer(line)):
            rest = line[stated[-1].end() :]
            return _single_letter(rest if rest or index + 1 == len(lines) else lines[index + 1])
        if right := _IS_RIGHT.search(line):
            return (right["letter"] or right["only"]).strip("()")
        for passing in list(_PICKED.finditer(line))[-1:]:
            rest = line[passing.end() :]
            if (letter := _single_letter(rest)) or _is_hedged(rest):
                return letter
    return _single_letter(_LEAD.sub("", lines[-1])) or _first_letter(lines) if lines else None


def _first_letter(lines: list[str]) -> str | None:
    """The letter that is the first line, whose explanation follows and ends in no other one."""
    first = _ALONE.fullmatch(lines[0]) if len(lines) > 1 else None
    if first is None or any(_ALONE.fullmatch(line) or _TURNS.search(line) for line in lines[1:]):
        return None
    return _single_letter(lines[0])


def _is_hedged(text: str) -> bool:
    """The letter at the beginning of a text has another one beside it, or is doubted or denied."""
    match = _LETTER.match(text)
    return match is not None and any(sign.match(match["rest"]) for sign in (_BESIDE, _DOUBTED, _DENIED))


def _single_letter(text: str) -> str | None:
    """The letter at the beginning of a text, unless it is a word, or another letter stands beside it."""
    text = _REFUSED.sub("", text)
    match = _LETTER.match(text)
    if match is None:
        return None
    letter, rest = match["bracketed"] or match["marked"] or match["alone"], match["rest"]
    is_word = match["alone"] is not None and (_REASON.match(rest) is None or (letter.islower() and rest.strip(" .")))
    others = {first or second for first, second in _LABEL.findall(text)} - {letter.upper()}
    if is_word or others or any(sign.match(rest) for sign in (_BESIDE, _DOUBTED, _DENIED)):
        return None
    return letter.upper()


def reference_letter(row: Mapping[str, Any], answer: str) -> str:
    """The letter of a row's reference: written as one, or the text of one of its ``choices`` or ``options``.

    Empty, hence unreadable, if it is neither.
    """
    if letter := chosen_letter(answer):
        return letter
    options = row.get("choices") or row.get("options")
    if isinstance(options, (list, tuple)):
        texts = [str(option).strip() for option in options[: len(LETTERS)]]
        if texts.count(answer.strip()) == 1:
            return LETTERS[texts.index(answer.strip())]
    return ""
