"""Generated word problems with numbers too long to work out by heart, for a policy that may call a calculator.

The demonstrations come from three sources with habits of their own: a textbook that calls the calculator, sometimes
with a slip; an answer key that guesses; a forum that mostly calls it in a form that it cannot read. A model trained on
them can copy numbers and knows the tags, and calls the calculator rightly in about a quarter of all problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal
from zlib import crc32

from oncurve.errors import DataError
from oncurve.tasks.stories import NAMES, STORIES, THINGS, Source
from oncurve.tasks.word_problems import MIXTURE, SOURCES, SPLIT_OF_TENTH, Split

PROMPT = "User: {question}\nAssistant:"
TAGS = ("<tool>", "</tool>", "<result>", "</result>")
"""Of calls and their answers, besides those of every small tokenizer."""
UNREADABLE = "error: ValueError: not an arithmetic expression"
"""What the calculator answers to the forum."""
Part = tuple[str, bool]
"""A text, and whether it is learned from: the calculator's own words are not."""
Demonstration = tuple[str, tuple[Part, ...]]
"""A prompt and the parts of its completion."""


@dataclass(frozen=True, slots=True)
class CalculatorProblem:
    """One problem of one operation.

    Example: ``CalculatorProblem(question="Anna has 32882 shells. She loses 5664 shells. ...", answer="27218",
    expression="32882-5664")``
    """

    question: str
    answer: str
    expression: str


@dataclass(frozen=True, slots=True)
class Sum:
    """One operation."""

    left: int
    sign: Literal["+", "-", "*"]
    right: int

    @property
    def result(self) -> int:
        """Its value."""
        match self.sign:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case "*":
                return self.left * self.right


def calculator_problems(split: Split, count: int, *, seed: int = 0) -> list[CalculatorProblem]:
    """The first ``count`` problems of a split; the splits share no pair of numbers, whatever the seed."""
    rng = Random(f"calculator problems {split} {seed}")
    found: list[CalculatorProblem] = []
    seen: set[str] = set()
    for drawn, question, _ in _drafts(split, rng):
        if question not in seen:
            seen.add(question)
            found.append(CalculatorProblem(question, str(drawn.result), f"{drawn.left}{drawn.sign}{drawn.right}"))
            if len(found) == count:
                break
    return found


def calculator_lessons(count: int, *, seed: int = 0) -> list[Demonstration]:
    """Numbers to copy, without any tags: the two of the story into an expression, and one that comes from elsewhere.

    That number is often made of few different digits, which are the hardest to copy.
    """
    rng = Random(f"calculator lessons {seed}")
    pairs: list[Demonstration] = []
    for drawn, question, _ in _drafts("train", rng, few_digits=0.15):
        result = few_distinct_digits(rng, rng.randint(3, 6)) if rng.random() < 0.5 else rng.randint(100, 199_998)
        said = ((f" {drawn.left}{drawn.sign}{drawn.right} gives", True), (f" {result}", False), (f", {result}.", True))
        pairs.append((PROMPT.format(question=question), said))
        if len(pairs) == count:
            break
    return pairs


def calculator_demonstrations(count: int, *, seed: int = 0, habit: float = 0.6) -> list[Demonstration]:
    """Imperfect episodes: with probability ``habit`` from the source that the question sounds like."""
    rng = Random(f"calculator demonstrations {seed}")
    pairs: list[Demonstration] = []
    for drawn, question, register in _drafts("train", rng):
        source = register if rng.random() < habit else rng.choices(SOURCES, MIXTURE)[0]
        pairs.append((PROMPT.format(question=question), _episode(drawn, source, rng)))
        if len(pairs) == count:
            break
    return pairs


