from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.algorithm.advantages import (
    batch_centered_std,
    batch_std,
    leave_one_out,
    length_weighted,
    mean_normalized,
    multi_objective,
    raw,
    whitened,
)
from oncurve.core.batch import Rewards
from oncurve.core.formulas import group_relative, has_signal

GROUP = st.lists(st.one_of(st.none(), st.integers(-40, 40).map(lambda n: n / 8)), min_size=2, max_size=9)


def wide(table: list[list[float | None]]) -> Rewards:
    """Rewards in float64, so that the slow reference can be met to the last digits."""
    rewards = Rewards.of(table)
    return Rewards(rewards.values.double(), rewards.graded, rewards.num_tokens, rewards.is_truncated)


@pytest.mark.proves("F3", "D1")
def test_the_example_of_four_rewards_has_deviation_one_half_with_ddof_0():
    rewards = Rewards.of([[1.0, 1.0, 0.0, 0.0]])
    assert group_relative(rewards, ddof=0, epsilon=1e-6).tolist() == [pytest.approx([1, 1, -1, -1], abs=1e-5)]


@pytest.mark.proves("F3", "D1")
def test_ddof_1_is_smaller_by_the_root_of_three_quarters():
    rewards = wide([[1.0, 1.0, 0.0, 0.0]])
    zero, one = (group_relative(rewards, ddof=ddof, epsilon=1e-12) for ddof in (0, 1))
    assert torch.allclose(one / zero, torch.tensor(math.sqrt(3 / 4), dtype=torch.float64))


@pytest.mark.proves("F2")
def test_epsilon_is_added_to_the_deviation_and_not_to_the_variance():
    rewards = wide([[1.0, 0.0]])
    deviation = math.sqrt(0.5)
    assert group_relative(rewards, epsilon=0.5)[0, 0].item() == pytest.approx(0.5 / (deviation + 0.5), abs=1e-12)


def test_the_baseline_of_rloo_is_the_mean_of_the_others():
    assert leave_one_out(Rewards.of([[1.0, 0.0, 0.0, 2.0]])).tolist() == [pytest.approx([1 / 3, -1, -1, 5 / 3])]


@given(GROUP)
def test_leaving_one_out_is_the_slow_loop(group: list[float | None]):
    assert leave_one_out(wide([group])).tolist()[0] == pytest.approx(slow.leave_one_out([group])[0], abs=1e-9)


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1.1, -0.3, 1e4])
def test_equal_rewards_give_exactly_zero_for_every_group_size(value: float, scale_by_std: bool):
    for size in range(2, 65):
        advantages = group_relative(Rewards.of([[value] * size]), scale_by_std=scale_by_std)
        assert (advantages == 0).all(), size


@pytest.mark.proves("D1")
def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        group_relative(Rewards.of([[1.0]]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-8, 8), min_size=2, max_size=12), st.integers(-64, 64))
def test_a_constant_added_to_every_reward_changes_no_advantage(values: list[int], constant: int):
    rewards, moved = wide([[float(v) for v in values]]), wide([[float(v + constant) for v in values]])
    assert torch.allclose(group_relative(rewards), group_relative(moved), atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=60)
