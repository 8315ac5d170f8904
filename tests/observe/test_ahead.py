"""Is a run told rightly what sampling ahead of training would have saved?"""

from __future__ import annotations

import random

import pytest

from oncurve.core.records import Completion, Group, Prompt, Segment
from oncurve.observe.ahead import seconds_ahead, tip_of_waiting
from oncurve.observe.measure import age_metrics


def test_steps_ahead_take_the_longer_of_both_and_without_them_the_sum() -> None:
    draw = random.Random(0)
    sampling, training = [draw.lognormvariate(0, 1) for _ in range(50)], [1.0] * 50
    seconds = [seconds_ahead(sampling, training, staleness) for staleness in range(9)]
    assert seconds[0] == pytest.approx(sum(sampling) + 50)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] >= max(sum(sampling), 50)
    assert seconds_ahead(sampling, training, 50) == pytest.approx(
        max(sum(sampling[: n + 1]) + 50 - n for n in range(50))
    )


def test_only_a_run_that_waited_more_than_a_third_gets_the_tip() -> None:
    waiting = [{"time/sample_seconds": 3.0, "time/step_seconds": 5.0}] * 10
    tip = tip_of_waiting([{"step": 0.0}, *waiting])
    assert tip is not None
    assert "60%" in tip
    assert "32 s instead of 50 s" in tip
    assert tip_of_waiting([{"time/sample_seconds": 1.6, "time/step_seconds": 5.0}] * 10) is None
    assert tip_of_waiting([]) is None


def test_tokens_are_as_old_as_the_weights_that_sampled_them() -> None:
    mixed = Completion((1,), (2,) * 6, "", (-1.0,) * 6, "stop", 3, 0, versions=((0, 3), (4, 5)))
    told = Completion((1,), (2,) * 4, "", (-1.0,) * 4, "stop", 4, 1,
                      segments=(Segment(True, 0, 2, "a"), Segment(False, 2, 4, "b")))  # fmt: skip
    found = age_metrics(5, [Group(Prompt("", (1,), 0), (mixed, told))])
    assert found == {
        "tokens/mean_age_steps": (4 * 2 + 2 * 0 + 2 * 1) / 8,
        "tokens/max_age_steps": 2.0,
        "tokens/newest_fraction": 2 / 8,
        "tokens/mixed_fraction": 0.5,
    }
