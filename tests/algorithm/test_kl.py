from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import slow
import torch
from torch import Tensor

from oncurve.algorithm.losses import absolute, k1, k1_reversed, k2
from oncurve.core.formulas import importance_corrected, k3, per_completion

ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "absolute": absolute, "k1_reversed": k1_reversed}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_agree_with_loops(name: str):
    draw = torch.Generator().manual_seed(0)
    logprobs, ref = (torch.randn(4, 6, generator=draw, dtype=torch.float64) for _ in range(2))
    found = ESTIMATORS[name](logprobs, ref)
    for row in range(4):
        expected = [slow.kl(name, a, b) for a, b in zip(logprobs[row].tolist(), ref[row].tolist(), strict=True)]
        assert found[row].tolist() == pytest.approx(expected, abs=1e-14)


@pytest.mark.proves("F13")
def test_k3_by_hand():
    difference = torch.tensor([[0.0, math.log(2), -math.log(2)]], dtype=torch.float64)
    expected = [0.0, 2 - math.log(2) - 1, 0.5 + math.log(2) - 1]
    assert k3(torch.zeros_like(difference), difference)[0].tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.proves("F13", "D6")
def test_k3_is_never_negative():
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(50, 20, generator=draw, dtype=torch.float64) for _ in range(2))
    assert (k3(a, b) >= 0).all()


def test_the_kl_of_a_completion_is_the_sum_over_its_tokens():
    kl = torch.tensor([[1.0, 2.0, 100.0], [100.0, 100.0, 100.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert per_completion(kl, mask).tolist() == [3.0, 0.0]


class Vocabulary:
    """A distribution over five tokens, so that a mean over samples is a sum over tokens, without noise."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.logits = torch.randn(5, generator=draw, dtype=torch.float64, requires_grad=True)
        self.reference = torch.log_softmax(torch.randn(5, generator=draw, dtype=torch.float64), dim=0)

    @property
    def logprobs(self) -> Tensor:
        return torch.log_softmax(self.logits, dim=0)

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits)[0]

    def of_loss(self, estimator: Callable[[Tensor, Tensor], Tensor], *, importance: bool) -> Tensor:
        """The mean gradient of an estimate in the loss: tokens are weighed by a constant probability."""
        sampled = self.logprobs.detach()
        kl = estimator(self.logprobs[None], self.reference[None])
        if importance:
            kl = importance_corrected(kl, (self.logprobs - sampled)[None])
        return self.gradient((sampled.exp() * kl[0]).sum())

    def of_reward(self, estimator: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The mean gradient of minus an estimate as the reward of REINFORCE."""
        sampled = self.logprobs.detach()
        reward = -estimator(sampled[None], self.reference[None])[0]
        return self.gradient((sampled.exp() * -reward * self.logprobs).sum())

    def forward_kl(self) -> Tensor:
        p = self.reference.exp()
        return self.gradient((p * (self.reference - self.logprobs)).sum())

    def reverse_kl(self) -> Tensor:
        return self.gradient((self.logprobs.exp() * (self.logprobs - self.reference)).sum())


def assert_equal(one: Tensor, other: Tensor) -> None:
    assert torch.allclose(one, other, atol=1e-14, rtol=0)


def test_the_mean_of_k1_and_k3_is_the_kl():
    v = Vocabulary()
    p = v.logprobs.detach().exp()
    expected = (p * (v.logprobs.detach() - v.reference)).sum().item()
    for estimator in (k1, k3):
        assert (p * estimator(v.logprobs[None], v.reference[None])[0]).sum().item() == pytest.approx(
            expected, abs=1e-14
        )


@pytest.mark.proves("F12", "D6")
def test_k1_in_the_loss_has_no_gradient():
    v = Vocabulary()
    assert_equal(v.of_loss(k1, importance=False), torch.zeros(5, dtype=torch.float64))
    assert_equal(v.of_loss(k1_reversed, importance=False), torch.zeros(5, dtype=torch.float64))


def test_k2_in_the_loss_has_the_gradient_of_the_reverse_kl():
    v = Vocabulary()
    assert_equal(v.of_loss(k2, importance=False), v.reverse_kl())


def test_k3_in_the_loss_has_the_gradient_of_the_forward_kl():
    v = Vocabulary()
    assert_equal(v.of_loss(k3, importance=False), v.forward_kl())


@pytest.mark.proves("F13", "D6")
@pytest.mark.parametrize("estimator", [k1, k3])
def test_importance_weights_give_k1_and_k3_the_gradient_of_the_reverse_kl(estimator):
    v = Vocabulary()
    assert_equal(v.of_loss(estimator, importance=True), v.reverse_kl())


@pytest.mark.parametrize("estimator", [k2, absolute])
def test_importance_weights_give_the_others_the_gradient_of_their_own_mean(estimator):
    v = Vocabulary()
    mean = (v.logprobs.exp() * estimator(v.logprobs[None], v.reference[None])[0]).sum()
    assert_equal(v.of_loss(estimator, importance=True), v.gradient(mean))
    assert not torch.allclose(v.of_loss(estimator, importance=True), v.reverse_kl(), atol=1e-3)


def test_absolute_in_the_loss_pulls_by_sign():
    v = Vocabulary()
    p, sign = v.logprobs.detach().exp(), (v.logprobs.detach() - v.reference).sign()
    assert_equal(v.of_loss(absolute, importance=False), v.gradient((p * sign * v.logprobs).sum()))


def test_only_k1_in_the_reward_has_the_gradient_of_the_reverse_kl():
    v = Vocabulary()
    assert_equal(v.of_reward(k1), v.reverse_kl())
    for estimator in (k2, k3, absolute, k1_reversed):
        assert not torch.allclose(v.of_reward(estimator), v.reverse_kl(), atol=1e-3)
