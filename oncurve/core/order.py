"""The prompts of a step: a pure function of (seed, step), so that resuming replays nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from math import gcd
from random import Random
from typing import Any, Protocol, runtime_checkable

import numpy as np

from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import Group, Prompt, Reward

Indices = np.ndarray[Any, Any]
"""Indices of prompts."""
LONG_ORDER = 1_000_000
"""Prompts from which on a permutation is drawn as an array: a list of them would take a minute and a gigabyte."""


@runtime_checkable
class WrittenOnDemand(Protocol):
    """Prompts of a large data set, which are written when a step asks for them."""

    def __len__(self) -> int: ...

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts of different indices: a function of those alone."""
        ...


class PromptSource(Protocol):
    """The prompts of each step, which the loop calls ``data``."""

    def at(self, step: int) -> list[Prompt]:
        """The prompts of a step, counted from 0; the same for every process that asks."""
        ...

    def more(self, step: int, count: int, excluded: Collection[int]) -> list[Prompt]:
        """Up to ``count`` further prompts for a step, none of those whose index is taken."""
        ...

    def observe(self, groups: Sequence[Group], graded: Sequence[Sequence[Reward]], *, step: int) -> None:
        """Take note of how a step's completions were graded, where that chooses prompts."""


class Order:
    """Step to prompt indices: every epoch is one permutation, cut into steps without leaving anything out.

        position = step * prompts_per_step + 0 ... prompts_per_step - 1
        index = permutation(seed, position // num_prompts)[position % num_prompts]

    An epoch may end inside a step. The next permutation then starts with prompts that this step does not have yet: no
    prompt stands twice in a step.

    Nothing here remembers what was asked before; a permutation is only kept for the next call.

    Raises ConfigError for less than one prompt per step, DataError for more than there are prompts.
    """

    def __init__(self, num_prompts: int, prompts_per_step: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if prompts_per_step < 1:
            raise ConfigError(f"prompts_per_step is {prompts_per_step}. A step needs at least one prompt.")
        if prompts_per_step > num_prompts:
            raise DataError(
                f"a step takes {prompts_per_step} different prompts, but the data have only {num_prompts}. "
                f"Lower prompts_per_step to at most {num_prompts}, or give more rows."
            )
        self.num_prompts = num_prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self._permutation = lru_cache(maxsize=4)(self._compute_permutation)

    def at(self, step: int) -> tuple[int, ...]:
        """The prompts of a step, counted from 0: ``prompts_per_step`` different indices.

        Raises ValueError for a negative step.
        """
        if step < 0:
            raise ValueError(f"steps are counted from 0, got {step}")
        first = step * self.prompts_per_step
        epoch, start = divmod(first, self.num_prompts)
        indices = self._permutation(epoch)[start : start + self.prompts_per_step].tolist()
        missing = self.prompts_per_step - len(indices)
        return tuple(indices + (self._permutation(epoch + 1)[:missing].tolist() if missing else []))

    def _compute_permutation(self, epoch: int) -> Indices:
        """The order of one epoch, from the latest one that does not depend on the epoch before it.

        Only the first positions of a permutation bend to the epoch before. With two steps of prompts they are not the
        last positions, on which the next epoch depends: one epoch back is enough. With fewer prompts the dependence
        goes back to the last epoch that began together with a step.
        """
        if self.num_prompts >= 2 * self.prompts_per_step:
            start = max(epoch - 1, 0)
        else:
            start = epoch - epoch % (self.prompts_per_step // gcd(self.prompts_per_step, self.num_prompts))
        order = self._shuffled(start)
        for later in range(start + 1, epoch + 1):
            order = self._continued(order, later)
        return order

    def _continued(self, previous: Indices, epoch: int) -> Indices:
        """The order of an epoch that may begin inside the last step of the previous one."""
        num_used = epoch * self.num_prompts % self.prompts_per_step
        order = self._shuffled(epoch)
        if num_used == 0:
            return order
        first = order[~np.isin(order, previous[-num_used:])][: self.prompts_per_step - num_used]
        return np.concatenate([first, order[~np.isin(order, first)]])

    def _shuffled(self, epoch: int) -> Indices:
        if not self.shuffle:
            return np.arange(self.num_prompts)
        if self.num_prompts > LONG_ORDER:
            return np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts)
        order = list(range(self.num_prompts))
        Random(f"order {self.seed} {epoch}").shuffle(order)
        return np.array(order)


class Prompts:
    """The prompts of a run, in the order in which steps take them: what the training loop calls ``data``."""

    def __init__(
        self, prompts: Sequence[Prompt] | WrittenOnDemand, prompts_per_step: int, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        self.prompts = prompts if isinstance(prompts, WrittenOnDemand) else tuple(prompts)
        self.order = Order(len(self.prompts), prompts_per_step, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self.prompts)

    def at(self, step: int) -> list[Prompt]:
        """The prompts of a step, counted from 0; the same for every process that asks."""
        indices = self.order.at(step)
        if isinstance(self.prompts, WrittenOnDemand):
            return self.prompts.at(indices)
        return [self.prompts[index] for index in indices]

    def more(self, step: int, count: int, excluded: Collection[int]) -> list[Prompt]:
        """None: a step has the prompts that it has."""
        return []

    def observe(self, groups: Sequence[Group], graded: Sequence[Sequence[Reward]], *, step: int) -> None:
        """Nothing: the order does not depend on grades."""
