"""Rewards from outside of the package: a function that a recipe names or a program passed, an episode's environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.section import RewardSection, Surroundings


class CustomReward(RewardSection):
    """Your function, TRL's signature or f(completion, answer)."""

    type: Literal["custom"] = "custom"
    function: str
    """module:name or path/to/file.py:name."""
    isolate: bool = False
    """Run it in a process with limits; it must be importable by name."""
    timeout_seconds: PositiveFloat = 60.0
    """Time limit per completion; isolate: for the completions of one prompt."""
    nan_is_none: bool = False
    """NaN means None, no opinion; false: it is an error."""
    correct_at: float | None = None
    """Rewards from here on count as correct. None: 1 if all rewards are 0 or 1; otherwise nothing is called correct."""

    has_any_value: ClassVar[bool] = True

    def reads_answer(self, around: Surroundings) -> bool:
        """As its parameters say."""
        from oncurve.rewards.custom import reads_answer  # lazy
        from oncurve.user_code import load_function  # lazy

        return reads_answer(load_function(self.function))

    def runs_on_main_thread(self) -> bool:
        """Unless it has a process of its own."""
        return not self.isolate

    def code_file(self) -> str | None:
        """The function's."""
        return self.function

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades. Raises ConfigError if it asks for what it cannot be given."""
        from oncurve.rewards.custom import asks_for, from_function  # lazy
        from oncurve.user_code import load_function  # lazy

        function = load_function(self.function)
        _check_columns(function, self.function, around)
        options = self.options("function", "isolate", "correct_at")
        if not self.isolate:
            return from_function(function, name=self.name, length=around.length, **options)
        if asks_for(function, "environments"):
            raise ConfigError(
                f"rewards: {self.function} asks for environments, which live in the trainer's process. Set "
                f"isolate=false for this reward"
            )
        from oncurve.rewards.subprocess_reward import SubprocessReward  # lazy

        return SubprocessReward(self.function, name=self.name, length=around.length, **options)


class PythonReward(RewardSection):
    """A function or object passed to oncurve.train or oncurve.Trainer, by its name."""

    type: Literal["given"] = "given"
    timeout_seconds: PositiveFloat = 60.0
    """Time limit per completion."""
    nan_is_none: bool = False
    """NaN means None, no opinion; false: it is an error."""
    correct_at: float | None = None
    """Rewards from here on count as correct. None: 1 if all rewards are 0 or 1; otherwise nothing is called correct."""

    has_any_value: ClassVar[bool] = True

    def reads_answer(self, around: Surroundings) -> bool:
        """As its parameters say, where it is known."""
        from oncurve.rewards.custom import reads_answer  # lazy

        return str(self.name) not in around.objects or reads_answer(around.objects[str(self.name)])

    def runs_on_main_thread(self) -> bool:
        """Always."""
        return True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades. Raises ConfigError where no program has passed it."""
        from oncurve.rewards.custom import from_function  # lazy

        name = str(self.name)
        if name not in around.objects:
            raise ConfigError(
                f"rewards: {name!r} was passed from Python, and a recipe cannot hold it. Train or resume from the "
                f"program, with oncurve.Trainer and the same functions; or name the function in the recipe with "
                f"type: custom and function: file.py:name"
            )
        _check_columns(around.objects[name], name, around)
        options = self.options("correct_at")
        return from_function(around.objects[name], name=name, length=around.length, **options)


def _check_columns(function: Any, location: str, around: Surroundings) -> None:
    if around.columns is not None:
        from oncurve.rewards.parameters import check_parameters  # lazy

        check_parameters(function, around.columns, location=location)


class EnvironmentReward:
    """The environment's own reward of an episode.

    An episode whose environment says nothing, or had none, or another than one ``of`` these names, is left out of this
    term.
    """

    def __init__(self, *, name: str = "environment", of: Sequence[str] | None = None) -> None:
        self.name, self.of = name, of

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        nothing = Reward(value=None, error="not_applicable", detail="the environment gave no reward")
        return [
            completion.environment_reward or nothing
            if self.of is None or prompt.row.get("environment") in self.of
            else nothing
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def close(self) -> None:
        """Nothing to end: whoever runs episodes closes their environments."""


class EnvironmentSection(RewardSection):
    """The reward of the episode's environment: ``get_reward``, or the rewards of its steps."""

    type: Literal["environment"] = "environment"
    correct_at: float | None = None
    """As of custom."""
    of: tuple[str, ...] | None = None
    """Names in rollouts.environments whose episodes it rewards. None: all."""

    has_any_value: ClassVar[bool] = True
    is_of_episode: ClassVar[bool] = True

    def may_say_correct(self) -> bool:
        """The environment may report "correct"."""
        return True

    def reads_answer(self, around: Surroundings) -> bool:
        """No: the environment or agent gets the columns that it asks for, and there need be no answer among them."""
        return False

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return EnvironmentReward(of=self.of)
