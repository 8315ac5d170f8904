"""Overlap of rollouts and training: the next step is sampled from this step's weights while this step trains.

The loop does not know: it asks for the completions of a step, and they are there already, one step old. Servers change
their weights only between two steps' rollouts, so that every completion is of one version, which is a function of its
step: the same run twice gives the same completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from oncurve.records import Group, Prompt
from oncurve.rollouts.base import PolicyView, Sampler, SamplingParams


class Prefetch:
    """A sampler that is one step ahead. The one inside must not read the policy's weights after ``load_weights``."""

    def __init__(
        self,
        sampler: Sampler,
        prompts_at: Callable[[int], Sequence[Prompt]],
        *,
        total_steps: int,
        prepare: Callable[[PolicyView, int], None] | None = None,
    ) -> None:
        """``prompts_at`` gives the prompts of a step, also of one that has not come yet; ``prepare`` hears of weights
        while rollouts from older ones are under way."""
        self._prepare = prepare
        self.sampler, self.prompts_at, self.total_steps = sampler, prompts_at, total_steps
        self._given: tuple[PolicyView, int] | None = None
        """Weights that the loop gave, and the sampler does not have yet."""
        self._ahead: _Ahead | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Remember the weights: rollouts that are under way still need the old ones."""
        self._given = (policy, version)
        if self._prepare is not None and self._ahead is not None and not self._ahead.future.done():
            self._prepare(policy, version)

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, *, step: int = 0, params: SamplingParams | None = None
    ) -> list[Group]:
        """The groups of a step, sampled before where possible; other prompts, and other settings, at once."""
        ahead, groups = self._ahead, None
        if ahead is not None and params is None and ahead.is_for(step, prompts, group_size):
            groups, self._ahead = ahead.future.result(), None
        self._refresh()
        if groups is None:
            groups = self.sampler.sample(prompts, group_size, step=step, params=params)
        if params is None and self._ahead is None and step + 1 < self.total_steps:
            following = list(self.prompts_at(step + 1))
            future = self._thread.submit(self.sampler.sample, following, group_size, step=step + 1)
            self._ahead = _Ahead(step + 1, following, group_size, future)
        return groups

    def close(self) -> None:
        """Give up what is under way."""
        self.sampler.close()
        self._thread.shutdown(cancel_futures=True)

    def _refresh(self) -> None:
        """Give the sampler the newest weights, once nothing is under way from the old ones."""
        if self._given is not None:
            if self._ahead is not None:
                self._ahead.future.result()
            self.sampler.load_weights(*self._given)
            self._given = None


@dataclass(frozen=True)
class _Ahead:
    """The rollouts of a step that has not come yet."""

    step: int
    prompts: list[Prompt]
    group_size: int
    future: Future[list[Group]]

    def is_for(self, step: int, prompts: Sequence[Prompt], group_size: int) -> bool:
        """These are the rollouts that are asked for."""
        return (step, list(prompts), group_size) == (self.step, self.prompts, self.group_size)
