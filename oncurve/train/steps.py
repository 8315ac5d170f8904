"""What happens between sampling and the batch?"""

from __future__ import annotations

from collections.abc import Sequence

from oncurve.records import Group, Reward
from oncurve.rewards.base import RewardFunction, grade


def score(groups: Sequence[Group], reward_function: RewardFunction) -> list[list[Reward]]:
    """The reward of every completion of every group, in their order: all of a step in one call."""
    completions = [completion for group in groups for completion in group.completions]
    prompts = [group.prompt for group in groups for _ in group.completions]
    rewards = iter(grade(reward_function, prompts, completions))
    return [[next(rewards) for _ in group.completions] for group in groups]
