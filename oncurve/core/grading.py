"""Grading: reward functions, the boundary where their failures stop, and the rewards of a step's groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from oncurve.core.errors import Failure, attempt
from oncurve.core.records import EQUAL_WITHIN, Completion, Group, Prompt, Reward
from oncurve.core.sampler import SamplingRequest, TellsGroups

if TYPE_CHECKING:
    from oncurve.core.order import PromptSource
    from oncurve.core.sampler import Sampler

Graded = list[list[Reward]]
"""The rewards of the completions of some groups."""


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
    whole = [index for index, completion in enumerate(completions) if completion.failure is None]
    rewards = [Reward(value=None, error=c.failure or "crashed", detail=c.failure_detail) for c in completions]
    if not whole:
        return rewards
    graded = grade(function, [prompts[index] for index in whole], [completions[index] for index in whole])
    for index, reward in zip(whole, graded, strict=True):
        rewards[index] = reward
    return rewards


def _checked(function: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions")
    rewards = list(function(prompts, completions))
    if len(rewards) != len(completions):
        plural = "" if len(completions) == 1 else "s"
        raise ValueError(
            f"{function.name} returned {len(rewards)} reward{'' if len(rewards) == 1 else 's'} for "
            f"{len(completions):,} completion{plural}"
            if len(rewards) < len(completions)
            else f"{function.name} returned more rewards than the {len(completions):,} completion{plural} that it was "
            "given"
        )
    for reward in rewards:
        if not isinstance(reward, Reward):
            raise TypeError(f"{function.name} returned {type(reward).__name__} where a Reward was expected")
    return rewards


def _group_slices(prompts: Sequence[Prompt]) -> list[slice]:
    starts = [
        index
        for index in range(len(prompts))
        if index == 0 or prompts[index].prompt_ids != prompts[index - 1].prompt_ids
    ]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(prompts)], strict=True)]


class EarlyGrading(Protocol):
    """The groups of one step on their way to their rewards."""

    def take(self, group: Group) -> None:
        """Grade a group when its turn comes; called from any thread."""

    def finish(self, groups: Sequence[Group]) -> Graded:
        """The rewards of every completion of every group, in their order."""
        ...

    def abandon(self) -> None:
        """Begin nothing more: the step is left."""


@runtime_checkable
class EarlyRewards(Protocol):
    """A reward function that may be given the groups of a step one after another, while others are sampled."""

    def begin(self) -> EarlyGrading:
        """The grading of one step."""
        ...


@contextmanager
def grading(sampler: Sampler, reward_function: RewardFunction) -> Iterator[EarlyGrading | None]:
    """While it lasts, groups are graded as soon as they are whole; None where the sampler or the rewards cannot."""
    if not isinstance(sampler, TellsGroups) or not isinstance(reward_function, EarlyRewards):
        yield None
        return
    early = reward_function.begin()
    sampler.on_group = early.take
    try:
        yield early
    except BaseException:
        early.abandon()
        raise
    finally:
        sampler.on_group = None


def score(groups: Sequence[Group], reward_function: RewardFunction, early: EarlyGrading | None = None) -> Graded:
    """The reward of every completion of every group, in their order.

    All of a step in one call, or what ``early`` has not graded yet.
    """
    if early is not None:
        return early.finish(groups)
    completions = [completion for group in groups for completion in group.completions]
    prompts = [group.prompt for group in groups for _ in group.completions]
    rewards = iter(grade(reward_function, prompts, completions))
    return [[next(rewards) for _ in group.completions] for group in groups]


def has_signal(rewards: Sequence[Reward]) -> bool:
    """At least two graded completions of the group earned different rewards."""
    values = [reward.value for reward in rewards if reward.value is not None]
    return len(values) > 1 and max(values) - min(values) >= EQUAL_WITHIN


def replace_silent(
    groups: list[Group],
    graded: Graded,
    data: PromptSource,
    sampler: Sampler,
    reward_function: RewardFunction,
    *,
    step: int,
    rounds: int,
) -> tuple[list[Group], Graded]:
    """Replace groups without a signal by groups of further prompts, for at most some rounds.

    Dynamic sampling, DAPO, arXiv:2503.14476, section 3.2, with an end: what is left without a signal after the last
    round stays, so that a step always has the same number of groups. Which prompts are tried is a function of
    (seed, step), so nothing needs to be saved.
    """
    size = len(groups[0].completions)
    useful = [(group, rewards) for group, rewards in zip(groups, graded, strict=True) if has_signal(rewards)]
    useless = [(group, rewards) for group, rewards in zip(groups, graded, strict=True) if not has_signal(rewards)]
    used = {group.prompt.index for group in groups}
    for _ in range(rounds):
        missing = len(groups) - len(useful)
        prompts = data.more(step, missing, used) if missing else []
        if not prompts:
            break
        used |= {prompt.index for prompt in prompts}
        fresh = sampler.sample(SamplingRequest(prompts, size, step))
        rewards = score(fresh, reward_function)
        data.observe(fresh, rewards, step=step)
        useful += [pair for pair in zip(fresh, rewards, strict=True) if has_signal(pair[1])]
    chosen = (useful + useless)[: len(groups)]
    return [group for group, _ in chosen], [rewards for _, rewards in chosen]
