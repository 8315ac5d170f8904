from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import slow
import torch
from torch import Tensor
from toy import Toy, annotate, make_batch

from oncurve.algorithm.correction import mask_out, truncate, without_off_policy
from oncurve.algorithm.presets import build

FUNCTIONS = {"truncate": truncate, "mask": mask_out}


def pair(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    trainer = -torch.rand(6, 9, generator=draw, dtype=torch.float64)
    sampler = trainer + 0.5 * torch.randn(6, 9, generator=draw, dtype=torch.float64)
    return trainer, sampler, torch.arange(9)[None, :] < torch.tensor([0, 1, 3, 5, 8, 9])[:, None]


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_agree_with_loops(kind: str, level: str):
    trainer, sampler, mask = pair()
    found = FUNCTIONS[kind](trainer, sampler, mask, level=level, low=0.5, high=1.6)
    for row in range(6):
        expected = slow.correction(
            kind, level, trainer[row].tolist(), sampler[row].tolist(), mask[row].tolist(), 0.5, 1.6
        )
        assert found[row][mask[row]].tolist() == pytest.approx(
            [value for value, keep in zip(expected, mask[row].tolist(), strict=True) if keep], abs=1e-13
        )


def test_icepop_by_hand():
    """Ratios 0.4, 0.5, 1, 5, 6 with the band 0.5 to 5: the outer two are dropped, the others keep their ratio."""
    ratios = torch.tensor([[0.4, 0.5, 1.0, 5.0, 6.0]], dtype=torch.float64)
    found = mask_out(ratios.log(), torch.zeros_like(ratios), ratios > 0, low=0.5 - 1e-9, high=5 + 1e-9)
    assert found[0].tolist() == pytest.approx([0, 0.5, 1, 5, 0], abs=1e-12)


def test_the_bounds_belong_to_what_is_trained_on():
    ratios = torch.tensor([[0.5, 1.0, 2.0]], dtype=torch.float64)
    zeros, mask = torch.zeros_like(ratios), ratios > 0
    for low, high, kept in ((0.5, 2.0, [0.5, 1.0, 2.0]), (0.51, 2.0, [0.0, 1.0, 2.0]), (0.5, 1.99, [0.5, 1.0, 0.0])):
        assert mask_out(ratios.log(), zeros, mask, low=low, high=high).tolist() == [kept]
    advantages = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    far = torch.full((3, 4), -0.5, dtype=torch.float64)
    tokens = torch.tensor([[True, True, False, False]] * 3)
    for threshold, weights in ((0.5, [1.0, 1.0, 1.0]), (0.49, [0.0, 1.0, 1.0])):
        found = without_off_policy(far, torch.zeros_like(far), advantages, tokens, threshold=threshold)
        assert found.tolist() == [[weight] * 4 for weight in weights]
    nothing = without_off_policy(far, torch.zeros_like(far), advantages, tokens & False, threshold=0.0)
    assert nothing.tolist() == [[1.0] * 4] * 3


@pytest.mark.proves("D53")
def test_truncation_by_hand():
    ratios = torch.tensor([[0.4, 1.0, 3.0]], dtype=torch.float64)
    assert truncate(ratios.log(), torch.zeros_like(ratios), ratios > 0)[0].tolist() == pytest.approx([0.4, 1, 2])


def test_where_sampler_and_trainer_agree_every_weight_is_exactly_one():
    trainer, _, mask = pair()
    for function in FUNCTIONS.values():
        for level in ("token", "sequence", "geometric"):
            assert (function(trainer, trainer, mask, level=level) == 1).all()


def test_the_geometric_level_does_not_depend_on_length_and_the_sequence_level_does():
    gap = torch.full((1, 2000), 0.01, dtype=torch.float64)
    mask = gap > 0
    zero = torch.zeros_like(gap)
    assert mask_out(gap, zero, mask, level="geometric", high=3.0)[0, 0].item() == pytest.approx(1.01005, abs=1e-5)
    assert mask_out(gap, zero, mask, level="sequence", high=3.0)[0, 0].item() == 0.0


def test_weights_are_constants():
    trainer, sampler, mask = pair()
    trainer.requires_grad_()
    assert not truncate(trainer, sampler, mask).requires_grad


def test_the_kl_term_is_not_corrected():
    """A correction weighs the policy loss alone: with advantages of zero it changes nothing."""
    from toy import Toy, annotate, make_batch

    policy = Toy(0)
    batch = make_batch([1, 1], [[1, 2, 0], [3, 0]], [0, 0])
    batch = annotate(batch, old=policy.near(1, distance=0.1), sampler=policy.near(2, distance=0.5), reference=Toy(3))
    losses = [
        build("grpo", group_size=2, max_completion_tokens=4, kl_coef=0.1, correction=kind).loss(
            *policy.logprobs(batch), batch
        )[0]
        for kind in ("none", "truncate", "mask")
    ]
    assert losses[0].item() == losses[1].item() == losses[2].item()


def test_the_off_policy_mask_takes_the_gradient_of_bad_distant_completions_and_of_no_other():
    policy = Toy(0)
    batch = make_batch([1, 1, 2, 2], [[1, 2, 0], [3, 0], [5], [2, 2, 2, 0]], [0, 0, 1, 1])
    batch = annotate(batch, old=policy.near(1, distance=0.3), sampler=policy.near(2, distance=0.3), reference=policy)
    advantages = torch.tensor([-1.0, 1.0, -0.5, -0.5], dtype=torch.float64)
    batch = replace(batch, advantages=advantages)
    now, _ = policy.logprobs(batch)
    rows = [one.tolist() for one in (now, batch.sampler_logprobs, batch.mask)]
    distances = [
        slow.mean([b - a for a, b, keep in zip(*line, strict=True) if keep]) for line in zip(*rows, strict=True)
    ]
    threshold = sorted(distances[place] for place in (0, 2, 3))[1]  # one of the three bad ones is further away
    left_out = [d > threshold and a < 0 for d, a in zip(distances, advantages.tolist(), strict=True)]
    assert sum(left_out) == 1

    def slopes(**choices: Any) -> tuple[Tensor, Any]:
        logprobs = now.detach().clone().requires_grad_()
        algorithm = build("grpo", group_size=2, max_completion_tokens=6, **choices)
        loss, statistics = algorithm.loss(logprobs, torch.zeros_like(logprobs), batch)
        return torch.autograd.grad(loss, logprobs)[0], statistics

    plain, _ = slopes()
    masked, statistics = slopes(off_policy_threshold=threshold)
    for row, is_left_out in enumerate(left_out):
        assert torch.equal(masked[row], torch.zeros_like(masked[row]) if is_left_out else plain[row])
    tokens = batch.mask.sum(dim=1)
    expected = tokens[torch.tensor(left_out)].sum() / tokens.sum()
    assert statistics["mismatch/dropped_fraction"].value == pytest.approx(expected.item())
