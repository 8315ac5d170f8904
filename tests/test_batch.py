"""Do the rows of a batch stay the same whatever batch they are cut into?"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.core.batch import Batch, Rewards, Size, stack_rewards
from oncurve.core.loop import History, StepSchedule
from oncurve.core.records import Completion, Group, Prompt, Reward


def make_batch(prompt_lengths: list[int], completion_lengths: list[int], *, group_size: int = 2) -> Batch:
    """Rows whose tokens say where they come from: 100 * row + place, prompts negative."""
    rows, width = len(prompt_lengths), max(completion_lengths)
    prompts, completions = torch.tensor(prompt_lengths), torch.tensor(completion_lengths)
    row = torch.arange(rows)[:, None]
    prompt_ids = -(100 * row + torch.arange(max(prompt_lengths)))
    completion_ids = 100 * row + torch.arange(width)
    mask = torch.arange(width)[None, :] < completions[:, None]
    batch = Batch(
        prompt_ids=torch.where(torch.arange(max(prompt_lengths))[None, :] < prompts[:, None], prompt_ids, 0),
        prompt_lengths=prompts,
        completion_ids=torch.where(mask, completion_ids, 0),
        mask=mask,
        completion_lengths=completions,
        group_ids=torch.arange(rows) // group_size,
        advantages=torch.arange(rows).float(),
        sampler_logprobs=torch.where(mask, -completion_ids.float(), 0.0),
        size=Size(0, 0, 0),
        old_logprobs=torch.where(mask, -completion_ids.float() - 0.5, 0.0),
    )
    return Batch(**{f.name: getattr(batch, f.name) for f in fields(batch)} | {"size": batch.measure()})


def row_of(batch: Batch, place: int) -> tuple[object, ...]:
    """Everything that belongs to a row, without padding."""
    prompt, completion = int(batch.prompt_lengths[place]), int(batch.completion_lengths[place])
    assert batch.old_logprobs is not None
    return (
        batch.prompt_ids[place, :prompt].tolist(),
        batch.completion_ids[place, :completion].tolist(),
        batch.mask[place].sum().item(),
        batch.sampler_logprobs[place, :completion].tolist(),
        batch.old_logprobs[place, :completion].tolist(),
        batch.advantages[place].item(),
        batch.group_ids[place].item(),
    )


def test_the_size_counts_rows_trained_tokens_and_prompts() -> None:
    assert make_batch([3, 1, 2, 2], [2, 5, 1, 4]).size == Size(num_rows=4, num_tokens=12, num_prompts=2)


def test_selected_rows_keep_their_tokens_and_lose_padding() -> None:
    batch = make_batch([3, 1, 2, 2], [2, 5, 1, 4])
    part = batch.select(torch.tensor([3, 0]))
    assert part.prompt_ids.shape == (2, 3)
    assert part.completion_ids.shape == part.mask.shape == part.sampler_logprobs.shape == (2, 4)
    assert [row_of(part, 0), row_of(part, 1)] == [row_of(batch, 3), row_of(batch, 0)]
    assert part.size == batch.size


@pytest.mark.proves("F18")
def test_updates_are_consecutive_rows_with_denominators_of_their_own() -> None:
    batch = make_batch([3, 1, 2, 2], [2, 5, 1, 4])
    updates = list(batch.split(2))
    assert [update.size for update in updates] == [Size(2, 7, 1), Size(2, 5, 1)]
    assert [row_of(updates[1], 0), row_of(updates[1], 1)] == [row_of(batch, 2), row_of(batch, 3)]


@pytest.mark.parametrize("rows_per_update", [3, 5, 0, -1])
def test_updates_that_do_not_divide_the_rows_are_refused(rows_per_update: int) -> None:
    with pytest.raises(ValueError, match="do not divide into updates"):
        next(make_batch([1, 1, 1, 1], [1, 1, 1, 1]).split(rows_per_update))


lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(lengths=lengths, max_tokens=st.integers(1, 60))
def test_microbatches_hold_every_row_once_within_the_budget(lengths: list[tuple[int, int]], max_tokens: int) -> None:
    batch = make_batch([a for a, _ in lengths], [b for _, b in lengths])
    parts = list(batch.split_tokens(max_tokens))
    rows = [row_of(part, place) for part in parts for place in range(len(part))]
    assert sorted(rows, key=str) == sorted((row_of(batch, place) for place in range(len(batch))), key=str)
    for part in parts:
        padded = len(part) * int(part.row_lengths.max())
        assert padded <= max_tokens or len(part) == 1
        assert part.size == batch.size
        assert part.mask.shape[1] == int(part.completion_lengths.max())


def test_a_large_budget_keeps_all_rows_together() -> None:
    batch = make_batch([3, 1, 2, 2], [2, 5, 1, 4])
    assert [len(part) for part in batch.split_tokens(10_000)] == [4]


def test_moving_to_a_device_keeps_everything() -> None:
    batch = make_batch([3, 1], [2, 5])
    moved = batch.to("cpu")
    assert [row_of(moved, place) for place in range(2)] == [row_of(batch, place) for place in range(2)]
    assert moved.ref_logprobs is None
    assert moved.size == batch.size


def test_rewards_of_numbers_mark_what_was_not_graded() -> None:
    rewards = Rewards.of([[1.0, None], [0.0, 0.5]])
    assert rewards.graded.tolist() == [[True, False], [True, True]]
    assert rewards.values.tolist() == [[1.0, 0.0], [0.0, 0.5]]


@settings(max_examples=50, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), budget=st.integers(1, 90)
)
def test_rows_that_share_a_prompt_cost_their_own_tokens(groups: list[tuple[int, int]], budget: int) -> None:
    prompts = [prompt for prompt, _ in groups for _ in range(2)]
    completions = [1 + (longest + place) % 9 for _, longest in groups for place in range(2)]
    batch = make_batch(prompts, completions)
    parts = [part.tolist() for part in batch.plan_microbatches(budget, share_prompts=True)]
    assert [row for part in parts for row in part] == list(range(len(batch)))

    def cost(rows: list[int]) -> int:
        return sum(prompts[row] for row in {row // 2 * 2 for row in rows}) + sum(completions[row] for row in rows)

    for part, following in zip(parts, [*parts[1:], []], strict=True):
        assert cost(part) <= budget or len(part) == 1
        assert not following or cost([*part, following[0]]) > budget


def test_rows_without_an_advantage_can_be_left_out_and_still_count() -> None:
    batch = make_batch([3, 1, 2, 2], [2, 5, 1, 4])
    kept = batch.with_signal()  # the first row has advantage 0
    assert [row_of(kept, place) for place in range(3)] == [row_of(batch, place) for place in (1, 2, 3)]
    assert kept.size == batch.size
    nothing = kept.select(torch.tensor([], dtype=torch.long))
    assert list(nothing.split_tokens(100)) == list(nothing.split_tokens(100, share_prompts=True)) == []


@pytest.mark.parametrize(
    ("share_prompts", "budget", "rows"),
    [
        (False, 10, [[0, 1], [2], [3]]), (False, 9, [[0], [1], [2], [3]]), (False, 18, [[0, 1, 2], [3]]),
        (False, 20, [[0, 1, 2], [3]]), (False, 28, [[0, 1, 2, 3]]), (False, 27, [[0, 1, 2], [3]]),
        (True, 8, [[0, 1], [2], [3]]), (True, 7, [[0], [1], [2], [3]]), (True, 19, [[0, 1, 2, 3]]),
        (True, 18, [[0, 1, 2], [3]]), (True, 14, [[0, 1, 2], [3]]), (True, 13, [[0, 1], [2, 3]]),
    ],
)  # fmt: skip
def test_a_microbatch_is_full_at_its_budget(share_prompts: bool, budget: int, rows: list[list[int]]) -> None:
    batch = make_batch([2, 2, 2, 2], [3, 3, 4, 5])
    cut = [part.tolist() for part in batch.plan_microbatches(budget, share_prompts=share_prompts)]
    assert cut == rows


def test_rewards_are_in_float64_only_where_float32_would_blur_their_differences() -> None:
    def types(*values: float | None) -> torch.dtype:
        graded = [Reward(value) if value is not None else Reward(None, error="timeout") for value in values]
        made = tuple(
            Completion((1,), (5,), "a", (-0.5,), "length" if index else "stop", 0, index)
            for index in range(len(values))
        )
        found = stack_rewards([Group(Prompt("q", (1,), 0), made)], [graded])
        assert found.graded.tolist() == [[value is not None for value in values]]
        assert found.values.tolist() == [pytest.approx([value or 0.0 for value in values])]
        assert (found.num_tokens.sum().item(), found.is_truncated.sum().item()) == (len(values), len(values) - 1)
        return found.values.dtype

    assert types(0.1, 0.7) == types(100_000.01, 100_000.01) == types(0.3, None) == torch.float32
    assert types(100_000.01, 100_000.02) == types(100_000.01, None, 100_000.02) == torch.float64
    assert types(0.1, 0.1 + 1e-5) == torch.float64
    assert types(1.0, 1.0 + 2.0**-20) == torch.float32, "both are exact"


def test_a_schedule_makes_its_updates_in_each_pass_and_seeds_each_step() -> None:
    schedule = StepSchedule(
        total_steps=5, completions_per_step=4, completions_per_update=2, passes_per_step=3, seed=7, steps_done=3
    )
    assert schedule.updates_per_step == 6
    batch = make_batch([1, 1, 1, 1], [2, 5, 1, 4])
    assert [update.advantages.tolist() for update in schedule.updates(batch)] == [[0.0, 1.0], [2.0, 3.0]] * 3
    schedule.seed_step(4)
    assert torch.initial_seed() == 7 * 1_000_003 + 4
    steps = History(schedule)
    assert [(step, schedule.steps_done) for step in steps.steps()] == [(3, 3), (4, 4)]
    assert schedule.steps_done == 5
