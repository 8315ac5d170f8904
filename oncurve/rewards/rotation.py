"""Rotation of several graders, one of them held out from training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace

from oncurve.errors import ConfigError
from oncurve.records import Completion, Prompt, Reward
from oncurve.rewards.base import FIXED_PARTS, RewardFunction, grade


class Rotating:
    """Variants of a reward of which one at a time grades, so that a hole of one pays only now and then.

    With ``every_steps`` all completions of a step are graded by one variant, and the next one takes over after so many
    steps; in every round of all variants each has one turn, in an order drawn from (seed, round). The step is the
    ``policy_version`` of a completion. Without ``every_steps`` a variant belongs to a prompt for the whole run, by a
    hash of (seed, index of the prompt). The completions of one group always meet the same variant, since they are
    compared with each other. The variants should pay on one scale.

    Parts: those of the variant that graded, and its value under its own name. With ``grade_all`` every variant grades
    every completion: the one whose turn it is pays, the values of all are logged, and the parts "correct" and "format"
    are the lowest of all, so that they mean the same in every step and a measurement before and after a run can be
    compared. A variant that fails out of turn leaves its parts out and costs no completion.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        every_steps: int | None = None,
        seed: int = 0,
        grade_all: bool = False,
        name: str = "rotating",
    ) -> None:
        names = [function.name for function in functions]
        if not names:
            raise ConfigError("rewards: there is nothing to rotate. Name at least one variant.")
        for each in names:
            if names.count(each) > 1:
                raise ConfigError(f"rewards: two variants are named {each!r}. Give one of them another name.")
        if every_steps is not None and every_steps < 1:
            raise ConfigError(f"rewards: every_steps is {every_steps}; give at least 1, or nothing to go by prompt.")
        self.name = name
        self.functions = tuple(functions)
        self.every_steps = every_steps
        self.seed = seed
        self.grade_all = grade_all

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        chosen = self._variants(prompts, completions)
        if self.grade_all:
            rows = zip(*(grade(function, prompts, completions) for function in self.functions), strict=True)
            return [self._paid(row, variant) for row, variant in zip(rows, chosen, strict=True)]
        rewards: dict[int, Reward] = {}
        for variant in sorted(set(chosen)):
            places = [place for place, each in enumerate(chosen) if each == variant]
            function = self.functions[variant]
            graded = grade(function, [prompts[place] for place in places], [completions[place] for place in places])
            rewards |= {
                place: _with_part(reward, function.name, reward.value)
                for place, reward in zip(places, graded, strict=True)
            }
        return [rewards[place] for place in range(len(chosen))]

    def close(self) -> None:
        """Closes every variant."""
        for function in self.functions:
            function.close()

    def variant_of(self, *, step: int, prompt_index: int) -> int:
        """Place of the variant that grades a prompt in a step."""
        count = len(self.functions)
        if self.every_steps is None:
            digest = hashlib.sha256(f"{self.seed}/{prompt_index}".encode()).digest()
            return int.from_bytes(digest[:8], "big") % count
        number_of_round, place = divmod(step // self.every_steps, count)
        order = list(range(count))
        random.Random(f"{self.seed}/{number_of_round}").shuffle(order)
        return order[place]

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

    def _variants(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[int]:
        """The variant of every completion; a group goes by its first one."""
        steps: dict[int, int] = {}
        for prompt, completion in zip(prompts, completions, strict=True):
            steps.setdefault(prompt.index, completion.policy_version)
        return [self.variant_of(step=steps[prompt.index], prompt_index=prompt.index) for prompt in prompts]


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
        return [_with_part(reward, self.part, other.value) for reward, other in zip(rewards, observed, strict=True)]

    def close(self) -> None:
        """Closes both."""
        self.training.close()
        self.held_out.close()


def _with_part(reward: Reward, name: str, value: float | None) -> Reward:
    """The same reward with one more part, unless it has no value."""
    return reward if value is None else replace(reward, parts={**reward.parts, name: value})
