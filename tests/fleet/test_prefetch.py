"""Is the next step sampled while this one trains, from weights that are exactly one step old?"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from oncurve.core.errors import SamplerError, TrainingError
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.fleet.prefetch import Prefetch
from oncurve.observe.progress import Progress
from oncurve.observe.record import RunFolder
from oncurve.run.step_log import StepLog

POLICY: Any = SimpleNamespace()


class Noted:
    """A sampler that notes what it is asked, and waits to be let go on."""

    def __init__(self) -> None:
        self.version = -1
        self.asked: list[tuple[int, int]] = []
        """Step and version of each call."""
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fails = self.tells = False
        self.has_told = threading.Event()
        self.on_group: Any = None

    def load_weights(self, policy: Any, version: int) -> None:
        self.version = version

    def sample(self, request: SamplingRequest) -> list[Group]:
        version = self.version
        self.asked.append((request.step, version))
        one = Completion((1,), (2,), "", (-1.0,), "stop", version, 0)
        groups = [Group(prompt, (one,) * request.group_size) for prompt in request.prompts]
        for _ in range(1000):
            if self.may_go_on.wait(0.01):
                break
            if self.tells and not self.has_told.is_set():
                self.on_group(groups[0])
                self.has_told.set()
        else:
            raise AssertionError("it was never let go on")
        assert self.version == version, "weights changed under rollouts that are under way"
        if self.fails:
            raise SamplerError("as told")
        return groups

    def close(self) -> None:
        pass


def prompts_at(step: int) -> list[Prompt]:
    return [Prompt("", (1,), 10 * step + place) for place in range(2)]


def versions(groups: list[Group]) -> set[int]:
    return {completion.policy_version for group in groups for completion in group.completions}


@pytest.fixture
def inner() -> Noted:
    return Noted()


@pytest.fixture
def prefetch(inner: Noted) -> Iterator[Prefetch]:
    made = Prefetch(inner, prompts_at, total_steps=4)
    yield made
    inner.may_go_on.set()
    made.close()


def run_step(prefetch: Prefetch, step: int) -> list[Group]:
    prefetch.load_weights(POLICY, version=step)
    groups = prefetch.sample(SamplingRequest(prompts_at(step), 3, step=step))
    assert [group.prompt.index for group in groups] == [10 * step, 10 * step + 1]
    return groups


def test_every_step_but_the_first_is_one_step_old_and_nothing_is_sampled_beyond_the_last(
    inner: Noted, prefetch: Prefetch
) -> None:
    assert [versions(run_step(prefetch, step)) for step in range(4)] == [{0}, {0}, {1}, {2}]
    assert inner.asked == [(0, 0), (1, 0), (2, 1), (3, 2)]


def test_a_step_trains_while_the_next_one_is_sampled(inner: Noted, prefetch: Prefetch) -> None:
    run_step(prefetch, 0)
    prefetch._ahead[1].future.result(10)
    inner.may_go_on.clear()
    run_step(prefetch, 1)  # comes back although step 2 is not sampled yet
    inner.may_go_on.set()
    assert versions(run_step(prefetch, 2)) == {1}


def test_measuring_waits_for_rollouts_under_way_and_has_the_newest_weights(inner: Noted, prefetch: Prefetch) -> None:
    run_step(prefetch, 0)
    prefetch.load_weights(POLICY, version=1)
    measured = prefetch.sample(SamplingRequest(prompts_at(7), 1, params=SamplingParams(temperature=0)))
    assert versions(measured) == {1}
    assert versions(run_step(prefetch, 1)) == {0}
    assert inner.asked.count((1, 0)) == 1, "what was under way is kept"


def test_prompts_that_take_the_place_of_others_are_sampled_at_once(inner: Noted, prefetch: Prefetch) -> None:
    run_step(prefetch, 0)
    assert versions(prefetch.sample(SamplingRequest(prompts_at(9), 3, step=0))) == {0}
    run_step(prefetch, 1)
    assert versions(prefetch.sample(SamplingRequest(prompts_at(9), 3, step=1))) == {1}


def test_a_failure_under_way_is_told_when_its_step_comes(inner: Noted, prefetch: Prefetch) -> None:
    inner.may_go_on.set()
    run_step(prefetch, 0)
    prefetch._ahead[1].future.result(10)
    inner.fails = True
    run_step(prefetch, 1)
    with pytest.raises(SamplerError, match="as told"):
        run_step(prefetch, 2)


@pytest.mark.parametrize(
    ("staleness", "expected"), [(2, [0, 0, 0, 1, 2, 3, 4, 5, 6]), (4, [0, 0, 0, 0, 0, 2, 2, 4, 4])]
)
@pytest.mark.parametrize("at_once", [False, True])
def test_the_version_of_a_step_is_a_function_of_its_number(
    inner: Noted, staleness: int, expected: list[int], at_once: bool
) -> None:
    ahead = Prefetch(
        inner, prompts_at, total_steps=9, staleness=staleness, at_once=at_once, prepare=lambda policy, version: True
    )
    inner.may_go_on.set()
    assert [versions(run_step(ahead, step)) for step in range(9)] == [{version} for version in expected]
    assert sorted(step for step, _ in inner.asked) == list(range(9)), "some step was sampled twice"
    ahead.close()


def test_finished_groups_of_coming_steps_are_kept_and_only_the_others_are_sampled_again(inner: Noted) -> None:
    ahead = Prefetch(inner, prompts_at, total_steps=20, staleness=4, at_once=True)
    for step in range(3):
        run_step(ahead, step)
    kept = ahead.finished(3)
    assert {step: [group.prompt.index for group in groups] for step, groups in kept.items()} == {
        step: [10 * step, 10 * step + 1] for step in range(3, 7)
    }
    kept[4], kept[5] = kept[4][:1], [replace(group, completions=group.completions[:1]) for group in kept[5]]
    old = Completion((1,), (2,), "", (-1.0,), "stop", 1, 0)
    kept[6] = [replace(group, completions=(old,) * 3) for group in kept[6]]
    fresh = Noted()
    again = Prefetch(fresh, prompts_at, total_steps=20, staleness=4, at_once=True)
    again.restore(kept)
    assert versions(run_step(again, 3)) == {0}
    mixed = run_step(again, 4)
    assert [versions([group]) for group in mixed] == [{0}, {3}]
    assert versions(run_step(again, 5)) == {3}, "groups of another size were taken"
    assert versions(run_step(again, 6)) == {3}, "a group was taken that is five steps old"
    assert versions(run_step(again, 7)) == {4}
    assert [step for step, _ in fresh.asked] == [4, 5, 6, 7, 8, 9, 10]


def test_what_is_unfinished_when_a_run_stops_can_be_kept_group_by_group(inner: Noted) -> None:
    ahead = Prefetch(inner, prompts_at, total_steps=4)
    inner.on_group = ahead._take
    run_step(ahead, 0)
    ahead._ahead[1].future.result(10)
    inner.may_go_on.clear()
    run_step(ahead, 1)
    inner.tells = True
    assert inner.has_told.wait(10)
    assert [group.prompt.index for group in ahead.finished(2)[2]] == [20]
    inner.may_go_on.set()
    run_step(ahead, 2)
    ahead.close()


@pytest.mark.proves("D3")
def test_the_loop_refuses_completions_that_are_too_old(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder, Progress(3, console=Console(file=io.StringIO())) as progress:
        for allowed, version, is_fine in ((0, 2, True), (0, 1, False), (1, 1, True), (1, 0, False), (1, 3, False)):
            log = StepLog(folder, progress, max_staleness_steps=allowed)
            one = Completion((1,), (2,), "", (-1.0,), "stop", version, 0)
            groups = [Group(Prompt("", (1,), 0), (one,))]
            if is_fine:
                assert log.check_age(2, groups)["completion/max_staleness_steps"] == 2 - version
            else:
                with pytest.raises(TrainingError, match=r"rollouts\.staleness"):
                    log.check_age(2, groups)
