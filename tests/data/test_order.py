"""Is the order of prompts a pure function of (seed, step), with every prompt once per epoch?"""

from __future__ import annotations

from itertools import chain

import pytest

from oncurve.core.errors import ConfigError, DataError
from oncurve.core.order import Order, Prompts
from oncurve.core.records import Prompt

SIZES = [(1, 1), (7, 7), (7, 3), (7, 5), (8, 4), (10, 8), (12, 9), (100, 32), (33, 32)]


@pytest.mark.proves("F33", "F35")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("num_prompts", "prompts_per_step"), SIZES)
def test_every_prompt_comes_once_per_epoch_and_once_per_step(
    num_prompts: int, prompts_per_step: int, shuffle: bool
) -> None:
    order = Order(num_prompts, prompts_per_step, shuffle=shuffle)
    steps = [order.at(step) for step in range(5 * num_prompts)]
    assert all(len(set(step)) == prompts_per_step for step in steps)
    indices = list(chain.from_iterable(steps))
    for start in range(0, len(indices), num_prompts):
        assert sorted(indices[start : start + num_prompts]) == list(range(num_prompts))


@pytest.mark.parametrize(("num_prompts", "prompts_per_step"), SIZES)
def test_a_step_is_the_same_whoever_asks_and_whenever(num_prompts: int, prompts_per_step: int) -> None:
    in_order = Order(num_prompts, prompts_per_step, seed=3)
    steps = [in_order.at(step) for step in range(60)]
    for step in (59, 0, 31, 58, 7):
        assert Order(num_prompts, prompts_per_step, seed=3).at(step) == steps[step]
        assert in_order.at(step) == steps[step]


@pytest.mark.proves("F33")
def test_seeds_and_epochs_give_different_orders() -> None:
    epochs = [Order(100, 50, seed=seed).at(2 * epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(epochs)) == 6


def test_the_order_is_pinned_so_that_a_resumed_run_finds_it_again() -> None:
    assert [Order(10, 4, seed=0).at(step) for step in (0, 2, 1000)] == [(8, 4, 0, 9), (3, 6, 7, 4), (6, 0, 3, 2)]


def test_without_shuffling_the_rows_come_as_they_stand() -> None:
    order = Order(5, 2, shuffle=False)
    assert [order.at(step) for step in range(5)] == [(0, 1), (2, 3), (4, 0), (1, 2), (3, 4)]


def test_asking_for_a_far_step_costs_no_history() -> None:
    order = Order(2_000, 64, seed=1)
    assert len(set(order.at(10**12))) == 64


@pytest.mark.proves("F92")
def test_shuffling_is_close_to_uniform() -> None:
    firsts = [Order(4, 4, seed=seed).at(0)[0] for seed in range(2_000)]
    assert all(firsts.count(index) == pytest.approx(500, abs=100) for index in range(4))


def test_a_step_larger_than_the_data_is_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"takes 8 different prompts.*only 5.*at most 5"):
        Order(5, 8)
    with pytest.raises(DataError):
        Prompts([], 1)


def test_a_step_without_prompts_or_before_the_first_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one prompt"):
        Order(5, 0)
    with pytest.raises(ValueError, match="counted from 0, got -1"):
        Order(5, 2).at(-1)


def test_prompts_are_handed_out_in_that_order() -> None:
    prompts = [Prompt(text=f"p{index}", prompt_ids=(index,), index=index) for index in range(6)]
    data = Prompts(prompts, 4, seed=2)
    assert len(data) == 6
    assert [prompt.index for prompt in data.at(7)] == list(Order(6, 4, seed=2).at(7))
