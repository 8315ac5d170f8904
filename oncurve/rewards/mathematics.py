"""Reward for mathematical answers: exact arithmetic here, algebra in a process that can be killed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NoReturn, get_args

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.core.errors import ConfigError, Failure, attempt
from oncurve.core.grading import RewardFunction
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.answer_locations import LOCATIONS, AnswerLocation, AnswerSource, LocatedAnswer, locate_answer
from oncurve.rewards.grammar.choices import reference_letter
from oncurve.rewards.grammar.equality import Reference, equal
from oncurve.rewards.grammar.values import Tree
from oncurve.rewards.references import reference_text, typed_reference
from oncurve.rewards.section import RewardSection, Surroundings
from oncurve.rewards.thinking import spoken_text
from oncurve.section import CountsWith

if TYPE_CHECKING:
    from oncurve.rewards.worker_pool import Outcome, WorkerPool

Verdict = Literal["right", "wrong", "over_limit", "unparsable_reference", "timeout", "crashed"]
"""Verdict on an answer; "over_limit" means that comparing it took too long or too much memory, which counts as wrong.

The last three are failures of ours: the reference cannot be read, the batch ran out of time, the grader broke.
"""

Scale = Literal["binary", "signed", "graded"]
"""Values for right and wrong: 1 and 0; 1 and -1; or 1, ``partial`` for the right value in the wrong place, and 0."""

MAX_CACHED_VERDICTS = 100_000


class _NeedsAlgebraError(Exception):
    """Exact arithmetic cannot decide."""


def _no_algebra(first: Tree, other: Tree) -> NoReturn:
    raise _NeedsAlgebraError


class AnswerChecker:
    """Compares answers with references: exact arithmetic in this process, algebra in processes that can be killed.

    No text of a model is ever evaluated. Every reference is read once. Verdicts are remembered by (answer, reference),
    except those that are failures. Several rewards can share one checker, and with it its processes; they start when
    the first pair needs them: ``workers`` of them, or one for every processor. An answer over its limit is
    "over_limit", and costs no other answer its verdict.
    """

    def __init__(self, *, timeout_seconds: float = 3.0, workers: int | None = None) -> None:
        self.timeout_seconds, self.workers = timeout_seconds, workers
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._readable: set[str] = set()  # references that a worker has compared in time

    @cached_property
    def _pool(self) -> WorkerPool:
        """The processes, which exact arithmetic does not need."""
        from oncurve.rewards.worker_pool import QUICK_SECONDS, WorkerPool  # lazy

        return WorkerPool(
            "oncurve.rewards.grammar.symbolic:grade",
            workers=self.workers,
            timeout_seconds=self.timeout_seconds,
            quick_seconds=QUICK_SECONDS,
            interrupts=True,
        )

    def check(self, pairs: Sequence[tuple[str | None, str]]) -> list[Verdict]:
        """The verdict on every (answer, reference); an answer that was not found is wrong."""
        distinct = dict.fromkeys(pair for pair in pairs if pair not in self._verdicts)
        verdicts: dict[tuple[str | None, str], Verdict] = {}
        undecided: list[tuple[str, str]] = []
        for candidate, gold in distinct:
            verdict = _exact_verdict(candidate, gold)
            if verdict is not None:
                verdicts[candidate, gold] = verdict
            elif candidate is not None:
                undecided.append((candidate, gold))
        verdicts |= self._ask_workers(undecided)
        self._remember(verdicts)
        return [verdicts[pair] if pair in verdicts else self._verdicts[pair] for pair in pairs]  # type: ignore[index]

    def close(self) -> None:
        """Ends the processes."""
        if "_pool" in vars(self):
            self._pool.close()

    def _ask_workers(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str | None, str], Verdict]:
        if not pairs:
            return {}
        outcomes = self._pool.map({"candidate": candidate, "gold": gold} for candidate, gold in pairs)
        for (_, gold), outcome in zip(pairs, outcomes, strict=True):
            if outcome.result in ("right", "wrong"):
                self._readable.add(gold)
        overdue = [gold for (_, gold), outcome in zip(pairs, outcomes, strict=True) if _is_over_limit(outcome)]
        golds = list(dict.fromkeys(gold for gold in overdue if gold not in self._readable))
        alone = self._pool.map({"candidate": None, "gold": gold} for gold in golds)
        unreadable = {
            gold
            for gold, outcome in zip(golds, alone, strict=True)
            if outcome.result == "unparsable_reference" or _is_over_limit(outcome)
        }
        return {
            pair: "unparsable_reference" if pair[1] in unreadable else _pool_verdict(outcome)
            for pair, outcome in zip(pairs, outcomes, strict=True)
        }

    def _remember(self, verdicts: Mapping[tuple[str | None, str], Verdict]) -> None:
        for (candidate, gold), verdict in verdicts.items():
            if candidate is not None and verdict in ("right", "wrong"):
                self._verdicts[candidate, gold] = verdict
        while len(self._verdicts) > MAX_CACHED_VERDICTS:
            self._verdicts.popitem(last=False)


def _exact_verdict(candidate: str | None, gold: str) -> Verdict | None:
    """The verdict of exact arithmetic; None where it cannot decide."""
    reference = attempt(lambda: typed_reference(gold))
    if isinstance(reference, Failure):
        return "crashed"
    if isinstance(reference, str):
        return "unparsable_reference"
    if candidate is None:
        return "wrong"
    verdict: Verdict | Failure | None = attempt(lambda: _decided(candidate, reference))
    return "crashed" if isinstance(verdict, Failure) else verdict


def _decided(candidate: str, reference: Reference) -> Verdict | None:
    try:
        return "right" if equal(candidate, reference, _no_algebra) else "wrong"
    except _NeedsAlgebraError:
        return None


def _is_over_limit(outcome: Outcome) -> bool:
    return outcome.error in ("timeout", "memory", "died")


def _pool_verdict(outcome: Outcome) -> Verdict:
    match outcome.error:
        case None:
            return outcome.result
        case "timeout" | "memory" | "died":
            return "over_limit"
        case "not_run":
            return "timeout"
        case _:
            return "crashed"


class Mathematics:
    """Whether the answer at the asked place equals the row's reference answer.

    Parts: ``correct``, 1.0 if it does; ``format``, 1.0 if there is an answer at that place; ``over_limit``, 1.0 if the
    answer made the grader exceed its time or memory, which pays as wrong; ``found_in_box`` and the like, 1.0 for the
    place where an answer stands, asked for or not. A row without a readable reference is an
    error, never a zero.
    """

    def __init__(
        self,
        *,
        answer_from: AnswerSource = "boxed",
        scale: Scale = "binary",
        partial: float = 0.2,
        answer_column: str = "answer",
        timeout_seconds: float = 3.0,
        workers: int | None = None,
        name: str = "mathematics",
        checker: AnswerChecker | None = None,
    ) -> None:
        if not 0.0 <= partial < 1.0:
            raise ConfigError(f"rewards: partial is {partial:g}; give a number from 0 to below 1.")
        if answer_from not in get_args(AnswerSource):
            raise ConfigError(
                f"rewards: answer_from is {answer_from!r}. Name marked, boxed, answer_tag, hash, choice, or prose, "
                f"which also takes the last number of a text without marks"
            )
        self.name = name
        self.answer_from: AnswerSource = answer_from
        self.scale = scale
        self.partial = partial
        self.answer_column = answer_column
        self.checker = checker or AnswerChecker(timeout_seconds=timeout_seconds, workers=workers)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        golds = [reference_text(prompt.row, self.answer_column) for prompt in prompts]
        if self.answer_from == "choice":
            golds = [reference_letter(prompt.row, gold) for prompt, gold in zip(prompts, golds, strict=True)]
        answers = self._answers(prompts, completions, self.answer_from)
        verdicts = self.checker.check([(answer.text, gold) for answer, gold in zip(answers, golds, strict=True)])
        lenient = verdicts
        if self.scale == "graded" and self.answer_from not in ("prose", "choice"):
            anywhere = self._answers(prompts, completions, "prose")
            lenient = self.checker.check([(answer.text, gold) for answer, gold in zip(anywhere, golds, strict=True)])
        rewards = [
            self._reward(answer, gold, verdict, has_value=lenient_verdict == "right")
            for answer, gold, verdict, lenient_verdict in zip(answers, golds, verdicts, lenient, strict=True)
        ]
        locations = self._locations(prompts, completions, answers)
        return [
            replace(
                reward,
                parts=dict(reward.parts) | {f"found_in_{location}": float(location == where) for location in LOCATIONS},
            )
            for reward, where in zip(rewards, locations, strict=True)
        ]

    def close(self) -> None:
        """Ends the checker's processes."""
        self.checker.close()

    def _answers(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], source: AnswerSource
    ) -> list[LocatedAnswer]:
        return [
            locate_answer(spoken_text(prompt, completion), source)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def _locations(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], answers: Sequence[LocatedAnswer]
    ) -> list[AnswerLocation]:
        """Where each answer stands, also one that does not stand where it was asked for."""
        elsewhere = self._answers(
            [prompt for prompt, answer in zip(prompts, answers, strict=True) if answer.text is None],
            [completion for completion, answer in zip(completions, answers, strict=True) if answer.text is None],
            "prose",
        )
        others = iter(elsewhere)
        return [next(others).location if answer.text is None else answer.location for answer in answers]

    def _reward(self, answer: LocatedAnswer, gold: str, verdict: Verdict, *, has_value: bool) -> Reward:
        low = -1.0 if self.scale == "signed" else self.partial if has_value and self.scale == "graded" else 0.0
        return reward_of(verdict, answer.text, gold, is_well_formed=answer.text is not None, low=low)


