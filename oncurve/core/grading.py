"""Reward functions, their weighted sum, and the boundary where their failures stop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from oncurve.core.errors import ConfigError, Failure, RewardError, attempt, counted
from oncurve.core.records import NOT_APPLICABLE, Completion, Prompt, Reward

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_OURS = Path(__file__).resolve().parents[1]

Category = Literal["correct", "wrong", "bad_format", "graded", "error"]
"""Category of a completion in an evaluation; "graded" where no reward says what is correct."""

FIXED_PARTS = ("correct", "format")
"""Parts whose meaning is the same everywhere: 1.0 if the answer is right, 1.0 if the form is as asked."""


@runtime_checkable
class RewardFunction(Protocol):
    """Grades completions; the only thing that training and evaluation know of a reward.

    Consumes a flat list of completions and, aligned with it, the prompt of each one. Returns one reward per
    completion, in the same order. Called from one thread at a time; owns whatever processes it starts until
    ``close()``.
    """

    name: str
    """The key under which its values are logged: ``reward/<name>``."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        ...

    def close(self) -> None:
        """Ends the processes it started; calling it twice is harmless."""
        ...


def ungraded(failure: Failure) -> Reward:
    """The reward of a completion that could not be graded."""
    return Reward(value=None, error=failure.error, detail=failure.detail, trace=failure.trace)


def grade(function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
    """The rewards of a function that is not trusted to succeed.

    The function reads of an episode what the policy said (``Completion.as_graded``). It is not shown an episode whose
    environment failed: nothing that the policy did has earned a 0.

    If the call fails for the whole batch, every group is tried again by itself, so that one completion that the
    function cannot stand costs its own group and no other.
    """
    if any(completion.failure is not None for completion in completions):
        return _grade_whole(function, prompts, completions)
    completions = [completion.as_graded() for completion in completions]
    rewards = attempt(lambda: _checked(function, prompts, completions))
    if not isinstance(rewards, Failure):
        return rewards
    groups = _group_slices(prompts)
    if len(groups) <= 1:
        return [ungraded(rewards)] * len(completions)
    graded: list[Reward] = []
    for part in groups:
        graded += grade(function, prompts[part], completions[part])
    return graded


def _grade_whole(
    function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> list[Reward]:
    """The rewards of those whose environment did not fail; the others are errors."""
    whole = [place for place, completion in enumerate(completions) if completion.failure is None]
    rewards = [Reward(value=None, error=c.failure or "crashed", detail=c.failure_detail) for c in completions]
    if not whole:
        return rewards
    graded = grade(function, [prompts[place] for place in whole], [completions[place] for place in whole])
    for place, reward in zip(whole, graded, strict=True):
        rewards[place] = reward
    return rewards


def _checked(function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions")
    rewards = list(function(prompts, completions))
    if len(rewards) != len(completions):
        given = counted(len(completions), "completion")
        few = f"{counted(len(rewards), 'reward')} for {given}"
        more = f"more rewards than the {given} that it was given"
        raise ValueError(f"{function.name} returned {few if len(rewards) < len(completions) else more}")
    for reward in rewards:
        if not isinstance(reward, Reward):
            raise TypeError(f"{function.name} returned {type(reward).__name__} where a Reward was expected")
    return rewards


def _group_slices(prompts: Sequence[Prompt]) -> list[slice]:
    starts = [
        place
        for place in range(len(prompts))
        if place == 0 or prompts[place].prompt_ids != prompts[place - 1].prompt_ids
    ]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(prompts)], strict=True)]


@dataclass(frozen=True, slots=True)
class Term:
    """One row of a weighted sum."""

    function: RewardFunction
    weight: float = 1.0
    """Factor of this function's value in the sum; negative turns a reward into a penalty."""
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


class WeightedSum:
    """Several reward functions added up, every part kept by name.

        value = sum over terms of  weight * clip(value)

    A term that fails makes the whole reward an error, since a sum with a missing term is another number; only
    "not_applicable" leaves its term out. The terms that do not know whether the answer is right can together add or
    take at most the weight of those that do, so that no style outranks a right answer by more than the answer itself is
    worth; terms with ``is_limited=False`` pay in full.
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
        columns = [grade(term.function, prompts, completions) for term in self.terms]
        for term, column in zip(self.terms, columns, strict=True):
            if term.decides and any(reward.value not in (None, 0.0, 1.0) for reward in column):
                self._is_graded = True
        return [self._combine(row) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        """Closes every function."""
        for term in self.terms:
            term.function.close()

    def _combine(self, rewards: Sequence[Reward]) -> Reward:
        parts = _merged_parts(self.terms, rewards)
        failed = [(term, reward) for term, reward in zip(self.terms, rewards, strict=True) if reward.is_failure]
        if failed:
            term, reward = failed[0]
            return Reward(
                value=None, parts=parts, error=reward.error, detail=f"{term.key}: {reward.detail}", trace=reward.trace
            )
        if all(reward.value is None for reward in rewards):
            why = "; ".join(f"{term.key}: {one.detail}" for term, one in zip(self.terms, rewards, strict=True))
            return Reward(value=None, parts=parts, error=NOT_APPLICABLE, detail=why)
        if "correct" not in parts and (verdict := self._verdict(rewards)) is not None:
            parts["correct"] = verdict
        if "correct" not in parts and self._is_graded and any(term.only_if_correct for term in self.terms):
            detail = (
                "a term is only_if_correct, and no reward says what is correct. Set correct_at of the one that does"
            )
            return Reward(value=None, parts=parts, error="no_verdict", detail=detail)
        detail = "; ".join(reward.detail for reward in rewards if reward.detail)
        total = self._total(rewards, is_correct=parts.get("correct", 0.0) >= 1.0)
        return Reward(value=total, parts=parts, detail=detail)

    def _verdict(self, rewards: Sequence[Reward]) -> float | None:
        """1 for a correct answer, 0 for a wrong one; None where no term decides or it does not apply."""
        for term, reward in zip(self.terms, rewards, strict=True):
            if term.decides and reward.value is not None and (term.correct_at is not None or not self._is_graded):
                return float(reward.value >= (1.0 if term.correct_at is None else term.correct_at))
        return None

    def _total(self, rewards: Sequence[Reward], *, is_correct: bool) -> float:
        total, shaping, limit = 0.0, 0.0, 0.0
        for term, reward in zip(self.terms, rewards, strict=True):
            if reward.value is None or (term.only_if_correct and not is_correct):
                continue
            value = reward.value if term.clip is None else min(max(reward.value, term.clip[0]), term.clip[1])
            if "correct" in reward.parts:
                total += term.weight * value
                limit += abs(term.weight)
            elif term.is_limited:
                shaping += term.weight * value
            else:
                total += term.weight * value
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
    found = [place for place in _PLACE.findall(example.trace) if not Path(place[0]).is_relative_to(_OURS)]
    place = f" ({Path(found[-1][0]).name}, line {found[-1][1]})" if found else ""
    return f"most often as {kind!r}: {example.detail or 'no detail'}{place}"


def _next_tenth(fraction: float) -> float:
    return min(1.0, (int(10 * fraction) + 1) / 10)
