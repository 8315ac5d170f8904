"""Rotation of several graders, one of them held out from training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.weighted_sum import FIXED_PARTS


class Rotating:
    """Variants of a reward of which one at a time grades, so that a hole of one pays only now and then.

    All completions of a step are paid by one variant, and the next one takes over after ``every_steps``; in every round
    of all variants each has one turn, in an order drawn from (seed, round). The step is the ``policy_version`` of a
    completion. The variants should pay on one scale.

    Every variant grades every completion. Parts: those of the variant that pays, the value of each under its own name,
    and for "correct" and "format" the lowest of all, so that they mean the same in every step and a measurement before
    and after a run can be compared. A variant that fails out of turn leaves its parts out and costs no completion.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], *, every_steps: int, seed: int = 0, name: str = "rotating"
    ) -> None:
        names = [function.name for function in functions]
        for variant in names:
            if names.count(variant) > 1:
                raise ConfigError(f"rewards: two variants are named {variant!r}. Give one of them another name.")
        self.name = name
        self.functions = tuple(functions)
        self.every_steps, self.seed = every_steps, seed

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion; a group goes by its first one."""
        steps: dict[int, int] = {}
        for prompt, completion in zip(prompts, completions, strict=True):
            steps.setdefault(prompt.index, completion.policy_version)
        rows = zip(*(grade(function, prompts, completions) for function in self.functions), strict=True)
        return [
            self._paid(row, self.variant_of(steps[prompt.index])) for row, prompt in zip(rows, prompts, strict=True)
        ]

    def close(self) -> None:
        """Closes every variant."""
        for function in self.functions:
            function.close()

    def variant_of(self, step: int) -> int:
        """Place of the variant that pays in a step."""
        number_of_round, index = divmod(step // self.every_steps, len(self.functions))
        order = list(range(len(self.functions)))
        random.Random(f"{self.seed}/{number_of_round}").shuffle(order)
        return order[index]

    def _paid(self, graded: Sequence[Reward], variant: int) -> Reward:
        """The reward of the variant whose turn it is, with what the others say among its parts."""
        parts: dict[str, float] = dict(graded[variant].parts)
        for function, reward in zip(self.functions, graded, strict=True):
            for name in FIXED_PARTS:
                if name in reward.parts:
                    parts[name] = min(reward.parts[name], parts.get(name, 1.0))
            if reward.value is not None:
                parts[function.name] = reward.value
        return replace(graded[variant], parts=parts)


class HeldOut:
    """A reward to train on, beside a grader that is never trained on.

    The value is that of ``training``; what ``held_out`` says is only logged, as ``part``. As long as both rise together
    the policy learns the task; when the reward rises and the part stays or falls, it learns the grader.
    The two must not share their holes: another extraction, another set of tests, another judge. A failure of the
    held-out grader leaves the part out and costs no completion. Closing closes both.
    """

    def __init__(
        self, training: RewardFunction, held_out: RewardFunction, *, part: str = "held_out", name: str | None = None
    ) -> None:
        self.name = name or training.name
        self.part = part
        self.training = training
        self.held_out = held_out

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        rewards = self.training(prompts, completions)
        observed = grade(self.held_out, prompts, completions)
        return [
            reward if other.value is None else replace(reward, parts={**reward.parts, self.part: other.value})
            for reward, other in zip(rewards, observed, strict=True)
        ]

    def close(self) -> None:
        """Closes both."""
        self.training.close()
        self.held_out.close()
