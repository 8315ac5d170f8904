"""Data parallel sampling and grading: the share of each process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from oncurve.core.errors import OncurveError
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.core.sampler import PolicyView, Sampler, SamplingRequest
from oncurve.policy.distributed import Processes
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.interruption import Interrupted, Interruption

T = TypeVar("T")


class ShardedSampler:
    """Every process samples its share of the prompts; all of them get all groups.

    Random numbers belong to their place in the data, so that the engine samples the same completions however many
    processes there are. A prompt that occurs twice stays with one process, which counts its completions.
    """

    def __init__(self, sampler: Sampler, processes: Processes, interruption: Interruption | None = None) -> None:
        self.sampler, self.processes = sampler, processes
        self.interruption = interruption or Interruption(is_alone=False)

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Sample from these weights from now on. Weights in parts are put together here, by all processes."""
        cast("TrainedPolicy", policy).publish()
        self.sampler.load_weights(policy, version)

    def sample(self, request: SamplingRequest) -> list[Group]:
        """One group per prompt, in order, on every process. All processes must call it with the same prompts."""
        indices = own_indices(request.prompts, self.processes)
        share, own = request.with_prompts([request.prompts[index] for index in indices]), dict[int, Group]()

        def sample_share() -> list[tuple[int, tuple[Completion, ...]]]:
            groups = self.sampler.sample(share) if share.prompts else []
            own.update(zip(indices, groups, strict=True))
            return [(index, _sendable(group)) for index, group in own.items()]

        sampled = dict(together(sample_share, self.processes, self.interruption))
        return [own.get(index) or Group(prompt, sampled[index]) for index, prompt in enumerate(request.prompts)]

    def close(self) -> None:
        """Give back what the sampler took."""
        self.sampler.close()


class MainRankSampler:
    """The first process samples everything, from servers of its own; all of them get all groups."""

    def __init__(self, sampler: Sampler | None, processes: Processes, interruption: Interruption | None = None) -> None:
        """Only the first process has a ``sampler``."""
        self.sampler, self.processes = sampler, processes
        self.interruption = interruption or Interruption(is_alone=False)

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Sample from these weights from now on. All processes must call it."""
        cast("TrainedPolicy", policy).publish()
        if self.sampler is not None:
            self.sampler.load_weights(policy, version)

    def sample(self, request: SamplingRequest) -> list[Group]:
        """One group per prompt, in order, on every process. All processes must call it."""

        own: list[Group] = []

        def sample_all() -> list[tuple[Completion, ...]]:
            if self.sampler is not None:
                own.extend(self.sampler.sample(request))
            return [_sendable(group) for group in own]

        sampled = together(sample_all, self.processes, self.interruption)
        return own or [Group(prompt, completions) for prompt, completions in zip(request.prompts, sampled, strict=True)]

    def close(self) -> None:
        """Let go of the servers."""
        if self.sampler is not None:
            self.sampler.close()


def _sendable(group: Group) -> tuple[Completion, ...]:
    """The completions of a group without their environments, which stay in the process that they live in."""
    return tuple(
        replace(completion, environment=None) if completion.environment is not None else completion
        for completion in group.completions
    )


class ShardedRewards:
    """Every process grades the completions of its share of the prompts; all of them get all rewards.

    Completions of environments are graded by the process in which those live.
    """

    def __init__(
        self,
        function: RewardFunction,
        processes: Processes,
        interruption: Interruption | None = None,
    ) -> None:
        self.function, self.processes, self.name = function, processes, function.name
        self.interruption = interruption or Interruption(is_alone=False)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion, on every process. All processes must call it with the same completions."""
        indices = self._own_indices(prompts, completions)
        mine = [(prompts[index], completions[index]) for index in indices]

        def grade_share() -> list[tuple[int, Reward]]:
            rewards = grade(self.function, [p for p, _ in mine], [c for _, c in mine]) if mine else []
            return list(zip(indices, rewards, strict=True))

        graded = dict(together(grade_share, self.processes, self.interruption))
        return [graded[index] for index in range(len(completions))]

    def _own_indices(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[int]:
        """This process's share. Prompts that were sampled may be missing: their episodes failed."""
        live = [index for index, completion in enumerate(completions) if completion.environment is not None]
        everywhere = {index for indices in self.processes.all_gather(live) for index in indices}
        return sorted([*live, *(index for index in own_indices(prompts, self.processes) if index not in everywhere)])

    def close(self) -> None:
        """End the graders' processes."""
        self.function.close()


def together(work: Callable[[], list[T]], processes: Processes, interruption: Interruption) -> list[T]:
    """Do the own share and put all shares together. All processes must call it.

    Raises Interrupted in all of them if one was told to go in the middle of its share. An error for the user in one is
    raised in all, so that they save together; it says what it is about where it happened, and nothing elsewhere.
    """
    share: list[T] | None = None
    failed: OncurveError | None = None
    try:
        with interruption.own_share():
            share = work()
    except Interrupted:
        pass  # the others are told where they wait for this share
    except OncurveError as error:
        failed = error
    shares = processes.all_gather((share, interruption.number, type(failed) if failed else None))
    if failed is not None:
        raise failed
    for _, _, kind in shares:
        if kind is not None:
            raise kind("")
    if any(items is None for items, _, _ in shares):
        interruption.ask(max(number for _, number, _ in shares))
        raise Interrupted
    return [part for items, _, _ in shares for part in items or ()]


def own_indices(prompts: Sequence[Prompt], processes: Processes) -> list[int]:
    """Places of the prompts that are this process's share: every so-many-th of the different ones."""
    numbers: dict[int, int] = {}
    for prompt in prompts:
        numbers.setdefault(prompt.index, len(numbers))
    return [index for index, prompt in enumerate(prompts) if numbers[prompt.index] % processes.count == processes.rank]
