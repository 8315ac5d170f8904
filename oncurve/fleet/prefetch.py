"""Overlap of rollouts and training: the next step is sampled from this step's weights while this step trains.

The loop does not know: it asks for the completions of a step, and they are there already, one step old. Servers change
their weights only between two steps' rollouts, so that every completion is of one version, which is a function of its
step: the same run twice gives the same completions. Where the sampler takes a copy of new weights, they travel to the
servers while this step trains as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from oncurve.records import Group, Prompt
from oncurve.sample.base import PolicyView, Sampler, SamplingParams


class Prefetch:
    """A sampler that is one step ahead. The one inside must not read the policy's weights after ``load_weights``."""

    def __init__(
        self,
        sampler: Sampler,
        prompts_at: Callable[[int], Sequence[Prompt]],
        *,
        total_steps: int,
        prepare: Callable[[PolicyView, int], bool] = lambda policy, version: False,
    ) -> None:
        """``prompts_at`` gives the prompts of a step, also of one that has not come yet. ``prepare`` hears of weights
        before ``load_weights`` of the sampler does, and says whether it has taken a copy of them."""
        self._prepare, self._is_taken = prepare, False
        self.sampler, self.prompts_at, self.total_steps = sampler, prompts_at, total_steps
        self._given: tuple[PolicyView, int] | None = None
        """Weights that the loop gave, and the sampler does not have yet."""
        self._loading: Future[None] | None = None
        """The newest weights on their way to the sampler, of which a copy was taken."""
        self._ahead: _Ahead | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Remember the weights: rollouts that are under way still need the old ones."""
        self._given = (policy, version)
        self._is_taken = self._ahead is not None and self._prepare(policy, version)

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, *, step: int = 0, params: SamplingParams | None = None
    ) -> list[Group]:
        """The groups of a step, sampled before where possible; other prompts, and other settings, at once."""
        ahead, groups, has_next = self._ahead, None, params is None and step + 1 < self.total_steps
        if ahead is not None and params is None and ahead.is_for(step, prompts, group_size):
            groups, self._ahead = ahead.future.result(), None
        if groups is not None and has_next and self._given is not None and self._is_taken:
            self._loading = self._thread.submit(self.sampler.load_weights, *self._given)
            self._given = None
        else:
            self._refresh()
        if groups is None:
            groups = self.sampler.sample(prompts, group_size, step=step, params=params)
        if has_next and self._ahead is None:
            following = list(self.prompts_at(step + 1))
            future = self._thread.submit(self._sample_ahead, self._loading, following, group_size, step + 1)
            self._ahead = _Ahead(step + 1, following, group_size, future)
        return groups

    def close(self) -> None:
        """Give up what is under way."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.sampler.close()
        self._thread.shutdown()

    def _sample_ahead(
        self, loading: Future[None] | None, prompts: list[Prompt], group_size: int, step: int
    ) -> list[Group]:
        if loading is not None:
            loading.result()  # without its weights nothing is sampled
        return self.sampler.sample(prompts, group_size, step=step)

    def _refresh(self) -> None:
        """Give the sampler the newest weights, once nothing is under way from the old ones."""
        if self._loading is not None:
            self._loading.result()
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
