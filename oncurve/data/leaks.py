"""Prompts that give their own solution away."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from oncurve.core.records import Prompt
from oncurve.data.datasets import question_key
from oncurve.data.prompts import CALCULATOR_MARK
from oncurve.stats import wilson_interval

MIN_SENTENCE_CHARACTERS = 24
"""A shorter sentence of a solution ("So she has 5 left.") can stand in a question by chance."""
MIN_SOLUTION_CHARACTERS = 12
"""The same for a whole solution, or for an answer outside the question."""

_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


def leaked_excerpt(prompt: Prompt, row: Mapping[str, Any], *, few_shot: Sequence[Mapping[str, Any]] = ()) -> str | None:
    r"""An excerpt of the row's solution that stands in its prompt; None if there is none.

    Looked for, without regard to case and white space: the question among the few-shot examples; the answer in the
    form of an answer (``\boxed{5}``, ``#### 5``, ``<answer> 5 </answer>``) more often than the examples explain; the
    whole worked solution; half of its sentences or more, anywhere; a single sentence of it or a long answer, outside
    the question. A bare "5" is no leak: short answers stand in many questions by chance, and so do single sentences
    that a solution repeats from its question.
    """
    question, answer = _flat(str(row["question"])), _flat(str(row["answer"]))
    if any(question_key(str(example["question"])) == question_key(str(row["question"])) for example in few_shot):
        return f"few-shot example: {question}"
    text = _flat(prompt.text)
    marked = _marked_answer(text, answer, few_shot)
    if marked is not None:
        return marked
    pieces = [piece for example in few_shot for piece in (_flat(str(example["question"])), _solution_of(example))]
    for piece in pieces:
        text = text.replace(piece, " ") if len(piece) >= MIN_SOLUTION_CHARACTERS else text
    solution = _solution_of(row)
    if len(solution) >= MIN_SOLUTION_CHARACTERS and solution in text:
        return solution
    outside = text.replace(question, " ", 1)
    is_in_example = any(_flat(str(example["answer"])) == answer for example in few_shot)
    if len(answer) >= MIN_SOLUTION_CHARACTERS and answer in outside and not is_in_example:
        return answer
    sentences = _sentences_of(row)
    repeated = [sentence for sentence in sentences if sentence in text]
    alone = [sentence for sentence in repeated if sentence in outside]
    return next(iter(alone), None) or (
        repeated[0] if len(repeated) >= 2 and 2 * len(repeated) >= len(sentences) else None
    )


def _flat(text: str) -> str:
    return " ".join(CALCULATOR_MARK.sub("", text).casefold().split())


def _solution_of(row: Mapping[str, Any]) -> str:
    return _flat(str(row.get("solution") or ""))


def _sentences_of(row: Mapping[str, Any]) -> list[str]:
    """The longer sentences of a solution, flat; code of a drawing is no sentence, and questions often share it."""
    text = _DRAWING.sub("\n", str(row.get("solution") or ""))
    sentences = [_flat(part) for part in _SENTENCE_END.split(text)]
    return [sentence for sentence in sentences if len(sentence) >= MIN_SENTENCE_CHARACTERS]


def _marked_answer(text: str, answer: str, few_shot: Sequence[Mapping[str, Any]]) -> str | None:
    """The answer as it would be given, if it stands in the text more often than the examples explain."""
    gold = re.escape("".join(answer.split()))
    marks = re.compile(rf"\\boxed\{{{gold}\}}|<answer>{gold}</answer>|####{gold}(?![\d.,/])")
    matches = marks.findall("".join(text.split()))
    num_expected = sum(
        len(marks.findall("".join(_solution_of(example).split()))) + (_flat(str(example["answer"])) == answer)
        for example in few_shot
    )
    return matches[0] if gold and len(matches) > num_expected else None


LOOKED_AT = 2_000
"""Rows whose questions are searched for answers."""
FEWEST = 10
"""Fewest rows with an answer of which a share says anything."""
EXCESS, CERTAIN = 0.1, 0.3
"""Share of the questions with their own answer, above that with the answers of other rows, from which it is said;
it is 0.02 at most in GSM8K, MATH-500 and the generated problems. And the excess from which no word has to mark them."""


def copied_answers(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, str, int] | None:
    """The share of rows whose own answer stands in the question, the same share with the answers of other rows, the
    word before it in most of them, or none, and the first such row; None where the two shares hardly differ.

    Options of a multiple choice stand in every question, whosever answer they are, so that both shares are high.
    """
    answered = [(index, row) for index, row in enumerate(rows[:LOOKED_AT]) if _flat(str(row.get("answer") or ""))]
    questions = [_flat(str(row["question"])) for _, row in answered]
    answers = [_flat(str(row["answer"])) for _, row in answered]
    if len(answered) < FEWEST:
        return None
    own = [_index_of(question, answer) for question, answer in zip(questions, answers, strict=True)]
    num_own = sum(position is not None for position in own)
    share = num_own / len(own)
    half = len(answers) // 2  # rows beside each other may belong together
    others = [
        [_index_of(question, answers[(index + shift) % len(answers)]) for index, question in enumerate(questions)]
        for shift in (half, half + 1, half + 2)
    ]
    chance = sum(position is not None for indices in others for position in indices) / (3 * len(own))
    if share - chance < EXCESS or wilson_interval(num_own, len(own))[0] <= chance:
        return None
    before = Counter(
        " ".join(question[:position].split()[-1:])
        for question, position in zip(questions, own, strict=True)
        if position is not None
    )
    words, count = before.most_common(1)[0]
    unmarked = [question for question, position in zip(questions, own, strict=True) if position is None]
    if share - chance < CERTAIN and sum(words in question.split() for question in unmarked) > EXCESS * len(unmarked):
        return None  # that word is of the question and not of a leak: the answer is one of its numbers by chance
    first = next(index for (index, _), position in zip(answered, own, strict=True) if position is not None)
    return share, chance, words if count > share * len(own) / 2 else "", first


def _index_of(question: str, answer: str) -> int | None:
    """The last position of an answer in a question, where it is no part of a longer word or number."""
    matches = list(re.finditer(rf"(?<![\w.,])(?<!\d-){re.escape(answer)}(?![\w]|[.,]\d)", question))
    return matches[-1].start() if matches else None
