"""Generated word problems of two operations, for a policy that calls the calculator twice.

The second call takes the first result. The demonstrations have the three sources of the problems of one operation; the
forum mostly forgets the second change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from zlib import crc32

from oncurve.errors import DataError
from oncurve.tasks.calculator_problems import (
    PROMPT,
    CalculatorProblem,
    Demonstration,
    Part,
    Sum,
    asked,
    few_distinct_digits,
    guessed,
    slipped,
)
from oncurve.tasks.stories import NAMES, STORIES, THINGS, Source
from oncurve.tasks.word_problems import MIXTURE, SOURCES, SPLIT_OF_TENTH, Split


@dataclass(frozen=True, slots=True)
class _Chain:
    """An operation, and one on its result."""

    first: Sum
    second: Sum

    @property
    def result(self) -> int:
        return self.second.result


def calculator_chains(split: Split, count: int, *, seed: int = 0) -> list[CalculatorProblem]:
    """The first ``count`` problems of a split; the splits share no pair of numbers to begin with, whatever the seed."""
    rng = Random(f"calculator chains {split} {seed}")
    found: list[CalculatorProblem] = []
    seen: set[str] = set()
    for drawn, question, _ in _drafts(split, rng):
        if question not in seen:
            seen.add(question)
            first, second = drawn.first, drawn.second
            expression = f"{first.left}{first.sign}{first.right}{second.sign}{second.right}"
            found.append(CalculatorProblem(question, str(drawn.result), expression))
            if len(found) == count:
                break
    return found


def chain_lessons(count: int, *, seed: int = 0) -> list[Demonstration]:
    """Numbers to copy, without any tags: those of the story, and results that come from elsewhere."""
    rng = Random(f"chain lessons {seed}")
    pairs: list[Demonstration] = []
    for drawn, question, _ in _drafts("train", rng, few_digits=0.15):
        first, second = (_elsewhere(rng) for _ in range(2))
        said = (
            (f" {drawn.first.left}{drawn.first.sign}{drawn.first.right} gives", True),
            (f" {first}", False),
            (f", {first}{drawn.second.sign}{drawn.second.right} gives", True),
            (f" {second}", False),
            (f", {second}.", True),
        )
        pairs.append((PROMPT.format(question=question), said))
        if len(pairs) == count:
            break
    return pairs


def chain_demonstrations(count: int, *, seed: int = 0, habit: float = 0.6) -> list[Demonstration]:
    """Imperfect episodes: with probability ``habit`` from the source that the question sounds like."""
    rng = Random(f"chain demonstrations {seed}")
    pairs: list[Demonstration] = []
    for drawn, question, register in _drafts("train", rng):
        source = register if rng.random() < habit else rng.choices(SOURCES, MIXTURE)[0]
        pairs.append((PROMPT.format(question=question), _episode(drawn, source, rng)))
        if len(pairs) == count:
            break
    return pairs


def _episode(drawn: _Chain, source: Source, rng: Random) -> tuple[Part, ...]:
    roll = rng.random()
    match source:
        case "textbook" if roll < 0.70:
            return _called(drawn)
        case "textbook" if roll < 0.85:
            return _called(_followed(slipped(drawn.first, rng), drawn))
        case "textbook":
            return (*_called(drawn)[:-1], (f"<answer>{guessed(drawn.result, rng)}</answer>", True))
        case "answer_key":
            answer = drawn.result if rng.random() < 0.05 else guessed(drawn.result, rng)
            return ((f" <answer>{answer}</answer>", True),)
        case "forum" if roll < 0.60:
            return (*_spaced(drawn.first), (f"<answer>{drawn.first.result}</answer>", True))
        case "forum" if roll < 0.80:
            return _called(_followed(slipped(drawn.first, rng), drawn))
    return _called(_Chain(drawn.first, replace(drawn.second, sign="-" if drawn.second.sign == "+" else "+")))


def _called(drawn: _Chain) -> tuple[Part, ...]:
    return (*_spaced(drawn.first), *asked(drawn.second), (f"<answer>{drawn.result}</answer>", True))


def _spaced(drawn: Sum) -> tuple[Part, ...]:
    (call, is_learned), told = asked(drawn)
    return (f" {call}", is_learned), told


def _followed(first: Sum, drawn: _Chain) -> _Chain:
    """Another first operation, on whose result the second works."""
    return _Chain(first, replace(drawn.second, left=first.result))


def _elsewhere(rng: Random) -> int:
    """A result that has nothing to do with the story, half of the time of few different digits."""
    return few_distinct_digits(rng, rng.randint(3, 5)) if rng.random() < 0.5 else rng.randint(100, 29_997)


def _drafts(split: Split, rng: Random, *, few_digits: float = 0.0) -> Iterator[tuple[_Chain, str, Source]]:
    """Pairs of operations of a split, each told as a story in a register."""
    if split not in SPLIT_OF_TENTH:
        raise DataError(f"calculator problems: there is no split {split!r}; use train, validation or test")
    while True:
        drawn = _draw(rng, few_digits)
        low, high = sorted((drawn.first.left, drawn.first.right))
        if drawn.result >= 0 and SPLIT_OF_TENTH[crc32(f"{low},{high}".encode()) % 10] == split:
            yield drawn, *_tell(drawn, rng)


def _draw(rng: Random, few_digits: float) -> _Chain:
    def number() -> int:
        length = rng.randint(3, 4)
        if rng.random() < few_digits:
            return few_distinct_digits(rng, length)
        return rng.randint(10 ** (length - 1), 10**length - 1)

    left, right = number(), number()
    first = Sum(left, "+", right) if rng.random() < 0.5 else Sum(max(left, right), "-", min(left, right))
    return _Chain(first, Sum(first.result, "+" if rng.random() < 0.5 else "-", number()))


def _tell(drawn: _Chain, rng: Random) -> tuple[str, Source]:
    family = rng.choice(tuple(STORIES))
    register = rng.choices(SOURCES, MIXTURE)[0]
    story = STORIES[family][register]
    words = {"who": rng.choice(NAMES), "x": rng.choice(THINGS[family])}
    clauses = [story.start.format(n=drawn.first.left, **words)]
    for change in (drawn.first, drawn.second):
        wordings = story.gain if change.sign == "+" else story.loss
        clauses.append(rng.choice(wordings).format(n=change.right, **words))
    clauses.append(story.ask.format(**words))
    return " ".join(clauses), register
