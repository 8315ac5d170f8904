"""Look-ahead: the completions of later steps are sampled while this one trains.

The loop does not know: it asks for the completions of a step, and they are there already, or on their way. Every step
has the prompts that it would have without look-ahead. Where weights change only between blocks of steps, a step's
version is a function of its number, and the same run twice gives the same completions. With ``in_flight`` they change
under rows that run, and every completion says which of its tokens came from which weights.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from oncurve.core.records import Group, Prompt
from oncurve.core.sampler import PolicyView, Sampler, SamplingRequest, TellsGroups
from oncurve.observe.ahead import block_steps

T = TypeVar("T")


class Prefetch:
    """A sampler that is up to ``staleness`` steps ahead.

    The sampler inside must not read the policy's weights after ``load_weights``, unless it is ``at_once``.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts_at: Callable[[int], Sequence[Prompt]],
        *,
        total_steps: int,
        staleness: int = 1,
        in_flight: bool = False,
        at_once: bool = False,
        prepare: Callable[[PolicyView, int], bool] = lambda policy, version: False,
    ) -> None:
        """``prompts_at`` gives the prompts of a step, also of one that has not come yet. ``prepare`` hears of weights
        before ``load_weights`` of the sampler does, and says whether it has taken a copy of them. ``in_flight``: the
        sampler takes weights at any time. ``at_once``: it samples from the policy itself, so that later steps are
        sampled before this one trains."""
        self.sampler, self.prompts_at, self.total_steps = sampler, prompts_at, total_steps
        self.staleness, self.in_flight, self._prepare = staleness, in_flight, prepare
        self._block = 1 if in_flight else block_steps(staleness)
        self._newest: tuple[PolicyView, int] | None = None
        """Weights that the loop gave, and the sampler does not have yet."""
        self._is_prepared = False
        """A copy of these was made."""
        self._loading: Future[None] | None = None
        """The newest weights on their way to the sampler, of which a copy was taken."""
        self._ahead: dict[int, _Ahead] = {}
        self._last = -1
        """The step whose groups were asked for last."""
        self._finished: dict[int, tuple[_Ahead, int]] = {}
        """By identity of a prompt that is under way: its step and its place there."""
        self._restored: dict[int, list[Group]] = {}
        self._changing = threading.Lock()
        """Held while weights change, and by whoever samples beside the steps that are under way."""
        self._loader: Executor = _AtOnce() if at_once else ThreadPoolExecutor(1, thread_name_prefix="prefetch-weights")
        self._threads: Executor = (
            _AtOnce() if at_once else ThreadPoolExecutor(2 * staleness + 2, thread_name_prefix="prefetch")
        )
        if isinstance(sampler, TellsGroups):
            sampler.on_group = self._take

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Remember the weights: rollouts that are under way still need the old ones, unless they may change."""
        if self.in_flight:
            self.sampler.load_weights(policy, version)
            return
        self._newest = (policy, version)
        self._is_prepared = bool(self._ahead) and self._is_due(version) and self._prepare(policy, version)

    def sample(self, request: SamplingRequest) -> list[Group]:
        """The groups of a step, sampled before where possible; other prompts, and other settings, at once."""
        if request.params is not None:
            self._refresh()
            return self._beside(request)
        step = request.step
        ahead = self._ahead.get(step)
        if step == self._last or (ahead is not None and ahead.request != request):
            if ahead is None:
                self._refresh()
            return self._beside(request)
        self._last = step
        for old in [number for number in self._ahead if number < step]:
            self._forget(old)
        if self._is_due(step):
            self._submit(request)
        return self._ahead[step].future.result()

    def _is_due(self, step: int) -> bool:
        """Further steps are to be asked for when this one begins."""
        return step not in self._ahead or step % self._block == 0

    def _submit(self, request: SamplingRequest) -> None:
        """Ask for the steps that are sampled from the weights of this one. A step's version does not depend on where
        the run was resumed, as long as its groups were kept."""
        step = request.step
        until = min(step - step % self._block + self.staleness, self.total_steps - 1)
        missing = [number for number in range(step, max(until, step) + 1) if number not in self._ahead]
        if not missing:
            return
        if self._newest is not None and self._is_prepared:
            before = [ahead.future for ahead in self._ahead.values()]
            self._loading = self._loader.submit(self._load, self._loading, before, *self._newest)
            self._newest = None
        else:
            self._refresh()
        for number in missing:
            prompts = request.prompts if number == step else self.prompts_at(number)
            self._begin(replace(request, prompts=list(prompts), step=number))

    def _begin(self, request: SamplingRequest) -> None:
        own = [replace(prompt) for prompt in request.prompts]  # each its own object, by which its group is known
        ahead = self._ahead[request.step] = _Ahead(request, own)
        ahead.groups |= _matching(request.with_prompts(own), self._restored.pop(request.step, ()))
        for index, prompt in enumerate(own):
            self._finished[id(prompt)] = (ahead, index)
        ahead.future = self._threads.submit(self._sample_ahead, self._loading, ahead)

    def _sample_ahead(self, loading: Future[None] | None, ahead: _Ahead) -> list[Group]:
        if loading is not None:
            loading.result()  # without its weights nothing is sampled
        indices = [index for index in range(len(ahead.own)) if index not in ahead.groups]
        if indices:
            groups = self.sampler.sample(ahead.request.with_prompts([ahead.own[index] for index in indices]))
            ahead.groups |= dict(zip(indices, groups, strict=True))
        return [Group(prompt, ahead.groups[index].completions) for index, prompt in enumerate(ahead.request.prompts)]

    def _load(
        self, loading: Future[None] | None, before: Sequence[Future[list[Group]]], policy: PolicyView, version: int
    ) -> None:
        """Give the sampler weights of which it has a copy, once nothing is under way from older ones."""
        if loading is not None:
            loading.result()
        wait(before)
        with self._changing:
            self.sampler.load_weights(policy, version)

    def _beside(self, request: SamplingRequest) -> list[Group]:
        """Sample something else now, from the weights that the sampler has, which do not change meanwhile."""
        with nullcontext() if self.in_flight else self._changing:
            return self.sampler.sample(request)

    def _refresh(self) -> None:
        """Give the sampler the newest weights, once nothing is under way from the old ones."""
        if self._loading is not None:
            self._loading.result()
        if self._newest is not None:
            wait([ahead.future for ahead in self._ahead.values()])
            self.sampler.load_weights(*self._newest)
            self._newest = None

    def _take(self, group: Group) -> None:
        """A group is whole, while others of its step may not be."""
        if (entry := self._finished.get(id(group.prompt))) is not None:
            ahead, index = entry
            ahead.groups[index] = group

    def _forget(self, step: int) -> None:
        for prompt in self._ahead.pop(step).own:
            self._finished.pop(id(prompt), None)

    def finished(self, step: int) -> dict[int, list[Group]]:
        """The whole groups of this step and of later ones, for a checkpoint. Those with a live environment cannot be
        kept, and are begun again."""
        finished = {number: list(groups) for number, groups in self._restored.items() if number >= step}
        for number, ahead in list(self._ahead.items()):
            whole = [group for _, group in sorted(dict(ahead.groups).items())]
            whole = [
                group for group in whole if all(completion.environment is None for completion in group.completions)
            ]
            if number >= step and whole:
                finished[number] = whole
        return finished

    def restore(self, groups: Mapping[int, Sequence[Group]]) -> None:
        """Take groups that were finished before a run stopped; those that would be too old are sampled anew."""
        self._restored = {
            step: [
                group
                for group in stored
                if all(0 <= step - completion.policy_version <= self.staleness for completion in group.completions)
            ]
            for step, stored in groups.items()
        }

    def close(self) -> None:
        """Give up what is under way."""
        for executor in (self._loader, self._threads):
            executor.shutdown(wait=False, cancel_futures=True)
        self.sampler.close()
        for executor in (self._loader, self._threads):
            executor.shutdown()


@dataclass(eq=False)
class _Ahead:
    """The rollouts of a step that may not have come yet."""

    request: SamplingRequest
    own: list[Prompt]
    """Its prompts, as objects of this step alone."""
    groups: dict[int, Group] = field(default_factory=dict)
    """Groups that are whole, by place."""
    future: Future[list[Group]] = field(default_factory=Future)


def _matching(request: SamplingRequest, groups: Sequence[Group]) -> dict[int, Group]:
    """The groups of prompts that are asked for, by place. The completions of a prompt that occurs twice are counted in
    its random streams, so that all its groups must be there, or none is taken."""
    prompts = request.prompts
    indices: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        indices.setdefault(prompt.index, []).append(index)
    known = Counter(group.prompt.index for group in groups)
    matches: dict[int, Group] = {}
    for group in groups:
        candidates = indices.get(group.prompt.index, [])
        is_whole = len(group.completions) == request.group_size and len(candidates) == known[group.prompt.index]
        fits = [p for p in candidates if p not in matches and prompts[p].prompt_ids == group.prompt.prompt_ids]
        if is_whole and fits:
            matches[fits[0]] = group
    return matches


class _AtOnce(Executor):
    """Does what is submitted in the thread that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """The finished future of a call. What the call raises comes out here, where the loop is."""
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
