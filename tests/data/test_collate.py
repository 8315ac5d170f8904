"""Do completions keep their prompts, rewards and lengths on the way into tensors?"""

from __future__ import annotations

import pytest
import torch

from oncurve.core.batch import Size, collate, stack_rewards
from oncurve.core.records import Completion, FinishReason, Group, Prompt, Reward


def group(prompt_ids: tuple[int, ...], *completions: tuple[int, ...], ends: str = "") -> Group:
    """A group whose completions hold these tokens; ``ends`` has a letter for each: s(top) or l(ength)."""
    reasons: dict[str, FinishReason] = {"s": "stop", "l": "length"}
    return Group(
        Prompt("p", prompt_ids, index=sum(prompt_ids)),
        tuple(
            Completion(prompt_ids, ids, "t", tuple(-0.1 * token for token in ids), reasons[end], 0, index)
            for index, (ids, end) in enumerate(zip(completions, ends or "s" * len(completions), strict=True))
        ),
    )


GROUPS = [group((1, 2, 3), (10, 11), (12,), ends="sl"), group((4,), (13, 14, 15), (16, 17), ends="ls")]
ADVANTAGES = torch.tensor([[1.0, -1.0], [0.5, -0.5]])


@pytest.mark.proves("F24", "F25", "D0")
def test_rows_are_right_padded_in_the_order_of_the_groups() -> None:
    batch = collate(GROUPS, ADVANTAGES)
    assert batch.prompt_ids.tolist() == [[1, 2, 3], [1, 2, 3], [4, 0, 0], [4, 0, 0]]
    assert batch.prompt_lengths.tolist() == [3, 3, 1, 1]
    assert batch.completion_ids.tolist() == [[10, 11, 0], [12, 0, 0], [13, 14, 15], [16, 17, 0]]
    assert batch.completion_lengths.tolist() == [2, 1, 3, 2]
    assert batch.mask.sum(dim=1).tolist() == [2, 1, 3, 2]
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.advantages.tolist() == [1.0, -1.0, 0.5, -0.5]
    assert batch.sampler_logprobs[2].tolist() == pytest.approx([-1.3, -1.4, -1.5])
    assert batch.sampler_logprobs[1, 1:].tolist() == [0.0, 0.0]
    assert batch.size == Size(num_rows=4, num_tokens=8, num_prompts=2)


@pytest.mark.proves("F42", "D37")
def test_masked_truncated_completions_stay_rows_without_trained_tokens() -> None:
    batch = collate(GROUPS, ADVANTAGES, mask_truncated=True)
    assert batch.mask.sum(dim=1).tolist() == [2, 0, 0, 2]
    assert batch.completion_lengths.tolist() == [2, 1, 3, 2]
    assert batch.size == Size(num_rows=4, num_tokens=4, num_prompts=2)


def test_the_same_prompt_twice_counts_as_two_groups() -> None:
    batch = collate([GROUPS[0], GROUPS[0]], ADVANTAGES)
    assert batch.size.num_prompts == 2


def test_an_empty_completion_is_a_row_without_tokens() -> None:
    batch = collate([group((1,), (), (5, 6))], torch.tensor([[0.0, 1.0]]))
    assert batch.mask.tolist() == [[False, False], [True, True]]
    only_empty = collate([group((1,), (), ())], torch.tensor([[0.0, 1.0]]))
    assert only_empty.mask.shape == (2, 1)
    assert only_empty.size.num_tokens == 0


def test_a_failed_grader_is_marked_and_not_a_zero() -> None:
    graded = [[Reward(1.0, parts={"correct": 1.0}), Reward(None, error="timeout")], [Reward(0.0), Reward(0.5)]]
    rewards = stack_rewards(GROUPS, graded)
    assert rewards.values.tolist() == [[1.0, 0.0], [0.0, 0.5]]
    assert rewards.graded.tolist() == [[True, False], [True, True]]
    assert rewards.num_tokens.tolist() == [[2, 1], [3, 2]]
    assert rewards.is_truncated.tolist() == [[False, True], [True, False]]
    assert rewards.parts["correct"].tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_whole_numbers_as_rewards_become_floats() -> None:
    rewards = stack_rewards(GROUPS[:1], [[Reward(1, parts={"n": 1}), Reward(2, parts={"n": 0})]])
    assert rewards.values.dtype == rewards.parts["n"].dtype == torch.float32
