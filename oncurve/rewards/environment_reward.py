"""The reward that an episode's own environment gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from oncurve.records import Completion, Prompt, Reward
from oncurve.rewards.base import RewardFunction
from oncurve.rewards.section import RewardSection, Surroundings


class EnvironmentReward:
    """What the environment says that an episode is worth.

    Its value is "correct" too if it is 1 or more, unless the environment says itself what is correct. An episode whose
    environment says nothing, or had none, is left out of this term.
    """

    def __init__(self, *, name: str = "environment") -> None:
        self.name = name

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        return [_reward_of(completion) for completion in completions]

    def close(self) -> None:
        """Nothing to end: whoever runs episodes closes their environments."""


def _reward_of(completion: Completion) -> Reward:
    given = completion.environment_reward
    if given is None:
        return Reward(value=None, error="not_applicable", detail="the environment gave no reward")
    if given.value is None or "correct" in given.parts:
        return given
    return Reward(given.value, {**given.parts, "correct": float(given.value >= 1.0)}, detail=given.detail)


class EnvironmentSection(RewardSection):
    """The reward of the episode's environment: ``get_reward``, or the rewards of its steps."""

    type: Literal["environment"] = "environment"

    has_any_value: ClassVar[bool] = True

    def may_say_correct(self) -> bool:
        """Where the environment gives a reward."""
        return True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return EnvironmentReward()