def reward_of(verdict: Verdict, answer: str | None, gold: str, *, is_well_formed: bool, low: float = 0.0) -> Reward:
    """The reward of a verdict: 1, or ``low`` for any other answer, or an error if the grader failed."""
    parts = {
        "correct": float(verdict == "right" and is_well_formed),
        "format": float(is_well_formed),
        "over_limit": float(verdict == "over_limit"),
    }
    detail = f"answer {_excerpt(answer)}, reference {_excerpt(gold)}"
    if verdict in ("unparsable_reference", "timeout", "crashed"):
        return Reward(value=None, parts={"format": parts["format"]}, error=verdict, detail=detail)
    return Reward(value=1.0 if parts["correct"] else low, parts=parts, detail=detail)


def _excerpt(answer: str | None) -> str:
    if answer is None:
        return "missing"
    return ascii(answer if len(answer) <= 60 else answer[:57] + "...")


class MathematicsReward(RewardSection):
    """Equality with the reference answer."""

    type: Literal["mathematics"] = "mathematics"
    answer_from: Literal["marked", "boxed", "answer_tag", "hash", "prose", "choice"] = "marked"
    """Where the answer is: the last box, the answer tag, after ####; marked: the first of these that there is, or "the
    answer is ..."; prose: also the last number or formula; choice: the letter of an option."""
    scale: Literal["binary", "signed", "graded"] = "binary"
    """0 and 1; -1 and 1; or 0, ``partial`` and 1."""
    partial: Annotated[float, Field(ge=0, lt=1), CountsWith("scale", ("graded",))] = 0.2
    """graded: reward of the right value in the wrong place."""
    timeout_seconds: PositiveFloat = 3.0
    """Time limit of a comparison."""
    workers: PositiveInt | None = None
    """Processes that compare; None: one per processor, at most 16."""

    gives_correct: ClassVar[bool] = True
    reads_reference: ClassVar[bool] = True

    def can_be_negative(self) -> bool:
        """Also where wrong answers pay -1."""
        return self.scale == "signed" or super().can_be_negative()

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return Mathematics(**self.options())
