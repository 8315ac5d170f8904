from __future__ import annotations

import math

import pytest
import torch

from oncurve.algorithm.kl import k3


def test_k3_by_hand():
    difference = torch.tensor([[0.0, math.log(2), -math.log(2)]], dtype=torch.float64)
    expected = [0.0, 2 - math.log(2) - 1, 0.5 + math.log(2) - 1]
    assert k3(torch.zeros_like(difference), difference)[0].tolist() == pytest.approx(expected, abs=1e-15)


def test_k3_is_never_negative():
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(50, 20, generator=draw, dtype=torch.float64) for _ in range(2))
    assert (k3(a, b) >= 0).all()


def test_the_mean_of_k3_over_the_policy_is_the_kl():
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    estimate = (p * k3(p.log()[None], q.log()[None])[0]).sum()
    assert estimate.item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-15)
