"""Rewards for length and against repetition. Lengths are in tokens of the completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.weighted_sum import Term, WeightedSum


class _PerCompletion:
    """A reward that reads one completion at a time and can always give a value."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        return [Reward(value=self.value(completion)) for completion in completions]

    def close(self) -> None:
        """Nothing to end."""

    def value(self, completion: Completion) -> float:
        """The reward of one completion."""
        raise NotImplementedError


class LengthWindow(_PerCompletion):
    """1 for a completion of ``min_tokens`` to ``max_tokens`` tokens, else 0."""

    def __init__(self, min_tokens: int, max_tokens: int, *, name: str = "length") -> None:
        super().__init__(name)
        if not 0 <= min_tokens <= max_tokens:
            raise ConfigError(f"rewards: the length window {min_tokens} to {max_tokens} tokens is empty.")
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens

    def value(self, completion: Completion) -> float:
        """1 inside the window."""
        return float(self.min_tokens <= completion.num_tokens <= self.max_tokens)


class Overlong(_PerCompletion):
    """A penalty that grows over the last tokens before the limit.

        0                                                length <= max - buffer
        (max - buffer - length) / buffer                 in between
        -1                                               length > max

    Soft overlong punishment, DAPO, arXiv:2503.14476, eq. 13.
    """

    def __init__(self, max_tokens: int, buffer_tokens: int, *, name: str = "overlong") -> None:
        super().__init__(name)
        if not 0 < buffer_tokens <= max_tokens:
            raise ConfigError(f"rewards: buffer_tokens is {buffer_tokens}; give 1 to max_tokens ({max_tokens}).")
        self.max_tokens = max_tokens
        self.buffer_tokens = buffer_tokens

    def value(self, completion: Completion) -> float:
        """0 down to -1."""
        over = completion.num_tokens - (self.max_tokens - self.buffer_tokens)
        return -min(max(over / self.buffer_tokens, 0.0), 1.0)


class Repetition(_PerCompletion):
    """Minus the share of n-grams of tokens that were said before.

        value = -(1 - distinct / all)

    Completions shorter than one n-gram get 0. After arXiv:2502.03373, section 4.2, on tokens instead of words.
    """

    def __init__(self, ngram_tokens: int = 20, *, name: str = "repetition") -> None:
        super().__init__(name)
        if ngram_tokens < 1:
            raise ConfigError(f"rewards: ngram_tokens is {ngram_tokens}; give at least 1.")
        self.ngram_tokens = ngram_tokens

    def value(self, completion: Completion) -> float:
        """0 down to almost -1."""
        tokens, size = completion.written_ids, self.ngram_tokens
        num_all = len(tokens) - size + 1
        if num_all < 1:
            return 0.0
        distinct = {tokens[start : start + size] for start in range(num_all)}
        return len(distinct) / num_all - 1.0


@dataclass(eq=False)
class CosineLength:
    """Correctness, worth more when short; and wrong answers, less bad when long.

        value = end + (start - end) * (1 + cos(pi * length / max_tokens)) / 2

    where (start, end) is ``correct`` or ``wrong``; a completion that reaches ``max_tokens`` gets ``exceeded``.
    Takes the place of the correctness reward that it wraps, whose parts and errors it keeps.
    arXiv:2502.03373, section 4.1.
    """

    correctness: RewardFunction
    _: KW_ONLY
    max_tokens: int
    correct: tuple[float, float] = (1.0, 0.5)
    wrong: tuple[float, float] = (-1.0, -0.5)
    exceeded: float = -1.0
    name: str = "cosine_length"

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"rewards: max_tokens is {self.max_tokens}; give the limit of a completion.")

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        graded = self.correctness(prompts, completions)
        return [self._shaped(reward, c.num_tokens) for reward, c in zip(graded, completions, strict=True)]

    def close(self) -> None:
        """Closes the correctness reward."""
        self.correctness.close()

    def _shaped(self, reward: Reward, length: int) -> Reward:
        if reward.value is None:
            return reward
        start, end = self.correct if reward.parts.get("correct", 0.0) >= 1.0 else self.wrong
        value = end + (start - end) * (1 + math.cos(math.pi * length / self.max_tokens)) / 2
        value = self.exceeded if length >= self.max_tokens else value
        return Reward(value=value, parts=reward.parts, detail=reward.detail)


def correctness_format_length(
    correctness: RewardFunction,
    form: RewardFunction,
    length: RewardFunction,
    *,
    weights: tuple[float, float, float] = (1.0, 0.1, 0.05),
    only_if_correct: bool = False,
) -> WeightedSum:
    """The sum of an answer, its form and its length, each logged by itself.

    With ``only_if_correct`` form and length pay nothing beside a wrong answer, so that a group without a right answer
    is not driven by style.
    """
    if sum(map(abs, weights[1:])) > abs(weights[0]):
        raise ConfigError(f"rewards: form and length weigh {weights[1:]}, more than the answer ({weights[0]:g}).")
    return WeightedSum(
        [
            Term(correctness, weights[0]),
            Term(form, weights[1], only_if_correct=only_if_correct),
            Term(length, weights[2], only_if_correct=only_if_correct),
        ]
    )
