"""Are the metrics of a step the ones that a hand computation gives?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from oncurve.core.records import Completion, FinishReason, Group, Prompt, Reward
from oncurve.observe.measure import rollout_metrics
from oncurve.observe.metrics import unknown_keys


def group(index: int, lengths: Sequence[int], reasons: Sequence[FinishReason] | None = None) -> Group:
    prompt = Prompt(text="?", prompt_ids=(1,), index=index)
    reasons = reasons or ["stop"] * len(lengths)
    completions = tuple(
        Completion((1,), (2,) * length, "x", (-1.0,) * length, reason, 0, place)
        for place, (length, reason) in enumerate(zip(lengths, reasons, strict=True))
    )
    return Group(prompt, completions)


def graded(value: float, form: float = 1.0) -> Reward:
    return Reward(value, {"correct": value, "format": form})


FAILED = Reward(None, error="timeout", detail="too slow")


@pytest.mark.proves("F115", "F116", "F119")
def test_two_groups_by_hand() -> None:
    groups = [group(0, [2, 4], ["stop", "length"]), group(1, [6, 8])]
    rewards = [[graded(1.0), graded(0.0, 0.0)], [graded(1.0), graded(1.0)]]
    found = rollout_metrics(groups, rewards, [[1.0, -1.0], [0.0, 0.0]])
    assert found == pytest.approx(
        {
            "reward/error_fraction": 0.0,
            "reward/timeout_fraction": 0.0,
            "reward/mean": 0.75,
            "reward/std": 0.5,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/correct": 0.75,
            "reward/format": 0.75,
            "group/zero_signal_fraction": 0.5,
            "group/std_mean": math.sqrt(0.5) / 2,
            "group/mean_min": 0.5,
            "group/mean_max": 1.0,
            "group/solved_fraction": 0.5,
            "group/unsolved_fraction": 0.0,
            "advantage/mean": 0.0,
            "advantage/std": math.sqrt(2 / 3),
            "prompt/mean_tokens": 1.0,
            "completion/mean_tokens": 5.0,
            "completion/min_tokens": 2.0,
            "completion/max_tokens": 8.0,
            "completion/truncated_fraction": 0.25,
            "tokens/sampled": 20.0,
        }
    )
    assert unknown_keys(found) == []


@pytest.mark.proves("F29", "D23")
def test_a_spread_over_the_batch_is_no_signal_when_every_group_is_uniform() -> None:
    found = rollout_metrics([group(0, [1, 1]), group(1, [1, 1])], [[graded(0.0)] * 2, [graded(1.0)] * 2])
    assert (found["reward/min"], found["reward/max"]) == (0.0, 1.0)
    assert found["group/zero_signal_fraction"] == 1.0
    assert found["group/std_mean"] == 0.0


def test_a_completion_that_could_not_be_graded_is_counted_and_not_averaged() -> None:
    found = rollout_metrics([group(0, [1, 1, 1])], [[graded(1.0), graded(1.0), FAILED]])
    assert found["reward/mean"] == 1.0
    assert found["reward/error_fraction"] == found["reward/timeout_fraction"] == pytest.approx(1 / 3)
    assert found["group/solved_fraction"] == 1.0


def test_what_has_no_value_is_left_out() -> None:
    found = rollout_metrics([group(0, [1])], [[FAILED]])
    assert "reward/mean" not in found
    assert "reward/correct" not in found
    assert "group/std_mean" not in found
    assert found["group/zero_signal_fraction"] == 1.0
    assert rollout_metrics([], []) == {}


def test_equal_rewards_that_differ_by_rounding_carry_no_signal() -> None:
    found = rollout_metrics([group(0, [1, 1])], [[Reward(0.1 + 0.2), Reward(0.3)]])
    assert found["group/zero_signal_fraction"] == 1.0
    assert "group/solved_fraction" not in found


def test_rewards_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="do not match"):
        rollout_metrics([group(0, [1, 1])], [[graded(1.0)]])
    with pytest.raises(ValueError, match="do not match"):
        rollout_metrics([group(0, [1])], [[graded(1.0)]], [[0.0, 0.0]])


def test_parts_of_a_completion_that_could_not_be_graded_count_nowhere() -> None:
    failed = Reward(None, {"format": 1.0}, error="timeout")
    found = rollout_metrics([group(0, [1, 1, 1])], [[graded(1.0, 1.0), graded(0.0, 0.0), failed]])
    assert found["reward/format"] == 0.5