@given(st.lists(GROUP, min_size=1, max_size=1), st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_advantages(table: list[list[float | None]], random):
    order = list(range(len(table[0])))
    random.shuffle(order)
    advantages = group_relative(wide(table))
    permuted = group_relative(wide([[table[0][place] for place in order]]))
    assert torch.allclose(permuted[0], advantages[0, order], atol=1e-12, rtol=0)


@pytest.mark.proves("F2")
@settings(deadline=None, max_examples=100)
@given(GROUP, st.booleans(), st.sampled_from([0, 1]), st.sampled_from([1e-8, 1e-4]))
def test_group_relative_agrees_with_a_loop(row: list[float | None], scale: bool, ddof: int, epsilon: float):
    table = [row, row[::-1]]
    fast = group_relative(wide(table), scale_by_std=scale, ddof=ddof, epsilon=epsilon)
    expected = slow.group_relative(table, scale_by_std=scale, ddof=ddof, epsilon=epsilon)
    assert fast.tolist() == [pytest.approx(line, abs=1e-12) for line in expected]


def test_a_completion_whose_grader_failed_is_left_out_of_the_baseline_and_gets_zero():
    with_failures = group_relative(wide([[1.0, None, 0.0, None, 0.0]]))
    without = group_relative(wide([[1.0, 0.0, 0.0]]))
    assert with_failures[0, [0, 2, 4]].tolist() == pytest.approx(without[0].tolist(), abs=1e-12)
    assert with_failures[0, [1, 3]].tolist() == [0.0, 0.0]


def test_a_group_with_one_graded_completion_teaches_nothing():
    assert group_relative(Rewards.of([[1.0, None, None], [None, None, None]])).tolist() == [[0.0] * 3, [0.0] * 3]


def test_what_stands_in_place_of_a_missing_reward_is_never_read():
    rewards = Rewards.of([[1.0, 0.0, None]])
    poisoned = Rewards(
        torch.where(rewards.graded, rewards.values, torch.nan), rewards.graded, rewards.num_tokens, rewards.is_truncated
    )
    assert group_relative(poisoned).tolist() == group_relative(rewards).tolist()


def test_a_difference_of_a_millionth_is_signal_and_less_is_none():
    values = torch.tensor([[0.0, 2e-6], [0.0, 5e-7]])
    assert has_signal(values, torch.ones(2, 2, dtype=torch.bool)).tolist() == [True, False]


ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("advantage", "pair", "alone"),
    [
        (partial(group_relative, epsilon=0.0), ROOT, 0.0),
        (partial(group_relative, epsilon=0.0, ddof=0), 1.0, 0.0),
        (partial(group_relative, scale_by_std=False), 0.5, 0.0),
        (partial(batch_std, epsilon=0.0), ROOT, 0.0),
        (partial(batch_centered_std, epsilon=0.0), ROOT, 0.0),
        (partial(whitened, epsilon=0.0), ROOT, 0.0),
        (leave_one_out, 1.0, 0.0),
        (mean_normalized, 1.0, 0.0),
        (length_weighted, 0.5, 0.0),
        (raw, None, 1.0),
    ],
)
def test_the_smallest_group_is_two_graded_completions(
    advantage: Callable[[Rewards], torch.Tensor], pair: float | None, alone: float
):
    two = [1.0, 0.0] if pair is None else [pair, -pair]
    assert advantage(wide([[1.0, 0.0]])).tolist() == [pytest.approx(two, abs=1e-12)]
    assert advantage(wide([[1.0, None, 0.0]])).tolist() == [pytest.approx([two[0], 0.0, two[1]], abs=1e-12)]
    assert advantage(wide([[1.0, None]])).tolist() == [[alone, 0.0]]
    assert advantage(wide([[None, None]])).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "advantage",
    [
        group_relative, batch_std, batch_centered_std, leave_one_out, mean_normalized, length_weighted, multi_objective,
    ],
)  # fmt: skip
def test_a_group_of_one_has_no_baseline(advantage: Callable[[Rewards], torch.Tensor]):
    with pytest.raises(ValueError, match="a group of one has no baseline"):
        advantage(replace(wide([[1.0]]), parts={"a": torch.ones(1, 1, dtype=torch.float64)}))


def test_a_baseline_by_length_is_that_of_the_tokens_that_there_are():
    two = wide([[1.0, 0.0]])
    for tokens, expected in (([1, 0], [0.0, -1.0]), ([0, 0], [0.5, -0.5]), ([3, 1], [0.25, -0.75])):
        rewards = Rewards(two.values, two.graded, torch.tensor([tokens]), two.is_truncated)
        assert length_weighted(rewards).tolist() == [expected]
