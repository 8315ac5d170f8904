from __future__ import annotations

import math
from functools import partial

import pytest
import slow
import torch
from torch import Tensor

from oncurve.algorithm.losses import policy_gradient, sequence_soft_gated, sequence_truncated_importance
from oncurve.core.formulas import EntropyBonus, clip_fractions, clipped, is_clipped


def batch(seed: int, rows: int = 5, width: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random log-probabilities, old ones near them, advantages of both signs, and a ragged mask, in float64."""
    draw = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, width, generator=draw, dtype=torch.float64) * 3
    old = logprobs + 0.4 * torch.randn(rows, width, generator=draw, dtype=torch.float64)
    advantages = torch.randn(rows, generator=draw, dtype=torch.float64)
    lengths = torch.randint(0, width + 1, (rows,), generator=draw)
    return logprobs, old, advantages, torch.arange(width)[None, :] < lengths[:, None]


@pytest.mark.proves("F8")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.1, 0.5)])
def test_clipped_agrees_with_a_loop(seed: int, low: float, high: float):
    logprobs, old, advantages, mask = batch(seed)
    fast, _ = clipped(logprobs, old, advantages, mask, clip_low=low, clip_high=high)
    for row in range(len(advantages)):
        for place in range(logprobs.shape[1]):
            a, b, weight = logprobs[row, place].item(), old[row, place].item(), advantages[row].item()
            assert fast[row, place].item() == pytest.approx(slow.clipped(a, b, weight, low, high), abs=1e-12)


@pytest.mark.proves("F8", "D27")
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (math.log(1.5), 1.0, -1.2),  # too far up with a good completion: cut
        (math.log(1.5), -1.0, 1.5),  # too far up with a bad one: the penalty stays whole
        (math.log(0.5), 1.0, -0.5),  # too far down with a good one: stays
        (math.log(0.5), -1.0, 0.8),  # too far down with a bad one: cut
        (math.log(1.1), 2.0, -2.2),
        (0.0, -3.0, 3.0),
    ],
)
def test_clipped_on_the_cases_of_the_paper(log_ratio: float, advantage: float, expected: float):
    zero = torch.zeros(1, 1, dtype=torch.float64)
    loss, _ = clipped(zero + log_ratio, zero, torch.tensor([advantage], dtype=torch.float64), zero == 0)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_ratio_one_gives_the_gradient_of_reinforce():
    logprobs, _, advantages, mask = batch(0)
    logprobs.requires_grad_()
    plain = torch.autograd.grad(policy_gradient(logprobs, logprobs, advantages, mask).sum(), logprobs)[0]
    surrogate = torch.autograd.grad(clipped(logprobs, logprobs.detach(), advantages, mask)[0].sum(), logprobs)[0]
    assert torch.allclose(surrogate, plain, atol=1e-14, rtol=0)
    assert torch.allclose(plain, -advantages[:, None].expand_as(plain), atol=0, rtol=0)


@pytest.mark.proves("F9")
def test_a_clipped_token_has_no_gradient_and_is_counted():
    logprobs, old, advantages, mask = batch(1)
    logprobs.requires_grad_()
    loss, statistics = clipped(logprobs, old, advantages, mask)
    gradient = torch.autograd.grad(loss.sum(), logprobs)[0]
    counted = statistics["policy/clip_fraction"]
    assert counted.any()
    assert torch.equal(gradient == 0, counted)


@pytest.mark.proves("F6")
def test_plain_policy_gradient_ignores_the_old_logprobs():
    logprobs, old, advantages, mask = batch(2)
    assert torch.equal(policy_gradient(logprobs, old, advantages, mask), -advantages[:, None] * logprobs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["sequence_truncated_importance", "sequence_soft_gated"])
def test_one_ratio_per_completion_has_the_value_and_the_gradient_of_the_plain_formula(seed: int, name: str):
    logprobs, old, advantages, mask = batch(seed)
    loss = {
        "sequence_truncated_importance": partial(sequence_truncated_importance, ratio_max=1.1),
        "sequence_soft_gated": sequence_soft_gated,
    }[name]
    logprobs.requires_grad_()
    result = loss(logprobs, old, advantages, mask)
    fast = result[0] if isinstance(result, tuple) else result
    gradient = torch.autograd.grad(torch.where(mask, fast, 0.0).sum(), logprobs)[0]
    for row, weight in enumerate(advantages.tolist()):
        now, before, kept = logprobs[row].tolist(), old[row].tolist(), mask[row].tolist()
        expected = slow.token_loss(name, now, before, weight, kept, ratio_max=1.1)
        slope = slow.sequence_slope(name, now, before, weight, kept, ratio_max=1.1)
        for place, is_kept in enumerate(kept):
            assert gradient[row, place].item() == pytest.approx(slope if is_kept else 0.0, abs=1e-12)
            assert not is_kept or fast[row, place].item() == pytest.approx(expected[place], abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_an_outer_bound_inside_the_clip_is_the_upper_bound_of_good_completions(seed: int):
    logprobs, old, advantages, mask = batch(seed)
    logprobs.requires_grad_()
    bounds = {"clip_low": 0.2, "clip_high": 0.4, "ratio_max": 1.1}
    fast, statistics = clipped(logprobs, old, advantages, mask, **bounds)
    gradient = torch.autograd.grad(fast.sum(), logprobs)[0]
    is_removed = statistics["policy/clip_fraction"]
    good, _ = clipped(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.1)
    assert torch.allclose(fast[advantages > 0], good[advantages > 0], atol=1e-12, rtol=0)
    for row, weight in enumerate(advantages.tolist()):
        now, before, kept = logprobs[row].tolist(), old[row].tolist(), mask[row].tolist()
        expected = slow.token_loss("clipped", now, before, weight, kept, **bounds)
        for place, value in enumerate(expected):
            ratio = slow.ratio(now[place], before[place])
            out = ratio > 1.1 if weight > 0 else ratio < 0.8 or ratio > 1.4
            assert fast[row, place].item() == pytest.approx(value, abs=1e-12)
            assert gradient[row, place].item() == pytest.approx(0.0 if out else -ratio * weight, abs=1e-12)
            assert is_removed[row, place].item() == out


@pytest.mark.parametrize(
    ("advantage", "ratio_max", "removed"),
    [
        (1.0, None, "0000111"), (-1.0, None, "1000000"), (0.0, None, "0000000"), (1.0, 1.5, "0000111"),
        (-1.0, 1.5, "1000001"), (1.0, 1.0, "0001111"), (-1.0, 1.0, "1000111"),
    ],
)  # fmt: skip
def test_a_token_on_a_bound_keeps_its_gradient(advantage: float, ratio_max: float | None, removed: str):
    ratio = torch.tensor([[0.74, 0.75, 1.0, 1.25, 1.26, 1.5, 1.51]], dtype=torch.float64)
    weight = torch.tensor([advantage], dtype=torch.float64)
    found = is_clipped(ratio, weight, 0.25, 0.25, ratio_max)
    assert "".join(str(int(token)) for token in found[0]) == removed
    fractions = clip_fractions(found, weight)
    assert fractions["policy/clip_fraction"].tolist() == found.tolist()
    assert fractions["policy/clip_high_fraction"].tolist() == (found & (advantage > 0)).tolist()


def test_a_bonus_follows_the_entropy_of_the_last_step_within_its_bounds():
    bonus = EntropyBonus(0.125, target=0.5, step=0.0625, highest=0.1875)
    assert bonus.applied == 0.0, "nothing is measured yet"
    seen = []
    for entropy in (0.5, 0.4, 0.6, math.nan, 0.7, 0.7, 0.7, 0.4):
        bonus.adapt(entropy)
        seen.append((bonus.coefficient, bonus.applied))
    assert seen == [
        (0.1875, 0.1875), (0.1875, 0.1875), (0.125, 0.0), (0.125, 0.0), (0.0625, 0.0), (0.0, 0.0), (0.0, 0.0),
        (0.0625, 0.0625),
    ]  # fmt: skip
    again = EntropyBonus(target=0.5)
    again.load_state_dict(bonus.state_dict())
    assert (again.coefficient, again.measured) == (0.0625, 0.4)
    plain = EntropyBonus(0.25)
    plain.adapt(9.0)
    assert (plain.coefficient, plain.applied) == (0.25, 0.25)
