"""Statements of an answer in words: "the answer is 12", "Answer: 12"."""

from __future__ import annotations

import re

from oncurve.rewards.grammar.equality import read
from oncurve.rewards.grammar.lexemes import Unreadable
from oncurve.rewards.grammar.values import Tree

MAX_CLAUSE_CHARACTERS = 2_000
"""Characters at the end of a text in which a statement is looked for."""
MAX_WORDS = 6
"""Words without a number that may be an answer."""

_NOUN = (
    r"(?:(?<![a-z])answer|(?<!\w)(?:antwort|lösung|ergebnis|respuesta|réponse|reponse|risposta|resposta|ответ|उत्तर)"
    r"|答案|答え|정답|答)"
)
_STATED = re.compile(
    rf"{_NOUN}(?:\s+(?:to|of|for)\s[^.:\n]{{1,60}}?)?\s*(?:\*\*)?\s*"
    r"(?::|：|(?:is|would be|must be|should be|=|ist|lautet|es|est|è|é)(?![a-zà-ÿ]):?|[是为為はが은는]:?)(?:\*\*)?\s*"
    r"(?:(?:then|thus|therefore|hence|simply|just|exactly|indeed|donc|also|por tanto)[,\s]+)?(?=\S)",
    re.IGNORECASE,
)
_CLAUSE_ENDS = re.compile(
    r"(?<=[^\s.])\.(?=\s|$)|(?<=[a-zA-Z])!(?=\s|$)|\s\((?=[a-zA-Z]{2})|,?\s(?:because|since|as|where|which|so that)\s"
    r"|。|입니다|です|है।"
)
_REVISED = re.compile(
    r"(?<![a-z])(?:wait|no|not|actually|correct(?:ion|ing|ed)|sorry|instead|wrong|incorrect|mistake|error|but|or"
    r"|however|should|hmm|oops|re-?check(?:ed|ing)?|alternatively|rather|except|unless|final|cannot)(?![a-z])"
    r"|n['’]t(?![a-z])|\?",
    re.IGNORECASE,
)
"""Words behind a stated answer after which another one may count."""
DENIED = re.compile(r"(?:不是|ではない|ではありません|じゃない|아닙|아니)")
"""Denials that stand behind what they deny."""
_SAYS_NOTHING = re.compile(
    r"(?:the |as |given |shown |found |stated )*(?:above|below|clear|obvious|simple|correct|right|wrong|follows|this"
    r"|that|it|same|unknown)",
    re.IGNORECASE,
)
REFUSED = re.compile(r"(?:,|\s+and|,\s+and)\s+not\s+[-$\\\d.,/]+\W*$")
"""A number that the text says the answer is not: 36, not 35."""
MARKUP = re.compile(r"\*\*|`|<\|\w+\|>|^[ \t]*=?>\s+", re.MULTILINE)
"""Marks of emphasis and quotation, and special tokens."""
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PLAIN_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}(?![a-zA-Z])")


def formulas(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of everything between delimiters of mathematics; two amounts in dollars are none.

    >>> formulas("It is $x$, for $5 and not $6")
    [(6, 9, 'x')]
    """
    spans, position = [], 0
    while (match := _FORMULA.search(text, position)) is not None:
        content = next(group for group in match.groups() if group is not None)
        around = re.sub(r"\\text\s*\{[^{}]*\}", "", content)
        is_money = match[2] is not None and content[0].isdigit() and _PLAIN_WORD.search(around) is not None
        position = match.start() + 1 if is_money else match.end()
        if not is_money:
            spans.append((match.start(), match.end(), content.strip()))
    return spans


def stated_answer(text: str) -> str | None:
    """The answer, or the few words, of the last "the answer is ..." or "Answer: ..."; None if there is none, or if what
    stands behind it may take it back.

    >>> [stated_answer(text) for text in ("The answer is 12. (Check: 12 - 7 = 5.)", "Answer: 12. No, it is 13.")]
    ['12', None]
    """
    text = text[-MAX_CLAUSE_CHARACTERS:]
    matches = list(_STATED.finditer(text))
    if not matches:
        return None
    start = matches[-1].end()
    line = text[start:].partition("\n")[0]
    end = _CLAUSE_ENDS.search(line)
    clause = line[: end.start()] if end else line
    behind = text[start + len(clause) :]
    clause = REFUSED.sub("", clause)
    if _REVISED.search(behind) or DENIED.search(line):
        return None
    plain = MARKUP.sub("", clause).strip().rstrip(" .")
    if any(sign.isdigit() or sign in "$\\" for sign in clause):
        return None if not plain or is_computation(plain) or _STATED.search(plain) else plain
    phrase = plain.strip(" .,:;\"'")
    is_answer = phrase and len(phrase.split()) <= MAX_WORDS and not any(sign.isdigit() for sign in behind)
    return phrase if is_answer and not _SAYS_NOTHING.fullmatch(phrase) else None


def is_computation(text: str) -> bool:
    """Arithmetic of numbers alone that nobody has worked out; a fraction and a power of ten are none.

    >>> [is_computation(text) for text in ("5 + 7", "3/4", r"6 \\times 10^3", "5 + 7 = 12")]
    [True, False, False, False]
    """
    if "=" in text or len(text) > 200:
        return False
    try:
        value = read(text)
    except Unreadable:
        return False
    tree = getattr(value, "tree", None)
    if not isinstance(tree, Tree) or tree.symbols() or tree.kind not in ("sum", "product"):
        return False
    if tree.kind == "sum":
        return True
    factors = [part for part in tree.parts if not (part.kind == "number" and part.value in (1, -1))]
    plain = [part for part in factors if part.kind == "number"]
    powers = [part for part in factors if part.kind == "power" and part.parts[0].kind == "number"]
    is_scientific = len(plain) == len(powers) == 1 and powers[0].parts[0].value == 10
    is_fraction = len(factors) == 2 and len(plain) == 1 and len(powers) == 1 and powers[0].parts[1].value == -1
    has_constant = any(part.kind not in ("number", "power", "sum", "product") for part in factors)
    return (
        not (is_scientific or is_fraction or has_constant)
        and len(factors) > 1
        and len(plain) + len(powers) == len(factors)
        and len(plain) > 1
    )
