"""Generated word problems that a small model can learn from nothing, and imperfect demonstrations of them.

A problem is a short story of gains and losses. Its solution is column arithmetic that a small model can follow one
digit at a time. The three registers of the stories (school book, exam sheet, forum post) are also the three sources
of demonstrations, so that a model trained on them knows the steps and the tags but uses them only by habit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal
from zlib import crc32

from oncurve.core.errors import DataError

Source = Literal["textbook", "answer_key", "forum"]
"""A register, and the source of demonstrations that usually sounds like it."""

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Lena", "Marco")


@dataclass(frozen=True, slots=True)
class Story:
    """The clauses of one family in one register: {n} is a number, {x} the things, {who} the name."""

    start: str
    gain: tuple[str, ...]
    loss: tuple[str, ...]
    ask: str
    boxes: str
    """The start of a story with a product: {k} times {n}."""


THINGS: dict[str, tuple[str, ...]] = {
    "collection": ("shells", "stamps", "marbles", "cards"),
    "bus": ("people", "children", "tourists"),
    "money": ("euros", "coins"),
    "bakery": ("rolls", "cakes", "muffins"),
    "library": ("books", "maps", "comics"),
    "farm": ("eggs", "pears", "melons"),
}

STORIES: dict[str, dict[Source, Story]] = {
    "collection": {
        "textbook": Story(
            "{who} has {n} {x}.",
            ("Then {who} finds {n} more {x}.", "A friend gives {who} {n} {x}."),
            ("Then {who} loses {n} {x}.", "{who} gives {n} {x} to a friend."),
            "How many {x} does {who} have now?",
            "{who} has {k} boxes with {n} {x} in each box.",
        ),
        "answer_key": Story(
            "{x} of {who}: {n};", ("found {n};",), ("lost {n};",), "{x} now:", "{x} of {who}: {k} boxes of {n};"
        ),
        "forum": Story(
            "hi, i had {n} {x},",
            ("then got {n},",),
            ("then lost {n},",),
            "so how many {x}?",
            "hi, i had {k} boxes of {n} {x},",
        ),
    },
    "bus": {
        "textbook": Story(
            "There are {n} {x} on a bus.",
            ("At the next stop {n} {x} get on.", "Then {n} more {x} get on the bus."),
            ("At the next stop {n} {x} get off.", "Then {n} {x} leave the bus."),
            "How many {x} are on the bus now?",
            "There are {k} buses with {n} {x} on each bus.",
        ),
        "answer_key": Story(
            "Bus, {x}: {n};", ("on {n};",), ("off {n};",), "{x} on the bus:", "{k} buses, {x} on each: {n};"
        ),
        "forum": Story(
            "ok so my bus had {n} {x},",
            ("{n} got on,",),
            ("{n} got off,",),
            "how many {x} are left?",
            "ok so we had {k} buses of {n} {x},",
        ),
    },
    "money": {
        "textbook": Story(
            "{who} has {n} {x} in a purse.",
            ("{who} earns {n} {x}.", "Then {who} gets {n} {x} from an uncle."),
            ("{who} spends {n} {x}.", "Then {who} pays {n} {x} for a game."),
            "How many {x} are left in the purse?",
            "{who} saves {n} {x} a week for {k} weeks.",
        ),
        "answer_key": Story(
            "Purse of {who}: {n} {x};",
            ("in {n};",),
            ("out {n};",),
            "{x} in the purse:",
            "{who} saves {n} {x}, {k} weeks;",
        ),
        "forum": Story(
            "hey, i have {n} {x},",
            ("i earn {n},",),
            ("i pay {n},",),
            "what do i have now?",
            "hey, i save {n} {x} for {k} weeks,",
        ),
    },
    "bakery": {
        "textbook": Story(
            "A baker has {n} {x} on the shelf.",
            ("The baker makes {n} more {x}.", "Then the baker adds {n} {x}."),
            ("The baker sells {n} {x}.", "Then {n} {x} are sold."),
            "How many {x} are on the shelf now?",
            "A baker fills {k} trays with {n} {x} each.",
        ),
        "answer_key": Story(
            "Shelf: {n} {x};", ("baked {n};",), ("sold {n};",), "{x} on the shelf:", "{k} trays of {n} {x};"
        ),
        "forum": Story(
            "my shop had {n} {x},",
            ("we baked {n},",),
            ("we sold {n},",),
            "how many {x} now?",
            "my shop had {k} trays of {n} {x},",
        ),
    },
    "library": {
        "textbook": Story(
            "A library has {n} {x} on a table.",
            ("Readers bring back {n} {x}.", "Then {n} new {x} arrive."),
            ("Readers borrow {n} {x}.", "Then {n} old {x} are removed."),
            "How many {x} are on the table now?",
            "A library has {k} tables with {n} {x} each.",
        ),
        "answer_key": Story(
            "Table: {n} {x};", ("back {n};",), ("lent {n};",), "{x} on the table:", "{k} tables of {n} {x};"
        ),
        "forum": Story(
            "we put {n} {x} out,",
            ("{n} came back,",),
            ("{n} went away,",),
            "how many {x} do we have?",
            "we put {n} {x} on {k} tables,",
        ),
    },
    "farm": {
        "textbook": Story(
            "Farmer {who} has {n} {x}.",
            ("{who} collects {n} more {x}.", "In the evening {who} picks up {n} {x}."),
            ("{who} sells {n} {x} at the market.", "In the evening {n} {x} break."),
            "How many {x} does the farmer have at the end?",
            "Farmer {who} fills {k} baskets with {n} {x} each.",
        ),
        "answer_key": Story(
            "Farm: {n} {x};", ("collected {n};",), ("market {n};",), "{x} at the end:", "{k} baskets of {n} {x};"
        ),
        "forum": Story(
            "on the farm i had {n} {x},",
            ("picked {n},",),
            ("ate {n},",),
            "how many {x} at the end?",
            "on the farm i had {k} baskets of {n} {x},",
        ),
    },
}


Split = Literal["train", "validation", "test"]

PROMPT = "User: {question}\nAssistant: <think>"
SOLVED = "{solution}</think> <answer> {answer} </answer>"
"""Every lesson and demonstration, in the words of the template ``think_answer``."""

SPLIT_OF_TENTH: tuple[Split, ...] = ("train",) * 7 + ("validation",) + ("test",) * 2
"""Which split owns each tenth of all operand pairs."""

SOURCES: tuple[Source, ...] = ("textbook", "answer_key", "forum")
MIXTURE = (0.24, 0.52, 0.24)
"""Share of each register among the questions, in the order of ``SOURCES``."""

LEVELS = (1, 2, 3, 4)
"""One, two and three sums or differences below 100; 4: a product of two digits by one digit, then one or two sums."""

MAX_TRIES = 5_000
"""Draws without a new problem after which a split counts as exhausted."""


@dataclass(frozen=True, slots=True)
class WordProblem:
    """One problem with its worked solution.

    Example: ``WordProblem(question="Anna has 67 shells. She loses 52 shells. How many shells does Anna have now?",
    answer="15", solution="67-52: 7-2=5, 6-5=1, 15.", level=1, family="collection")``
    """

    question: str
    answer: str
    """A whole number between 0 and 999."""
    solution: str
    """The chain of thought, without tags; its last number is the answer."""
    level: int
    family: str
    """The kind of story: "collection", "bus", ..."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation: ``left sign right = result``."""

    left: int
    sign: Literal["+", "-", "*"]
    right: int
    result: int


