"""Generated word problems with numbers too long to work out by heart, for a policy that may call a calculator.

A problem has one operation, or two, where the second takes the result of the first. The demonstrations come from three
sources with habits of their own: a textbook that calls the calculator, sometimes with a slip; an answer key that
guesses; a forum that mostly calls it in a form that it cannot read, or forgets the second operation. A model trained on
them can copy numbers and knows the tags, and calls the calculator rightly in about a quarter of all problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Literal
from zlib import crc32

from oncurve.core.errors import DataError
from oncurve.tasks.program_problems import PROMPT
from oncurve.tasks.word_problems import MIXTURE, NAMES, SOURCES, SPLIT_OF_TENTH, STORIES, THINGS, Source, Split

TAGS = ("<tool>", "</tool>", "<result>", "</result>")
"""Tags of calls and their answers, besides those of every small tokenizer."""
UNREADABLE = "error: ValueError: not an arithmetic expression"
"""The calculator's answer to words instead of an expression."""
MOST_DIGITS = {1: 5, 2: 4}
"""Most digits of the numbers in a story, by the number of its operations."""
CALL_LESSON_FRACTION = 0.7
"""Fraction of the lessons that copy numbers inside calls. With two operations, only these copy a result into a call."""
Operations = Literal[1, 2]
Part = tuple[str, bool]
"""A text, and whether it is learned from: the calculator's own words are not."""
Demonstration = tuple[str, tuple[Part, ...]]
"""A prompt and the parts of its completion."""


@dataclass(frozen=True, slots=True)
class CalculatorProblem:
    """One problem.

    Example: ``CalculatorProblem(question="Anna has 32882 shells. She loses 5664 shells. ...", answer="27218",
    expression="32882-5664")``
    """

    question: str
    answer: str
    expression: str


@dataclass(frozen=True, slots=True)
class _Sum:
    """One operation."""

    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        match self.sign:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
        return self.left * self.right

    @property
    def text(self) -> str:
        return f"{self.left}{self.sign}{self.right}"


def calculator_problems(
    split: Split, count: int, *, seed: int = 0, operations: Operations = 1
) -> list[CalculatorProblem]:
    """The first ``count`` problems of a split; the splits share no pair of numbers to begin with, whatever the seed."""
    problems: dict[str, CalculatorProblem] = {}
    for drawn, question, _ in _drafts(split, Random(f"calculator {operations} {split} {seed}"), operations):
        if question not in problems:
            expression = drawn[0].text + "".join(f"{later.sign}{later.right}" for later in drawn[1:])
            problems[question] = CalculatorProblem(question, str(drawn[-1].result), expression)
        if len(problems) == count:
            break
    return list(problems.values())


def calculator_lessons(count: int, *, seed: int = 0, operations: Operations = 1) -> list[Demonstration]:
    """Numbers to copy, from the story and from where results will stand. No lesson teaches to call the calculator.

    The results have nothing to do with the story. Half of them are made of few different digits, which are the hardest
    to copy. Most lessons copy numbers where calls and answers have them, but the tags that open those are given, not
    learned.
    """
    rng = Random(f"calculator lessons {operations} {seed}")
    pairs: list[Demonstration] = []
    for drawn, question, _ in _drafts("train", rng, operations, few_digits=0.15):
        parts = _copied_in_calls(drawn, rng) if rng.random() < CALL_LESSON_FRACTION else _copied_in_text(drawn, rng)
        pairs.append((PROMPT.format(question=question), parts))
        if len(pairs) == count:
            break
    return pairs


def _copied_in_text(drawn: tuple[_Sum, ...], rng: Random) -> tuple[Part, ...]:
    """The story's expressions in running text, and two results between the tags of a result and an answer."""
    parts: list[Part] = []
    number_text = drawn[0].left
    for step in drawn:
        call, number_text = f" {number_text}{step.sign}{step.right} gives", _elsewhere(rng)
        parts += [(call, True), (f" {number_text}", False), (f", {number_text}.", True)]
    for number in (_elsewhere(rng), _elsewhere(rng)):
        parts += [(f"<result>{number}</result>", False), (f"<answer>{number}</answer>", True)]
    return tuple(parts)


def _copied_in_calls(drawn: tuple[_Sum, ...], rng: Random) -> tuple[Part, ...]:
    """The story's expressions in calls, and the last result in an answer."""
    parts: list[Part] = []
    number_text = drawn[0].left
    for step in drawn:
        call, number_text = f"{number_text}{step.sign}{step.right}</tool>", _elsewhere(rng)
        parts += [("<tool>" if parts else " <tool>", False), (call, True), (f"<result>{number_text}</result>", False)]
    return (*parts, ("<answer>", False), (f"{number_text}</answer>", True))


def calculator_demonstrations(
    count: int, *, seed: int = 0, habit: float = 0.6, operations: Operations = 1
) -> list[Demonstration]:
    """Imperfect episodes: with probability ``habit`` from the source that the question sounds like."""
    rng = Random(f"calculator demonstrations {operations} {seed}")
    pairs: list[Demonstration] = []
    for drawn, question, register in _drafts("train", rng, operations):
        source = register if rng.random() < habit else rng.choices(SOURCES, MIXTURE)[0]
        pairs.append((PROMPT.format(question=question), _episode(drawn, source, rng)))
        if len(pairs) == count:
            break
    return pairs


