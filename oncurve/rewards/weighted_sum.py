"""The weighted sum of several reward functions, every part kept by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from oncurve.core.errors import ConfigError, RewardError
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import NOT_APPLICABLE, Completion, Prompt, Reward

FIXED_PARTS = ("correct", "format")
"""Parts whose meaning is the same everywhere: 1.0 if the answer is right, 1.0 if the form is as asked."""


@runtime_checkable
class Waits(Protocol):
    """A reward function that waits for a model behind a server or for processes of its own, and runs in any thread."""

    waits: Literal[True]


@dataclass(frozen=True, slots=True)
class Term:
    """One row of a weighted sum."""

    function: RewardFunction
    weight: float = 1.0
    """Factor of this function's value in the sum; negative turns a reward into a penalty."""
    weight_by_step: Sequence[tuple[int, float]] = ()
    """Pairs of step and factor of the weight, in their order; linear between the steps, constant outside."""
    name: str | None = None
    """Key of the value in ``Reward.parts``; None takes the function's own name."""
    only_if_correct: bool = False
    """Pay this term only when the answer is right: a well-formed wrong answer earns nothing from it."""
    clip: tuple[float, float] | None = None
    """Bounds of the value before it is weighted; None leaves it as it is."""
    decides: bool = False
    """Its value says what is correct, where no function has a part "correct": from ``correct_at`` on, or 1 as long as
    all its values are 0 or 1."""
    correct_at: float | None = None
    """Lowest value of a correct answer; None: a function with other values than 0 and 1 says nothing about that."""
    is_limited: bool = True
    """Without a part "correct": pay no more, together with others, than the terms that have one."""

    @property
    def key(self) -> str:
        """The name under which the value of this term is kept."""
        return self.name or self.function.name

    def weight_at(self, step: int) -> float:
        """The factor of its value in the sum, at a step.

        >>> Term(None, 2.0, [(0, 0.0), (10, 1.0)]).weight_at(5)
        1.0
        """
        if not self.weight_by_step:
            return self.weight
        (first, low), (last, high) = self.weight_by_step[0], self.weight_by_step[-1]
        for start, end in pairwise(self.weight_by_step):
            if start[0] <= step <= end[0]:
                (first, low), (last, high) = start, end
        share = min(max((step - first) / (last - first), 0.0), 1.0) if last > first else 0.0
        return self.weight * (low + share * (high - low))