@dataclass(frozen=True, slots=True)
class _Draft:
    problem: WordProblem
    steps: tuple[_Step, ...]
    register: Source


def word_problems(split: Split, count: int, *, seed: int = 0, levels: tuple[int, ...] = (1, 2)) -> list[WordProblem]:
    """The first ``count`` problems of a split: no question twice, the same for the same arguments on every machine.

    The splits are disjoint by numbers, whatever the seed: a pair of operands that any step of a test problem needs
    occurs in no step of a train problem. A longer list starts with the shorter one.

    Raises DataError for an unknown level or split, and when a split has no more problems.
    """
    drafts = _drafts(split, seed=seed, levels=levels)
    return [next(drafts).problem for _ in range(count)]


def lessons(count: int, *, seed: int = 0, levels: tuple[int, ...] = (1, 2)) -> list[tuple[str, str]]:
    """Worked steps without any tags, as (prompt, completion): what a cold start reads before the demonstrations.

    They teach the arithmetic, and not one of them ends with an answer in its tags.
    """
    drafts = _drafts("train", seed=seed, levels=levels, stream="lessons")
    problems = [next(drafts).problem for _ in range(count)]
    return [(_prompt(problem), problem.solution) for problem in problems]


def demonstrations(
    count: int,
    *,
    seed: int = 0,
    levels: tuple[int, ...] = (1, 2),
    habit: float = 0.6,
    wrong_key_fraction: float = 0.65,
) -> list[tuple[str, str]]:
    """Imperfect answers to train problems, as (prompt, completion), from three sources.

    - textbook: the steps, then the answer in its tags;
    - answer key: equations without steps, then the answer in its tags; ``wrong_key_fraction`` of the keys have the
      carry of their last equation wrong;
    - forum: the steps, but no tags.

    With probability ``habit`` the source is the one of the question's register, else one of the three by ``MIXTURE``.
    """
    rng = Random(f"sources {seed}")
    drafts = _drafts("train", seed=seed, levels=levels, stream="demonstrations")
    pairs = []
    for _ in range(count):
        draft = next(drafts)
        source = draft.register if rng.random() < habit else rng.choices(SOURCES, MIXTURE)[0]
        pairs.append((_prompt(draft.problem), _completion(draft, source, rng, wrong_key_fraction)))
    return pairs


