from __future__ import annotations

from functools import partial

import pytest
import slow
import torch

from oncurve.algorithm.losses import constant, masked_mean, prompt_mean, sequence_sum
from oncurve.core.batch import Size
from oncurve.core.formulas import sequence_mean, token_mean

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 100.0, 100.0], [100.0, 100.0, 100.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
SIZE = Size(num_rows=3, num_tokens=4, num_prompts=1)


@pytest.mark.proves("F22")
def test_sequence_mean_by_hand():
    assert sequence_mean(LOSS, MASK, of=SIZE).item() == pytest.approx((2 + 4 + 0) / 3, abs=1e-15)


def test_token_mean_by_hand():
    assert token_mean(LOSS, MASK, of=SIZE).item() == pytest.approx((1 + 2 + 3 + 4) / 4, abs=1e-15)


@pytest.mark.proves("F5", "D2")
def test_constant_by_hand():
    assert constant(LOSS, MASK, of=SIZE, tokens_per_row=10).item() == pytest.approx(10 / 30, abs=1e-15)


@pytest.mark.proves("F22")
def test_sequence_mean_and_token_mean_agree_with_loops():
    draw = torch.Generator().manual_seed(0)
    loss = torch.randn(9, 12, generator=draw, dtype=torch.float64)
    mask = torch.arange(12)[None, :] < torch.randint(0, 13, (9,), generator=draw)[:, None]
    size = Size(num_rows=20, num_tokens=77, num_prompts=3)
    plain, kept = loss.tolist(), mask.tolist()
    assert sequence_mean(loss, mask, of=size).item() == pytest.approx(slow.sequence_mean(plain, kept, 20), abs=1e-13)
    assert token_mean(loss, mask, of=size).item() == pytest.approx(slow.token_sum(plain, kept) / 77, abs=1e-13)


@pytest.mark.proves("F21")
@pytest.mark.parametrize("normalize", [sequence_mean, token_mean])
def test_masked_tokens_never_reach_value_or_gradient(normalize):
    loss = torch.where(MASK, LOSS, torch.nan).requires_grad_()
    value = normalize(loss, MASK, of=SIZE)
    value.backward()
    assert value.item() == pytest.approx(normalize(LOSS, MASK, of=SIZE).item(), abs=0)
    assert loss.grad is not None
    assert (loss.grad[~MASK] == 0).all()


EVERY = [sequence_mean, token_mean, sequence_sum, partial(constant, tokens_per_row=1), prompt_mean]


@pytest.mark.proves("D11")
@pytest.mark.parametrize("normalize", EVERY)
def test_an_update_without_a_token_is_zero_and_not_nan(normalize):
    nothing, tokens = torch.zeros(2, 3, dtype=torch.bool), {"prompt_tokens": torch.zeros(2, dtype=torch.long)}
    for size in (Size(2, 0, 1), Size(0, 0, 0)):
        assert normalize(torch.ones(2, 3), nothing, of=size, **tokens).item() == 0.0


@pytest.mark.parametrize("normalize", EVERY)
def test_an_update_of_one_token_is_its_loss(normalize):
    mask, tokens = torch.tensor([[True, False]]), {"prompt_tokens": torch.tensor([1])}
    assert normalize(torch.tensor([[0.75, 9.0]]), mask, of=Size(1, 1, 1), **tokens).item() == 0.75


@pytest.mark.proves("F21")
def test_masked_mean_over_all_and_over_one_dimension():
    values, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([[1, 1, 0], [0, 1, 0]])
    assert masked_mean(values, mask).item() == pytest.approx((0 + 1 + 4) / 3)
    assert masked_mean(values, mask, dim=1).tolist() == pytest.approx([0.5, 4.0])
    assert masked_mean(values, mask, dim=0)[:2].tolist() == pytest.approx([0.0, 2.5])


@pytest.mark.proves("D11")
def test_masked_mean_of_nothing_is_nan():
    values, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([[1, 1, 0], [0, 1, 0]])
    assert masked_mean(values, mask, dim=0)[2].isnan()
    assert masked_mean(values, torch.zeros(2, 3)).isnan()


def test_masked_mean_does_not_let_a_nan_through_the_mask():
    values = torch.tensor([1.0, torch.nan, 3.0])
    assert masked_mean(values, torch.tensor([True, False, True])).item() == 2.0