class WeightedSum:
    """Several reward functions added up, every part kept by name.

        value = sum over terms of  weight(step) * clip(value)

    A term that fails makes the whole reward an error, since a sum with a missing term is another number; only
    "not_applicable" leaves its term out. The step is the ``policy_version`` of a completion. The terms that do not know
    whether the answer is right can together add or take at most the weight of those that do, so that no style outranks
    a right answer by more than the answer itself is worth; terms with ``is_limited=False`` pay in full.
    """

    def __init__(self, terms: Sequence[Term], *, name: str = "total") -> None:
        if not terms:
            raise ConfigError("rewards: the list is empty. Name at least one reward function.")
        keys = [term.key for term in terms]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"rewards: two of them are named {key!r}. Give one of them another name.")
        self.name = name
        self.terms = tuple(terms)
        self._is_graded = False
        """The deciding term gave a value other than 0 and 1, so that 1 need not mean correct."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion, its parts unweighted."""
        columns = self._columns(prompts, completions)
        for term, column in zip(self.terms, columns, strict=True):
            if term.decides and any(reward.value not in (None, 0.0, 1.0) for reward in column):
                self._is_graded = True
        steps = {completion.policy_version for completion in completions}
        weights = {step: [term.weight_at(step) for term in self.terms] for step in steps}
        return [
            self._combine(row, weights[completion.policy_version])
            for *row, completion in zip(*columns, completions, strict=True)
        ]

    def _columns(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[list[Reward]]:
        """The rewards of every term; those that wait for others do it beside the terms that compute here."""
        waiting = [term for term in self.terms if isinstance(term.function, Waits)]
        if not waiting or len(self.terms) == 1:
            return [grade(term.function, prompts, completions) for term in self.terms]
        with ThreadPoolExecutor(len(waiting), thread_name_prefix="waiting-reward") as threads:
            pending = {term.key: threads.submit(grade, term.function, prompts, completions) for term in waiting}
            here = {
                term.key: grade(term.function, prompts, completions) for term in self.terms if term.key not in pending
            }
            return [here[term.key] if term.key in here else pending[term.key].result() for term in self.terms]

    def reweigh(self, weights: Sequence[float]) -> None:
        """Give the terms other weights from now on, one for each in their order."""
        self.terms = tuple(replace(term, weight=weight) for term, weight in zip(self.terms, weights, strict=True))

    def close(self) -> None:
        """Closes every function."""
        for term in self.terms:
            term.function.close()

    def _combine(self, rewards: Sequence[Reward], weights: Sequence[float]) -> Reward:
        parts = _merged_parts(self.terms, rewards)
        failed = [(term, reward) for term, reward in zip(self.terms, rewards, strict=True) if reward.is_failure]
        if failed:
            term, reward = failed[0]
            return Reward(
                value=None, parts=parts, error=reward.error, detail=f"{term.key}: {reward.detail}", trace=reward.trace
            )
        if all(reward.value is None for reward in rewards):
            why = "; ".join(f"{term.key}: {skipped.detail}" for term, skipped in zip(self.terms, rewards, strict=True))
            return Reward(value=None, parts=parts, error=NOT_APPLICABLE, detail=why)
        if "correct" not in parts and (verdict := self._verdict(rewards)) is not None:
            parts["correct"] = verdict
        if "correct" not in parts and self._is_graded and any(term.only_if_correct for term in self.terms):
            detail = (
                "a term is only_if_correct, and no reward says what is correct. Set correct_at of the one that does"
            )
            return Reward(value=None, parts=parts, error="no_verdict", detail=detail)
        detail = "; ".join(reward.detail for reward in rewards if reward.detail)
        total = self._total(rewards, weights, is_correct=parts.get("correct", 0.0) >= 1.0)
        return Reward(value=total, parts=parts, detail=detail)

    def _verdict(self, rewards: Sequence[Reward]) -> float | None:
        """1 for a correct answer, 0 for a wrong one; None where no term decides or it does not apply."""
        for term, reward in zip(self.terms, rewards, strict=True):
            if term.decides and reward.value is not None and (term.correct_at is not None or not self._is_graded):
                return float(reward.value >= (1.0 if term.correct_at is None else term.correct_at))
        return None

    def _total(self, rewards: Sequence[Reward], weights: Sequence[float], *, is_correct: bool) -> float:
        total, shaping, limit = 0.0, 0.0, 0.0
        for term, reward, weight in zip(self.terms, rewards, weights, strict=True):
            if reward.value is None or (term.only_if_correct and not is_correct):
                continue
            value = reward.value if term.clip is None else min(max(reward.value, term.clip[0]), term.clip[1])
            if "correct" in reward.parts:
                total += weight * value
                limit += abs(weight)
            elif term.is_limited:
                shaping += weight * value
            else:
                total += weight * value
        return total + (min(max(shaping, -limit), limit) if limit > 0 else shaping)


def _merged_parts(terms: Sequence[Term], rewards: Sequence[Reward]) -> dict[str, float]:
    """The value of every term by its name, and the functions' own parts; of a fixed part the lowest counts."""
    parts = {term.key: reward.value for term, reward in zip(terms, rewards, strict=True) if reward.value is not None}
    own_names = set(parts)
    for term, reward in zip(terms, rewards, strict=True):
        for part, value in reward.parts.items():
            if part in FIXED_PARTS:
                parts[part] = min(value, parts.get(part, value))
            elif part not in parts:
                parts[part] = value
            elif part in own_names and part != term.key:
                parts[f"{term.key}.{part}"] = value
    return parts


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OURS = Path(__file__).resolve().parents[1]

Category = Literal["correct", "wrong", "bad_format", "graded", "error"]
"""Category of a completion in an evaluation; "graded" where no reward says what is correct."""


def categorize(reward: Reward) -> Category:
    """The category of a completion in an evaluation: form first, since an answer in the wrong form was not given.

    >>> categorize(Reward(value=0.0, parts={"correct": 0.0, "format": 1.0}))
    'wrong'
    """
    if reward.error is not None:
        return "error"
    if reward.parts.get("format", 1.0) < 1.0:
        return "bad_format"
    if "correct" not in reward.parts:
        return "graded"
    return "correct" if reward.parts["correct"] >= 1.0 else "wrong"


def check_errors(rewards: Sequence[Reward], *, max_error_fraction: float = 0.2, step: int | None = None) -> None:
    """Refuses a batch in which too many completions could not be graded; ``step`` is named where there is one.

    "not_applicable" is no failure of a grader and does not count.

    Raises RewardError with the most frequent kind and an example.
    """
    failed = [reward for reward in rewards if reward.is_failure]
    if len(failed) <= max_error_fraction * len(rewards):
        return
    where = "" if step is None else f"step {step}: "
    raise RewardError(
        f"{where}grading failed for {len(failed)} of {len(rewards)} completions (at most {max_error_fraction:.0%} may "
        f"fail), {describe_failures(failed)}. Correct the reward function or the data, or allow more failures with "
        f"run.max_error_fraction={_next_tenth(len(failed) / len(rewards)):g}"
    )


def check_any_graded(rewards: Sequence[Reward], *, where: str) -> None:
    """Refuses a batch in which nothing was graded at all; ``where`` begins the message.

    Raises RewardError with what each reward gave.
    """
    if not rewards or any(reward.value is not None for reward in rewards):
        return
    raise RewardError(f"{where}: none of the {len(rewards)} completions was graded, {describe_failures(rewards)}")


def describe_failures(failed: Sequence[Reward]) -> str:
    """The most frequent kind of failure with an example and where in the user's code it happened."""
    kinds = [str(reward.error) for reward in failed]
    kind = max(sorted(set(kinds)), key=kinds.count)
    example = next(reward for reward in failed if reward.error == kind)
    frames = [frame for frame in _FRAME.findall(example.trace) if not Path(frame[0]).is_relative_to(_OURS)]
    location = f" ({Path(frames[-1][0]).name}, line {frames[-1][1]})" if frames else ""
    return f"most often as {kind!r}: {example.detail or 'no detail'}{location}"


def _next_tenth(fraction: float) -> float:
    return min(1.0, (int(10 * fraction) + 1) / 10)