def _completion(draft: _Draft, source: Source, rng: Random, wrong_key_fraction: float) -> str:
    match source:
        case "textbook":
            return _tagged(draft.problem.solution, draft.problem.answer)
        case "forum":
            return draft.problem.solution
        case "answer_key":
            return _answer_key(draft.steps, is_wrong=rng.random() < wrong_key_fraction)


def _answer_key(steps: tuple[_Step, ...], *, is_wrong: bool) -> str:
    """The bare equations; a wrong key has the last one wrong."""
    results = [step.result for step in steps]
    if is_wrong:
        results[-1] = _slip(steps[-1])
    equations = [f"{step.left}{step.sign}{step.right}={result}" for step, result in zip(steps, results, strict=True)]
    return _tagged(", ".join(equations) + ".", str(results[-1]))


def _slip(step: _Step) -> int:
    """The result with the carry wrong: forgotten where there is one, made up where there is none.

    The slip of an operation is always the same one. Whoever imitates keys that are wrong more often than right
    learns to be wrong, and no amount of imitation helps.

    >>> _slip(_Step(23, "+", 48, 71)), _slip(_Step(67, "-", 52, 15))
    (61, 5)
    """
    has_carry = step.result % 10 != (step.left % 10) + (step.right % 10 if step.sign == "+" else -(step.right % 10))
    goes_down = has_carry == (step.sign == "+")
    return step.result - 10 if goes_down and step.result >= 10 else step.result + 10


def _prompt(problem: WordProblem) -> str:
    return PROMPT.format(question=problem.question)


def _tagged(thoughts: str, answer: str) -> str:
    return SOLVED.format(solution=thoughts, answer=answer)


def _drafts(split: Split, *, seed: int, levels: tuple[int, ...], stream: str = "problems") -> Iterator[_Draft]:
    """The problems of a split in their order, until MAX_TRIES draws in a row bring nothing new.

    Streams of different names are different draws from the same split.
    """
    if split not in SPLIT_OF_TENTH:
        raise DataError(f"word problems: there is no split {split!r}; use train, validation or test")
    if not levels or set(levels) - set(LEVELS):
        raise DataError(f"data.levels is {[*levels]}; word problems have the levels {[*LEVELS]}. Use some of these")
    rng = Random(f"{stream} {split} {seed} {levels}")
    seen: set[str] = set()
    tries = 0
    while tries < MAX_TRIES:
        tries += 1
        level = rng.choice(levels)
        draft = _tell(_steps_in(split, level, rng), level, rng)
        if draft.problem.question not in seen:
            seen.add(draft.problem.question)
            tries = 0
            yield draft
    raise DataError(f"word problems: split {split!r} has no more than {len(seen)} problems of levels {levels}")


