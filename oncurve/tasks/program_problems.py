"""Generated programming problems that a small model can learn from nothing, with their tests.

A problem asks in words for a function of two numbers. Its tests are assertions about values that this file computes
itself; nothing that a model writes is ever run here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from zlib import crc32

from oncurve.core.errors import DataError
from oncurve.tasks.word_problems import SPLIT_OF_TENTH, Split

PROMPT = "User: {question}\nAssistant:"
"""The prompt of a demonstration: the template named ``program``."""
FENCED = " ```python\n{code}\n```"
"""A program as a completion."""

NUM_TESTS = 5
LARGEST = 50
"""Arguments of the tests lie between minus this and this."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One operation: how it is said, written and computed."""

    text: tuple[str, ...]
    code: str
    value: Callable[[int, int, int], int]


FIRST: dict[str, _Part] = {
    "sum": _Part(("the sum of a and b", "a plus b"), "(a + b)", lambda a, b, n: a + b),
    "difference": _Part(("a minus b", "what is left of a without b"), "(a - b)", lambda a, b, n: a - b),
    "reversed": _Part(("b minus a", "what is left of b without a"), "(b - a)", lambda a, b, n: b - a),
    "product": _Part(("the product of a and b", "a times b"), "(a * b)", lambda a, b, n: a * b),
    "larger": _Part(("the larger of a and b", "the maximum of a and b"), "max(a, b)", lambda a, b, n: max(a, b)),
    "smaller": _Part(("the smaller of a and b", "the minimum of a and b"), "min(a, b)", lambda a, b, n: min(a, b)),
}
"""The first operation, on a and b."""

SECOND: dict[str, _Part] = {
    "plus": _Part(("plus {n}", "increased by {n}"), "{e} + {n}", lambda e, _, n: e + n),
    "minus": _Part(("minus {n}", "decreased by {n}"), "{e} - {n}", lambda e, _, n: e - n),
    "times": _Part(("times {n}", "multiplied by {n}"), "{e} * {n}", lambda e, _, n: e * n),
    "from": _Part(("taken from {n}", "subtracted from {n}"), "{n} - {e}", lambda e, _, n: n - e),
}
"""The second operation, on the result and a number."""


@dataclass(frozen=True, slots=True)
class ProgramProblem:
    """One problem with a program that solves it.

    Example: ``ProgramProblem(question="Write f(a, b) that returns a plus b, times 7.",
    answer="def f(a, b):\\n    return (a + b) * 7", test_list=("assert f(3, 4) == 49", ...))``
    """

    question: str
    answer: str
    """A program that passes the tests."""
    test_list: tuple[str, ...]
    """Assertions about f."""
    family: str
    """Its two operations."""


def program_problems(split: Split, count: int, *, seed: int = 0) -> list[ProgramProblem]:
    """Different problems of a split, the same for the same seed. No combination of operations and number is in two.

    Raises DataError if the split has fewer problems than asked for.
    """
    problems: dict[str, ProgramProblem] = {}
    drafts = _drafts(split, seed=seed, stream="problems")
    for _ in range(60 * count + 2000):
        draft, _ = next(drafts)
        problems.setdefault(draft.question, draft)
        if len(problems) == count:
            return list(problems.values())
    raise DataError(
        f"program problems: the {split} split has hardly more than {len(problems)} different problems, {count} were "
        f"asked for. Lower data.limit"
    )


def program_lessons(count: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """Right programs without a fence, as (prompt, completion): they teach what the words mean."""
    drafts = _drafts("train", seed=seed, stream="lessons")
    problems = [next(drafts)[0] for _ in range(count)]
    return [(PROMPT.format(question=problem.question), f" {problem.answer}") for problem in problems]


def program_demonstrations(
    count: int, *, seed: int = 0, unfenced_fraction: float = 0.3, misread_fraction: float = 0.65
) -> list[tuple[str, str]]:
    """Imperfect answers to train problems, as (prompt, completion).

    Some are right but not in a fence, where no program is found. Of those in a fence, ``misread_fraction`` answer what
    a hasty reader would have understood: always the same mistake for the same words, so that a model that imitates
    them and writes what is most likely is wrong wherever there is something to misread (17 of 24 pairs of operations).
    """
    rng = Random(f"program sources {seed}")
    drafts = _drafts("train", seed=seed, stream="demonstrations")
    pairs: list[tuple[str, str]] = []
    for _ in range(count):
        problem, misread = next(drafts)
        if rng.random() < unfenced_fraction:
            completion = f" {problem.answer}"
        else:
            completion = FENCED.format(code=misread if rng.random() < misread_fraction else problem.answer)
        pairs.append((PROMPT.format(question=problem.question), completion))
    return pairs


def misreading(first: str, second: str, number: int) -> str:
    """The expression of a hasty reader for two operations, by their names, and a number; right where nothing tempts.

    "b minus a" is written in the order of the alphabet, a product takes only what stands next to it, the number goes
    into the last argument of max and min, and "taken from n" takes n away.

    >>> misreading("sum", "times", 7), misreading("larger", "plus", 7), misreading("product", "from", 7)
    ('a + b * 7', 'max(a, b + 7)', '(a * b) - 7')
    """
    heard = "difference" if first == "reversed" else first
    then = "minus" if second == "from" else second
    expression = FIRST[heard].code
    if heard in ("larger", "smaller") and then == second:
        return expression.replace("b)", SECOND[then].code.format(e="b", n=number) + ")")
    if heard in ("sum", "difference") and then == "times":
        expression = expression.strip("()")
    return SECOND[then].code.format(e=expression, n=number)


def _drafts(split: Split, *, seed: int, stream: str) -> Iterator[tuple[ProgramProblem, str]]:
    """Problems of a split and their misread programs, without end, some of them more than once."""
    rng = Random(f"programs {stream} {split} {seed}")
    while True:
        first, second, number = rng.choice(sorted(FIRST)), rng.choice(sorted(SECOND)), rng.randint(2, 99)
        if SPLIT_OF_TENTH[crc32(f"{first} {second} {number}".encode()) % 10] == split:
            yield _problem(first, second, number, rng), _program(misreading(first, second, number))


def _program(expression: str) -> str:
    return f"def f(a, b):\n    return {expression}"


def _problem(first: str, second: str, number: int, rng: Random) -> ProgramProblem:
    first_part, two = FIRST[first], SECOND[second]
    instruction = f"{rng.choice(first_part.text)}, {rng.choice(two.text).format(n=number)}"
    code = two.code.format(e=first_part.code, n=number)
    pairs = [(rng.randint(-LARGEST, LARGEST), rng.randint(-LARGEST, LARGEST)) for _ in range(NUM_TESTS)]
    values = [two.value(first_part.value(a, b, 0), 0, number) for a, b in pairs]
    return ProgramProblem(
        question=f"Write f(a, b) that returns {instruction}.",
        answer=_program(code),
        test_list=tuple(f"assert f({a}, {b}) == {value}" for (a, b), value in zip(pairs, values, strict=True)),
        family=f"{first} {second}",
    )