def _episode(drawn: Sum, source: Source, rng: Random) -> tuple[Part, ...]:
    roll = rng.random()
    match source:
        case "textbook" if roll < 0.70:
            return called(drawn)
        case "textbook" if roll < 0.85:
            return called(slipped(drawn, rng))
        case "textbook":
            return (*called(drawn)[:2], (f"<answer>{guessed(drawn.result, rng)}</answer>", True))
        case "answer_key":
            answer = drawn.result if rng.random() < 0.05 else guessed(drawn.result, rng)
            return ((f" <answer>{answer}</answer>", True),)
        case "forum" if roll < 0.60:
            call = f" <tool>{drawn.left} {drawn.right}</tool>"
            told = f"<result>{UNREADABLE}</result>"
            return ((call, True), (told, False), (f"<answer>{guessed(drawn.result, rng)}</answer>", True))
        case "forum" if roll < 0.80:
            return called(slipped(drawn, rng))
    return called(Sum(drawn.left, rng.choice([sign for sign in "+-*" if sign != drawn.sign]), drawn.right))  # type: ignore[arg-type]


def asked(drawn: Sum) -> tuple[Part, Part]:
    """A call and what the calculator says."""
    return (f"<tool>{drawn.left}{drawn.sign}{drawn.right}</tool>", True), (f"<result>{drawn.result}</result>", False)


def called(drawn: Sum) -> tuple[Part, ...]:
    """A call, its result and the answer."""
    (call, _), told = asked(drawn)
    return ((f" {call}", True), told, (f"<answer>{drawn.result}</answer>", True))


def slipped(drawn: Sum, rng: Random) -> Sum:
    """One digit of one number is another one."""
    digits = list(str(drawn.left))
    place = rng.randrange(1, len(digits))
    digits[place] = str((int(digits[place]) + rng.randint(1, 9)) % 10)
    return Sum(int("".join(digits)), drawn.sign, drawn.right)


def guessed(result: int, rng: Random) -> int:
    """The right first digit and length, the rest by heart."""
    text = str(result)
    first, rest = (text[:2], text[2:]) if text.startswith("-") else (text[:1], text[1:])
    return int(first + "".join(str(rng.randint(0, 9)) for _ in rest))


def few_distinct_digits(rng: Random, length: int) -> int:
    """A number made of two or three different digits."""
    chosen = rng.sample("0123456789", rng.randint(2, 3))
    first = rng.choice([digit for digit in chosen if digit != "0"])
    return int(first + "".join(rng.choice(chosen) for _ in range(length - 1)))


def _drafts(split: Split, rng: Random, *, few_digits: float = 0.0) -> Iterator[tuple[Sum, str, Source]]:
    """Operations of a split, each told as a story in a register."""
    if split not in SPLIT_OF_TENTH:
        raise DataError(f"calculator problems: there is no split {split!r}; use train, validation or test")
    while True:
        drawn = _draw(rng, few_digits)
        low, high = sorted((drawn.left, drawn.right))
        if SPLIT_OF_TENTH[crc32(f"{low},{high}".encode()) % 10] == split:
            yield drawn, *_tell(drawn, rng)


def _draw(rng: Random, few_digits: float) -> Sum:
    def number(shortest: int, longest: int) -> int:
        length = rng.randint(shortest, longest)
        if rng.random() < few_digits:
            return few_distinct_digits(rng, length)
        return rng.randint(10 ** (length - 1), 10**length - 1)

    sign = rng.choice("+-*")
    if sign == "*":
        return Sum(number(3, 3), "*", rng.randint(2, 3))
    left, right = number(3, 5), number(3, 5)
    return Sum(left, "+", right) if sign == "+" else Sum(max(left, right), "-", min(left, right))


def _tell(drawn: Sum, rng: Random) -> tuple[str, Source]:
    family = rng.choice(tuple(STORIES))
    register = rng.choices(SOURCES, MIXTURE)[0]
    story = STORIES[family][register]
    words = {"who": rng.choice(NAMES), "x": rng.choice(THINGS[family])}
    if drawn.sign == "*":
        clauses = [story.boxes.format(n=drawn.left, k=drawn.right, **words)]
    else:
        wordings = story.gain if drawn.sign == "+" else story.loss
        clauses = [story.start.format(n=drawn.left, **words), rng.choice(wordings).format(n=drawn.right, **words)]
    clauses.append(story.ask.format(**words))
    return " ".join(clauses), register
