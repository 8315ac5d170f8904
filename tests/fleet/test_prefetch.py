"""Is the next step sampled while this one trains, from weights that are exactly one step old?"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from oncurve.errors import SamplerError, TrainingError
from oncurve.fleet.prefetch import Prefetch
from oncurve.observe.progress import Progress
from oncurve.observe.record import RunFolder
from oncurve.records import Completion, Group, Prompt
from oncurve.run.step_log import StepLog
from oncurve.sample.base import SamplingParams

POLICY: Any = SimpleNamespace()


class Noted:
    """A sampler that notes what it is asked, and waits to be let go on."""

    def __init__(self) -> None:
        self.version = -1
        self.asked: list[tuple[int, int]] = []
        """Step and version of each call."""
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fails = False

    def load_weights(self, policy: Any, version: int) -> None:
        self.version = version

    def sample(
        self, prompts: list[Prompt], group_size: int, *, step: int = 0, params: SamplingParams | None = None
    ) -> list[Group]:
        version = self.version
        self.asked.append((step, version))
        assert self.may_go_on.wait(10)
        assert self.version == version, "weights changed under rollouts that are under way"
        if self.fails:
            raise SamplerError("as told")
        one = Completion((1,), (2,), "", (-1.0,), "stop", version, 0)
        return [Group(prompt, (one,) * group_size) for prompt in prompts]

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
    groups = prefetch.sample(prompts_at(step), 3, step=step)
    assert [group.prompt.index for group in groups] == [10 * step, 10 * step + 1]
    return groups


def test_every_step_but_the_first_is_one_step_old_and_nothing_is_sampled_beyond_the_last(
    inner: Noted, prefetch: Prefetch
) -> None:
    assert [versions(run_step(prefetch, step)) for step in range(4)] == [{0}, {0}, {1}, {2}]
    assert inner.asked == [(0, 0), (1, 0), (2, 1), (3, 2)]


def test_a_step_trains_while_the_next_one_is_sampled(inner: Noted, prefetch: Prefetch) -> None:
    run_step(prefetch, 0)
    assert prefetch._ahead is not None
    prefetch._ahead.future.result(10)
    inner.may_go_on.clear()
    run_step(prefetch, 1)  # comes back although step 2 is not sampled yet
    inner.may_go_on.set()
    assert versions(run_step(prefetch, 2)) == {1}


def test_measuring_waits_for_rollouts_under_way_and_has_the_newest_weights(inner: Noted, prefetch: Prefetch) -> None:
    run_step(prefetch, 0)
    prefetch.load_weights(POLICY, version=1)
    measured = prefetch.sample(prompts_at(7), 1, params=SamplingParams(temperature=0))
    assert versions(measured) == {1}
    assert versions(run_step(prefetch, 1)) == {0}
    assert inner.asked.count((1, 0)) == 1, "what was under way is kept"


def test_prompts_that_take_the_place_of_others_are_sampled_at_once(inner: Noted, prefetch: Prefetch) -> None:
    run_step(prefetch, 0)
    assert versions(prefetch.sample(prompts_at(9), 3, step=0)) == {0}
    run_step(prefetch, 1)
    assert versions(prefetch.sample(prompts_at(9), 3, step=1)) == {1}


def test_a_failure_under_way_is_told_when_its_step_comes(inner: Noted, prefetch: Prefetch) -> None:
    inner.may_go_on.set()
    run_step(prefetch, 0)
    ahead = prefetch._ahead
    assert ahead is not None
    ahead.future.result(10)
    inner.fails = True
    run_step(prefetch, 1)
    with pytest.raises(SamplerError, match="as told"):
        run_step(prefetch, 2)


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
