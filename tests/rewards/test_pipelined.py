"""Are groups graded while others are sampled, and with the rewards of grading them afterwards?"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from oncurve.core.grading import RewardFunction, grading, score
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.core.sampler import SamplingRequest
from oncurve.rewards.subprocess_reward import SubprocessReward
from oncurve.rewards.terms import PipelinedRewards

MakeGroups = Callable[..., list[Group]]
SOON = 30.0
"""Seconds until a test that hangs fails instead."""


class Plain:
    """A grader of a test's own; it notes the prompts of each call."""

    name = "plain"

    def __init__(self, value: Callable[[Completion], Reward]) -> None:
        self.value = value
        self.calls: list[list[int]] = []
        self.is_closed = False

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        self.calls.append(list(dict.fromkeys(prompt.index for prompt in prompts)))
        return [self.value(completion) for completion in completions]

    def close(self) -> None:
        self.is_closed = True


class Told:
    """A sampler that has its groups already, and tells of them in an order of its own."""

    def __init__(self, groups: Sequence[Group], order: Sequence[int], between: Callable[[int], None]) -> None:
        self.groups, self.order, self.between = groups, order, between
        self.on_group: Callable[[Group], None] | None = None

    def load_weights(self, policy: object, version: int) -> None: ...

    def sample(self, request: SamplingRequest) -> list[Group]:
        for place in self.order:
            if self.on_group is not None:
                self.on_group(self.groups[place])
            self.between(place)
        return list(self.groups)

    def close(self) -> None: ...


def by_text(completion: Completion) -> Reward:
    if completion.token_ids[0] % 7 == 0:
        return Reward(None, error="timeout", detail="over 3 s")
    return Reward(completion.token_ids[0] / 256, parts={"correct": float(completion.index == 1)})


def crashing(completion: Completion) -> Reward:
    if completion.token_ids[0] % 5 == 0:
        raise ZeroDivisionError(f"on {completion.token_ids}")
    return by_text(completion)


def graded(sampler: Told, function: RewardFunction) -> list[list[Reward]]:
    with grading(sampler, function) as early:
        groups = sampler.sample(SamplingRequest([], 0))
    assert sampler.on_group is None
    return score(groups, function, early)


@pytest.mark.parametrize("value", [by_text, crashing])
@pytest.mark.parametrize("seed", range(4))
def test_rewards_and_errors_are_those_of_grading_afterwards(
    value: Callable[[Completion], Reward], seed: int, random_groups: MakeGroups
) -> None:
    groups = random_groups(9, 4, seed=seed)
    order = random.Random(seed).sample(range(9), 9)
    expected = score(groups, Plain(value))
    assert any(reward.error for row in expected for reward in row)
    function = PipelinedRewards(Plain(value))
    assert graded(Told(groups, order, lambda place: None), function) == expected
    function.close()


def test_a_slow_grader_works_while_the_next_group_is_sampled(random_groups: MakeGroups) -> None:
    begun, sampled = threading.Event(), threading.Event()

    def value(completion: Completion) -> Reward:
        begun.set()
        assert sampled.wait(SOON), "sampling waited for the grader"
        return by_text(completion)

    def between(place: int) -> None:
        assert begun.wait(SOON), "the grader waited for the end of sampling"
        if place == 2:
            sampled.set()

    groups, function = random_groups(3, 2), Plain(value)
    early = PipelinedRewards(function)
    assert graded(Told(groups, [1, 0, 2], between), early) == score(groups, Plain(by_text))
    assert function.calls == [[1], [0, 2]], "what is left at the end is one call, in the order of the prompts"
    early.close()


def test_a_sampler_that_tells_nothing_and_a_function_that_must_not_are_graded_afterwards(
    random_groups: MakeGroups,
) -> None:
    groups, told = random_groups(3, 2), Told(random_groups(3, 2), [0, 1, 2], lambda place: None)
    plain = Plain(by_text)
    assert graded(told, plain) == score(groups, Plain(by_text))
    assert plain.calls == [[0, 1, 2]]
    del told.on_group
    early = PipelinedRewards(Plain(by_text))
    with grading(told, early) as begun:
        assert begun is None
    early.close()


def test_a_step_that_is_left_begins_nothing_more(random_groups: MakeGroups) -> None:
    groups, begun, go_on = random_groups(4, 2), threading.Event(), threading.Event()

    def value(completion: Completion) -> Reward:
        begun.set()
        assert go_on.wait(SOON)
        return by_text(completion)

    def between(place: int) -> None:
        assert begun.wait(SOON)
        if place == 2:
            raise KeyboardInterrupt

    function = Plain(value)
    early = PipelinedRewards(function)
    with pytest.raises(KeyboardInterrupt):
        graded(Told(groups, [0, 1, 2, 3], between), early)
    go_on.set()
    early.close()
    assert function.calls == [[0]]
    assert function.is_closed


def test_closing_ends_processes_that_grade(random_groups: MakeGroups, tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    slow = tmp_path / "slow.py"
    slow.write_text(
        f"import pathlib, time\ndef slow(completion):\n    pathlib.Path({str(mark)!r}).touch()\n    time.sleep(600)\n"
    )
    inner = SubprocessReward(f"{slow}:slow", timeout_seconds=600.0)
    early = PipelinedRewards(inner)
    with grading(Told(random_groups(2, 2), [0, 1], lambda place: None), early) as begun:
        assert begun is not None
        begun.take(random_groups(1, 1)[0])
        while not mark.exists():
            threading.Event().wait(0.01)
    early.close()
    assert [worker for worker in inner._pool._workers if worker.process is not None] == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("grading")]
