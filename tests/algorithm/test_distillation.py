"""Is the negative reverse KL to the teacher the advantage of each token, with and without a reward beside it?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_every_row import gradient, make, update
from torch import Tensor

from oncurve.core.batch import Batch


def plain_loop(logprobs: Tensor, batch: Batch, beta: float, *, sampled: Tensor) -> Tensor:
    """-sum_t A_t p(t) / p_sampled(t) over the number of tokens, one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        for t in range(batch.mask.shape[1]):
            if batch.mask[row, t]:
                advantage = batch.advantages[row] - beta * (sampled[row, t] - batch.ref_logprobs[row, t])
                total = total - advantage * torch.exp(logprobs[row, t] - sampled[row, t])
    return total / batch.size.num_tokens


@pytest.mark.parametrize("advantage", ["none", "group_mean"])
@pytest.mark.parametrize("is_on_policy", [True, False])
def test_loss_and_gradient_are_those_of_a_plain_loop(advantage: str, is_on_policy: bool) -> None:
    algorithm = make("distil", advantage=advantage, kl_coef=0.7)
    policy, batch, _ = update(algorithm)
    batch = replace(batch, old_logprobs=None) if is_on_policy else batch
    value, found = gradient(algorithm, policy, [batch])
    for weight in policy.weights:
        weight.grad = None
    logprobs, _ = policy.logprobs(batch)
    sampled = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    loss = plain_loop(logprobs, batch, 0.7, sampled=sampled)
    loss.backward()
    expected = torch.cat([weight.grad.flatten() for weight in policy.weights if weight.grad is not None])
    assert value == pytest.approx(loss.item(), abs=1e-12)
    assert expected.abs().max() > 1e-3
    assert (found - expected).abs().max() < 1e-12


def test_the_reverse_kl_is_measured_over_the_tokens_that_are_trained() -> None:
    algorithm = make("distil")
    policy, batch, _ = update(algorithm)
    _, statistics = algorithm.loss(*policy.logprobs(batch), batch)
    gaps = (batch.old_logprobs - batch.ref_logprobs)[batch.mask]
    assert statistics["distillation/reverse_kl"].value == pytest.approx(gaps.mean().item(), abs=1e-12)
    assert "policy/kl" not in statistics