def _episode(drawn: tuple[_Sum, ...], source: Source, rng: Random) -> tuple[Part, ...]:
    roll = rng.random()
    match source:
        case "textbook" if roll < 0.70:
            return _called(drawn)
        case "textbook" if roll < 0.85:
            return _called(_slipped(drawn, rng))
        case "textbook":
            return (*_called(drawn)[:-1], _answer(_guessed(drawn[-1].result, rng)))
        case "answer_key":
            answer = drawn[-1].result if rng.random() < 0.05 else _guessed(drawn[-1].result, rng)
            return ((f" <answer>{answer}</answer>", True),)
        case "forum" if roll < 0.60:
            return _misread(drawn, rng) if len(drawn) == 1 else _called(drawn[:1])
        case "forum" if roll < 0.80:
            return _called(_slipped(drawn, rng))
    *first, last = drawn
    others = [sign for sign in ("+-" if first else "+-*") if sign != last.sign]
    return _called((*first, replace(last, sign=rng.choice(others))))


def _called(drawn: tuple[_Sum, ...]) -> tuple[Part, ...]:
    """Each call and what the calculator says, and its last result as the answer."""
    parts: list[Part] = []
    for step in drawn:
        parts += [(f"{'' if parts else ' '}<tool>{step.text}</tool>", True), (f"<result>{step.result}</result>", False)]
    return (*parts, _answer(drawn[-1].result))


def _misread(drawn: tuple[_Sum, ...], rng: Random) -> tuple[Part, ...]:
    """A call that the calculator cannot read, and a guess."""
    call, result = f" <tool>{drawn[0].left} {drawn[0].right}</tool>", f"<result>{UNREADABLE}</result>"
    return (call, True), (result, False), _answer(_guessed(drawn[-1].result, rng))


def _answer(number: int) -> Part:
    return f"<answer>{number}</answer>", True


def _slipped(drawn: tuple[_Sum, ...], rng: Random) -> tuple[_Sum, ...]:
    """One digit of the first number is another one; what follows works on its result."""
    digits = list(str(drawn[0].left))
    index = rng.randrange(1, len(digits))
    digits[index] = str((int(digits[index]) + rng.randint(1, 9)) % 10)
    first = replace(drawn[0], left=int("".join(digits)))
    return first, *(replace(later, left=first.result) for later in drawn[1:])


def _guessed(result: int, rng: Random) -> int:
    """The right first digit and length, the rest by heart."""
    text = str(result)
    first, rest = (text[:2], text[2:]) if text.startswith("-") else (text[:1], text[1:])
    return int(first + "".join(str(rng.randint(0, 9)) for _ in rest))


def _elsewhere(rng: Random) -> int:
    """A number of two to six digits that has nothing to do with the story; each length comes equally often."""
    return _number(rng, 2, 6, few_digits=0.5)


def _number(rng: Random, shortest: int, longest: int, *, few_digits: float) -> int:
    """A number of so many digits, with some probability of only two or three different ones."""
    length = rng.randint(shortest, longest)
    if rng.random() >= few_digits:
        return rng.randint(10 ** (length - 1), 10**length - 1)
    chosen = rng.sample("0123456789", rng.randint(2, 3))
    first = rng.choice([digit for digit in chosen if digit != "0"])
    return int(first + "".join(rng.choice(chosen) for _ in range(length - 1)))


def _drafts(
    split: Split, rng: Random, operations: Operations, *, few_digits: float = 0.0
) -> Iterator[tuple[tuple[_Sum, ...], str, Source]]:
    """Operations of a split, each told as a story in a register."""
    if split not in SPLIT_OF_TENTH:
        raise DataError(f"calculator problems: there is no split {split!r}; use train, validation or test")
    while True:
        drawn = _draw(rng, operations, few_digits)
        low, high = sorted((drawn[0].left, drawn[0].right))
        if drawn[-1].result >= 0 and SPLIT_OF_TENTH[crc32(f"{low},{high}".encode()) % 10] == split:
            yield drawn, *_tell(drawn, rng)


def _draw(rng: Random, operations: Operations, few_digits: float) -> tuple[_Sum, ...]:
    longest = MOST_DIGITS[operations]
    sign = rng.choice("+-*" if operations == 1 else "+-")
    if sign == "*":
        return (_Sum(_number(rng, 3, 3, few_digits=few_digits), "*", rng.randint(2, 3)),)
    left, right = (_number(rng, 3, longest, few_digits=few_digits) for _ in range(2))
    first = _Sum(left, "+", right) if sign == "+" else _Sum(max(left, right), "-", min(left, right))
    if operations == 1:
        return (first,)
    return first, _Sum(first.result, rng.choice("+-"), _number(rng, 3, longest, few_digits=few_digits))


def _tell(drawn: tuple[_Sum, ...], rng: Random) -> tuple[str, Source]:
    family = rng.choice(tuple(STORIES))
    register = rng.choices(SOURCES, MIXTURE)[0]
    story = STORIES[family][register]
    fillers = {"who": rng.choice(NAMES), "x": rng.choice(THINGS[family])}
    if drawn[0].sign == "*":
        clauses = [story.boxes.format(n=drawn[0].left, k=drawn[0].right, **fillers)]
    else:
        clauses = [story.start.format(n=drawn[0].left, **fillers)]
        for change in drawn:
            wordings = story.gain if change.sign == "+" else story.loss
            clauses.append(rng.choice(wordings).format(n=change.right, **fillers))
    return " ".join([*clauses, story.ask.format(**fillers)]), register
