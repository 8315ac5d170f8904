"""The reward that an episode's own environment gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from oncurve.core.grading import RewardFunction
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.section import RewardSection, Surroundings


class EnvironmentReward:
    """The environment's own reward of an episode.

    An episode whose environment says nothing, or had none, is left out of this term.
    """

    def __init__(self, *, name: str = "environment") -> None:
        self.name = name

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        nothing = Reward(value=None, error="not_applicable", detail="the environment gave no reward")
        return [completion.environment_reward or nothing for completion in completions]

    def close(self) -> None:
        """Nothing to end: whoever runs episodes closes their environments."""


class EnvironmentSection(RewardSection):
    """The reward of the episode's environment: ``get_reward``, or the rewards of its steps."""

    type: Literal["environment"] = "environment"
    correct_at: float | None = None
    """As of custom."""

    has_any_value: ClassVar[bool] = True

    def may_say_correct(self) -> bool:
        """The environment may report "correct"."""
        return True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return EnvironmentReward()
