"""Do all processes get what the first one sampled from its servers?"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.core.sampler import SamplingRequest
from oncurve.run.data_parallel import MainRankSampler, ShardedRewards, ShardedSampler

PROMPTS = [Prompt("", (1,), 0), Prompt("", (2,), 1)]


class TwoThreads:
    """What the sampler needs of two processes, as two threads."""

    count = 2

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.given: dict[int, Any] = {}

    def of(self, rank: int) -> Any:
        outer, number = self, rank

        class Own:
            count, is_main, rank = 2, number == 0, number

            def all_gather(self, mine: Any) -> list[Any]:
                outer.given[number] = mine
                outer.barrier.wait()
                found = [outer.given[0], outer.given[1]]
                outer.barrier.wait()
                return found

        return Own()


class Numbered:
    version = -1

    def load_weights(self, policy: Any, version: int) -> None:
        self.version = version

    def sample(self, request: SamplingRequest) -> list[Group]:
        def completion(prompt: Prompt, place: int) -> Completion:
            return Completion(prompt.prompt_ids, (place,), "", (-1.0,), "stop", self.version, place)

        places = range(request.group_size)
        return [Group(prompt, tuple(completion(prompt, place) for place in places)) for prompt in request.prompts]

    def close(self) -> None:
        pass


class Published:
    times = 0

    def publish(self) -> None:
        self.times += 1


def test_the_first_process_samples_for_all() -> None:
    threads, policies = TwoThreads(), [Published(), Published()]
    samplers = [MainRankSampler(Numbered() if rank == 0 else None, threads.of(rank)) for rank in range(2)]  # type: ignore[arg-type]

    def work(rank: int) -> list[list[Group]]:
        samplers[rank].load_weights(policies[rank], 5)  # type: ignore[arg-type]
        return [samplers[rank].sample(SamplingRequest(prompts, 3)) for prompts in (PROMPTS, [])]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert first == second
    assert [group.prompt for group in first[0]] == PROMPTS
    assert {one.policy_version for group in first[0] for one in group.completions} == {5}
    assert first[1] == []
    assert [policy.times for policy in policies] == [1, 1], "weights in parts are put together by all"


class WithEnvironments(Numbered):
    def sample(self, request: SamplingRequest) -> list[Group]:
        groups = super().sample(request)
        return [
            replace(group, completions=tuple(replace(one, environment=threading.Lock()) for one in group.completions))
            for group in groups
        ]


class NeedsEnvironments:
    name = "needs"

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> list[Reward]:
        assert all(one.environment is not None for one in completions)
        return [Reward(float(one.token_ids[0])) for one in completions]


def test_the_first_process_grades_the_environments_that_it_holds() -> None:
    threads = TwoThreads()

    def work(rank: int) -> list[Reward]:
        own = threads.of(rank)
        sampler = MainRankSampler(WithEnvironments() if rank == 0 else None, own)  # type: ignore[arg-type]
        groups = sampler.sample(SamplingRequest(PROMPTS, 3))
        grader = ShardedRewards(NeedsEnvironments(), own)  # type: ignore[arg-type]
        prompts = [group.prompt for group in groups for _ in group.completions]
        return grader(prompts, [one for group in groups for one in group.completions])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert first == second == [Reward(value) for value in (0.0, 1.0, 2.0)] * 2


@pytest.mark.parametrize("kept", [(0, 1, 2, 3), (0, 2, 3), (1,), (1, 2), ()])
def test_environments_are_graded_where_they_live_whichever_prompts_are_left(kept: tuple[int, ...]) -> None:
    threads, asked = TwoThreads(), [Prompt("", (number,), number) for number in range(4)]

    def work(rank: int) -> list[Reward]:
        own = threads.of(rank)
        groups = ShardedSampler(WithEnvironments(), own).sample(SamplingRequest(asked, 2))
        left = [groups[place] for place in kept]
        prompts = [group.prompt for group in left for _ in group.completions]
        grader = ShardedRewards(NeedsEnvironments(), own)  # type: ignore[arg-type]
        return grader(prompts, [one for group in left for one in group.completions])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert first == second == [Reward(value) for value in (0.0, 1.0)] * len(kept)
