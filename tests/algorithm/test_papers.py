"""Every row of the table on one example that fits on paper. The comments are the computation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy import make_batch, rewards_of

from oncurve.algorithm.presets import PRESETS, build

# Two completions of one prompt: one token with ratio 1.5 and advantage 1; three tokens with ratios 0.5, 1, 2 and
# advantage -1. log p = -1 for every token, and the reference finds every token twice as probable.
RATIOS = [[1.5, 1.0, 1.0], [0.5, 1.0, 2.0]]
K3 = 2 - math.log(2) - 1

# grpo: -min(1.5, 1.2) = -1.2; max(0.5, 0.8) = 0.8, 1, max(2, 1.2) = 2
LOSSES: dict[str, tuple[dict[str, Any], float]] = {
    "grpo": ({}, (-1.2 + 3.8 / 3) / 2),
    "dr_grpo": ({}, (-1.2 + 3.8) / (2 * 10)),
    "dapo": ({}, (-1.28 + 3.8) / 4),
    "rloo": ({}, (1 - 3) / 2),  # -A log p = 1; -1, -1, -1
    "reinforce_pp": ({}, (-1.2 + 3.8) / 4),
    "reinforce_pp_baseline": ({}, (-1.2 + 3.8) / 4),
    "gspo": ({}, (-1.0004 + 1) / 2),  # s = 1.5 and (0.5 * 1 * 2)^(1/3) = 1
    "gspo_token": ({}, (-1.0004 + 1) / 2),
    "luspo": ({}, (-1.0004 * 1 + 1 * 3) / 2),
    "cispo": ({"ratio_max": 1.75}, (1.5 - 0.5 - 1 - 1.75) / 4),  # -w A log p, w at most 1.75
    "scale_rl": ({}, (1.5 - 3.5) / 4),
    "sapo": ({}, (-2.489837 + 2.047567) / 2),  # 4 s(0.5) = 2.4898; 4 / 1.05 (s(-0.525) + s(0) + s(1.05)) / 3 = 2.0476
    "vespo": ({}, (0.502043 - 3) / 4),  # W = 1.5: 1.5^2 e^-1.5 = 0.502043; W = 0.5 * 1 * 2 = 1: phi = 1
    "lite_ppo": ({}, (-1.2 + 3.8) / 4),
    "maxrl": ({}, (-1.2 + 3.8) / 4),
    "opo": ({}, (1 - 3) / 4),
    "gdpo": ({}, (-1.2 + 3.8 / 3) / 2),
    "rft": ({}, (1 - 3) / 4),
    # A_t = A - (log p_old - log p_ref) = A + log(2 w): 1 + log 3; -1, -1 + log 2, -1 + log 4
    "distil": ({}, -(1.5 * (1 + math.log(3)) - 0.5 - 1 + math.log(2) + 2 * (math.log(4) - 1)) / 4),
    "high_entropy": ({"high_entropy_share": 0.5}, (-1.28 + 2) / 4),  # the first and the last token are the least sure
    "cs336": ({}, (1 - 1) / 2),
    "sequence_reinforce": ({}, (1 - 3) / 2),
    "trl_0_14": ({}, (-1.2 + 3.8 / 3) / 2 + 0.04 * K3),
    "iterative_grpo": ({}, (-1.1 + (0.9 + 1 + 2) / 3) / 2 + 0.04 * K3),  # bounds 0.9 and 1.1
}


def test_every_row_has_an_example():
    assert LOSSES.keys() == PRESETS.keys()


@pytest.mark.proves("F7", "F9", "F11", "F23")
@pytest.mark.parametrize("name", PRESETS)
def test_the_loss_by_hand(name: str):
    choices, expected = LOSSES[name]
    algorithm = build(name, group_size=2, max_completion_tokens=10, **choices)
    batch = make_batch([1, 1], [[1], [1, 2, 3]], [0, 0])
    logprobs = torch.where(batch.mask, -1.0, 0.0).double()
    batch = replace(
        batch,
        advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
        old_logprobs=logprobs - torch.tensor(RATIOS, dtype=torch.float64).log(),
        ref_logprobs=logprobs + math.log(2),
        old_entropy=torch.tensor([[2.0, 0, 0], [0.1, 0.2, 3.0]], dtype=torch.float64),
    )
    batch = replace(batch, policy_mask=batch.mask & (batch.old_entropy > 1))
    loss, _ = algorithm.loss(logprobs, torch.zeros_like(logprobs), batch)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_std", [[0.8660254] * 2 + [-0.8660254] * 2, [1.5, -0.5, -0.5, -0.5]]),  # deviations sqrt(1/3) and 1/2
        ("group_mean", [[0.5, 0.5, -0.5, -0.5], [0.75, -0.25, -0.25, -0.25]]),
        # three ones among eight: variance (3 (5/8)^2 + 5 (3/8)^2) / 7 = 1.875 / 7, deviation 0.5175492
        ("batch_std", [[0.9660918] * 2 + [-0.9660918] * 2, [1.4491377, -0.4830459, -0.4830459, -0.4830459]]),
        # squares of what is centered: 4/4 + 9/16 + 3/16 = 1.75; divided by 7: deviation 1/2
        ("batch_centered_std", [[1, 1, -1, -1], [1.5, -0.5, -0.5, -0.5]]),
        ("whitened", [[1.2076147] * 2 + [-0.7245688] * 2, [1.2076147] + [-0.7245688] * 3]),  # (1 - 3/8) / 0.5175492
        ("leave_one_out", [[2 / 3, 2 / 3, -2 / 3, -2 / 3], [1, -1 / 3, -1 / 3, -1 / 3]]),
        ("mean_normalized", [[1, 1, -1, -1], [3, -1, -1, -1]]),
        # lengths 1, 1, 1, 5 and 4, 1, 1, 2: baselines 2/8 and 4/8
        ("length_weighted", [[0.75, 0.75, -0.25, -0.25], [0.5, -0.5, -0.5, -0.5]]),
        ("raw", [[1, 1, 0, 0], [1, 0, 0, 0]]),
    ],
)
def test_advantages_by_hand(name: str, expected: list[list[float]]):
    lengths = torch.tensor([[1, 1, 1, 5], [4, 1, 1, 2]])
    rewards = rewards_of([[1, 1, 0, 0], [1, 0, 0, 0]], lengths)
    algorithm = build("grpo", group_size=4, max_completion_tokens=10, advantage=name, std_epsilon=1e-12)
    found = algorithm.advantages(rewards)
    assert found.tolist() == [pytest.approx(line, abs=1e-6) for line in expected]


def test_multi_objective_advantages_by_hand():
    """Parts 1, 0 and 0, 10 are both +-0.7071 in their group; weighed 2 and 1 they leave +-0.7071.

    Over two groups these have the deviation sqrt(4 * 0.5 / 3) = 0.8165.
    """
    rewards = rewards_of([[1, 0], [1, 0]])
    parts = {"a": torch.tensor([[1.0, 0], [1, 0]]).double(), "b": torch.tensor([[0.0, 10], [0, 10]]).double()}
    algorithm = build(
        "gdpo", group_size=2, max_completion_tokens=10, part_weights={"a": 2.0, "b": 1.0}, std_epsilon=1e-12
    )
    found = algorithm.advantages(replace(rewards, parts=parts))
    assert found[0].tolist() == pytest.approx([0.7071068 / 0.8164966, -0.7071068 / 0.8164966], abs=1e-6)


def test_parts_that_cancel_give_nothing():
    rewards = replace(rewards_of([[1, 0]]), parts={"a": torch.tensor([[1.0, 0]]), "b": torch.tensor([[0.0, 10]])})
    algorithm = build("gdpo", group_size=2, max_completion_tokens=10, std_epsilon=1e-12)
    assert algorithm.advantages(rewards).tolist() == [[0.0, 0.0]]


def test_the_kl_in_the_reward_by_hand():
    """r - 0.5 (log p - log p_ref): 1 - 0.5 * 1 * 0.2 and 0 - 0.5 * 3 * 0.2, leave one out 1.2."""
    algorithm = build("rloo", group_size=2, max_completion_tokens=10, kl_coef=0.5)
    batch = make_batch([1, 1], [[1], [1, 2, 3]], [0, 0])
    logprobs = torch.where(batch.mask, -1.0, 0.0).double()
    batch = replace(batch, sampler_logprobs=logprobs, ref_logprobs=logprobs - 0.2)
    prepared = algorithm.prepare(batch, rewards_of([[1.0, 0.0]]))
    assert prepared.advantages.tolist() == pytest.approx([(1 - 0.1) - (0 - 0.3), -1.2], abs=1e-12)