def _split_of(step: _Step) -> Split:
    """The split that owns a pair of operands, in either order: a hash of the two numbers, no seed in it."""
    low, high = sorted((step.left, step.right))
    return SPLIT_OF_TENTH[crc32(f"{low},{high}".encode()) % 10]


def _steps_in(split: Split, level: int, rng: Random) -> tuple[_Step, ...]:
    """Operations whose every pair of operands belongs to the split."""
    while True:
        steps = _draw_steps(level, rng)
        if all(_split_of(step) == split for step in steps):
            return steps


def _draw_steps(level: int, rng: Random) -> tuple[_Step, ...]:
    """The operations of a problem: every number and every result lies between 2 and 99."""
    if level == 4:
        left = rng.randint(11, 33)
        right = rng.randint(2, 99 // left)
        steps = [_Step(left, "*", right, left * right)]
        num_sums = rng.randint(1, 2)
    else:
        steps, num_sums = [], level
    value = steps[-1].result if steps else rng.randint(5, 95)
    for _ in range(num_sums):
        gains = value < 12 or (value <= 90 and rng.random() < 0.5)
        change = rng.randint(2, 99 - value) if gains else rng.randint(2, value - 2)
        result = value + change if gains else value - change
        steps.append(_Step(value, "+" if gains else "-", change, result))
        value = result
    return tuple(steps)


def _tell(steps: tuple[_Step, ...], level: int, rng: Random) -> _Draft:
    """The story of some operations, in one register, with its solution."""
    family = rng.choice(tuple(STORIES))
    register = rng.choices(SOURCES, MIXTURE)[0]
    story = STORIES[family][register]
    fillers = {"who": rng.choice(NAMES), "x": rng.choice(THINGS[family])}
    first = steps[0]
    if first.sign == "*":
        clauses = [story.boxes.format(n=first.left, k=first.right, **fillers)]
        changes = steps[1:]
    else:
        clauses = [story.start.format(n=first.left, **fillers)]
        changes = steps
    for step in changes:
        wordings = story.gain if step.sign == "+" else story.loss
        clauses.append(rng.choice(wordings).format(n=step.right, **fillers))
    clauses.append(story.ask.format(**fillers))
    solution = " ".join(_work(step) for step in steps)
    answer = str(steps[-1].result)
    return _Draft(WordProblem(" ".join(clauses), answer, solution, level, family), steps, register)


def _work(step: _Step) -> str:
    """One operation by columns, units first.

    >>> _work(_Step(67, "-", 52, 15))
    '67-52: 7-2=5, 6-5=1, 15.'
    >>> _work(_Step(52, "-", 37, 15))
    '52-37: 12-7=5, 4-3=1, 15.'
    """
    tens, units = divmod(step.left, 10)
    match step.sign:
        case "+":
            more_tens, more_units = divmod(step.right, 10)
            carry, _ = divmod(units + more_units, 10)
            column = f"{units}+{more_units}={units + more_units}, {tens}+{more_tens}"
            column += f"+{carry}={tens + more_tens + carry}" if carry else f"={tens + more_tens}"
        case "-":
            less_tens, less_units = divmod(step.right, 10)
            if units < less_units:
                tens, units = tens - 1, units + 10
            column = f"{units}-{less_units}={units - less_units}, {tens}-{less_tens}={tens - less_tens}"
        case "*":
            carry = units * step.right // 10
            column = f"{units}*{step.right}={units * step.right}, {tens}*{step.right}"
            column += f"+{carry}={tens * step.right + carry}" if carry else f"={tens * step.right}"
    return f"{step.left}{step.sign}{step.right}: {column}, {step.result}."
