"""Steps between sampling and the batch: grading, and asking again where nothing can be learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Group, Reward
from oncurve.core.sampler import Sampler, TellsGroups
from oncurve.data.curriculum import Curriculum
from oncurve.observe.measure import EQUAL_WITHIN
from oncurve.rewards.pipelined import PipelinedGrading, PipelinedRewards
from oncurve.run.services import Run

Graded = list[list[Reward]]


@contextmanager
def grading(sampler: Sampler, reward_function: RewardFunction) -> Iterator[PipelinedGrading | None]:
    """While it lasts, groups are graded as soon as they are whole; None where the sampler or the rewards cannot."""
    if not isinstance(sampler, TellsGroups) or not isinstance(reward_function, PipelinedRewards):
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


def score(groups: Sequence[Group], reward_function: RewardFunction, early: PipelinedGrading | None = None) -> Graded:
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


def refill(
    groups: list[Group],
    graded: Graded,
    data: Curriculum,
    sampler: Sampler,
    reward_function: RewardFunction,
    run: Run,
    *,
    step: int,
) -> tuple[list[Group], Graded]:
    """The groups with others in the place of those without a signal, where the recipe asks for that."""
    if not run.refill_rounds:
        return groups, graded
    with run.timed("refill"):
        return replace_silent(groups, graded, data, sampler, reward_function, step=step, rounds=run.refill_rounds)


def replace_silent(
    groups: list[Group],
    graded: Graded,
    data: Curriculum,
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
    taken = {group.prompt.index for group in groups}
    for _ in range(rounds):
        missing = len(groups) - len(useful)
        prompts = data.more(step, missing, taken) if missing else []
        if not prompts:
            break
        taken |= {prompt.index for prompt in prompts}
        fresh = sampler.sample(prompts, size, step=step)
        rewards = score(fresh, reward_function)
        data.observe(fresh, rewards, step=step)
        useful += [pair for pair in zip(fresh, rewards, strict=True) if has_signal(pair[1])]
    chosen = (useful + useless)[: len(groups)]
    return [group for group, _ in chosen], [rewards for _, rewards in chosen]
