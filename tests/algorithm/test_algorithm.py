from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Toy, annotate, make_batch, rewards_of

from oncurve.algorithm.losses import high_entropy
from oncurve.algorithm.presets import build
from oncurve.core.algorithm import Algorithm, EffectiveFraction, Largest
from oncurve.core.batch import Batch, Rewards
from oncurve.core.formulas import EntropyBonus
from oncurve.core.policy import move_reference


def make(name: str = "grpo", **choices: Any) -> Algorithm:
    return build(name, group_size=2, max_completion_tokens=6, **choices)


def rows(*, distance: float = 0.2) -> tuple[Toy, Batch]:
    policy = Toy(0)
    batch = make_batch([1, 1, 2, 2], [[1, 2, 0], [3, 0], [5], [2, 2, 2, 0]], [0, 0, 1, 1])
    old = policy.near(1, distance=distance)
    batch = annotate(batch, old=old, sampler=old.near(2, distance=distance), reference=Toy(5))
    return policy, replace(batch, advantages=torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64))


def statistics(algorithm: Algorithm, policy: Toy, parts: list[Batch]) -> dict[str, float]:
    """Statistics of an update that is computed in parts, added up as a run adds them."""
    sums: dict[str, Any] = {}
    for part in parts:
        _, found = algorithm.loss(*policy.logprobs(part), part)
        for key, mean in found.items():
            sums[key] = sums[key] + mean if key in sums else mean
    return {key: mean.value for key, mean in sums.items() if key != "policy/loss"}


@pytest.mark.parametrize("choices", [{}, {"kl_coef": 0.1}, {"correction": "truncate"}, {"entropy_coef": 0.1}])
def test_statistics_do_not_depend_on_how_an_update_is_cut(choices: dict[str, Any]):
    policy, batch = rows()
    algorithm = make(**choices)
    whole = statistics(algorithm, policy, [batch])
    cut = statistics(algorithm, policy, [batch.select(torch.tensor([place])) for place in range(4)])
    assert cut == {key: pytest.approx(value, abs=1e-12) for key, value in whole.items()}


@pytest.mark.proves("D53")
def test_the_gap_to_the_sampler_is_measured_without_a_correction():
    policy, batch = rows()
    found = statistics(make(), policy, [batch])
    assert batch.old_logprobs is not None
    gap = (batch.old_logprobs - batch.sampler_logprobs)[batch.mask]
    weights = gap.exp()
    assert found["mismatch/kl"] == pytest.approx((weights - 1 - gap).mean().item(), abs=1e-12)
    assert found["mismatch/max_ratio"] == pytest.approx(weights.max().item(), abs=1e-12)
    effective = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert found["mismatch/effective_sample_fraction"] == pytest.approx(effective.item(), abs=1e-12)
    assert "mismatch/dropped_fraction" not in found


def test_what_a_correction_does_is_counted():
    policy, batch = rows(distance=1.0)
    assert batch.old_logprobs is not None
    ratio = (batch.old_logprobs - batch.sampler_logprobs)[batch.mask].exp()
    outside = (ratio < 0.9) | (ratio > 1.1)
    found = statistics(make(correction="mask", correction_low=0.9, correction_high=1.1), policy, [batch])
    assert found["mismatch/dropped_fraction"] == pytest.approx(outside.double().mean().item())
    assert found["mismatch/weight_mean"] == pytest.approx(torch.where(outside, 0.0, ratio).mean().item())
    found = statistics(make(correction="truncate", correction_high=1.1), policy, [batch])
    assert found["mismatch/dropped_fraction"] == 0
    assert found["mismatch/weight_mean"] == pytest.approx(ratio.clamp(max=1.1).mean().item())


@pytest.mark.proves("F10")
def test_clipped_and_capped_tokens_are_counted_one_by_one_and_losses_without_limit_say_nothing():
    policy, batch = rows(distance=0.5)
    batch = replace(batch, advantages=-batch.advantages)
    assert batch.old_logprobs is not None
    logprobs, _ = policy.logprobs(batch)
    high, low, capped, tokens = 0, 0, 0, 0
    for row, advantage in enumerate(batch.advantages.tolist()):
        for column in batch.mask[row].nonzero().flatten().tolist():
            ratio = math.exp(logprobs[row, column].item() - batch.old_logprobs[row, column].item())
            tokens += 1
            high += advantage > 0 and ratio > 1.2
            low += advantage < 0 and ratio < 0.9
            capped += ratio > 1.1
    found = statistics(make(clip_low=0.1, clip_high=0.2), policy, [batch])
    assert min(high, low, capped) >= 1, "each side is seen"
    assert max(high + low, capped) < tokens
    assert found["policy/clip_fraction"] == pytest.approx((high + low) / tokens)
    assert found["policy/clip_high_fraction"] == pytest.approx(high / tokens)
    found = statistics(make("cispo", ratio_max=1.1), policy, [batch])
    assert found["policy/clip_fraction"] == pytest.approx(capped / tokens)
    assert "policy/clip_fraction" not in statistics(make("rloo"), policy, [batch])


@pytest.mark.proves("F20")
def test_with_one_update_per_step_no_old_logprobs_are_asked_for():
    for name in ("grpo", "gspo", "cispo", "rloo"):
        assert not make(name).needs_old(1)
    assert make("grpo").needs_old(2)
    assert not make("rloo").needs_old(2)
    assert make("rloo", kl_coef=0.1, kl_in="loss").needs_old(2)
    assert not make("grpo", old_logprobs="sampler").needs_old(2)


@pytest.mark.proves("F19")
def test_the_sampler_can_stand_for_the_old_policy():
    policy, batch = rows()
    by_sampler = make(old_logprobs="sampler").loss(*policy.logprobs(batch), replace(batch, old_logprobs=None))[0]
    by_trainer = make().loss(*policy.logprobs(batch), replace(batch, old_logprobs=batch.sampler_logprobs))[0]
    assert by_sampler.item() == by_trainer.item()


def test_only_what_reaches_rows_without_advantage_needs_every_row():
    assert not make("dapo").needs_every_row
    assert not make("rloo", kl_coef=0.1).needs_every_row  # in the reward
    assert make("dapo", kl_coef=0.1).needs_every_row
    assert make("dapo", entropy_coef=0.1).needs_every_row
    assert make("dapo", entropy_target=0.5).needs_every_row
    assert make("dapo", loss=lambda logprobs, old_logprobs, advantages, mask: logprobs).needs_every_row


@pytest.mark.proves("F12")
def test_the_policy_that_sampled_is_a_reference_that_needs_no_model():
    algorithm = make("sequence_reinforce", kl_coef=0.01)
    assert not algorithm.needs_reference
    policy, batch = rows()
    batch = replace(batch, old_logprobs=None, ref_logprobs=None)
    logprobs, entropy = policy.logprobs(batch)
    with_kl = torch.autograd.grad(algorithm.loss(logprobs, entropy, batch)[0], logprobs, retain_graph=True)[0]
    without = torch.autograd.grad(make("sequence_reinforce").loss(logprobs, entropy, batch)[0], logprobs)[0]
    assert torch.allclose(with_kl - without, -0.01 * batch.mask.double() / 4, atol=1e-14, rtol=0)


def test_a_kl_without_reference_logprobs_is_refused():
    policy, batch = rows()
    with pytest.raises(ValueError, match="reference"):
        make(kl_coef=0.1).loss(*policy.logprobs(batch), replace(batch, ref_logprobs=None))


@pytest.mark.proves("F15")
def test_a_refreshed_reference_follows_every_so_many_steps():
    algorithm = make("iterative_grpo", reference_every_steps=3)
    assert [algorithm.reference_share(step) for step in range(6)] == [0, 0, 1, 0, 0, 1]
    average = make(kl_coef=0.1, reference="average", reference_share=0.2)
    assert [average.reference_share(step) for step in range(2)] == [0.2, 0.2]
    assert make(kl_coef=0.1).reference_share(0) == 0
    assert make("iterative_grpo", kl_coef=0.0).reference_share(499) == 0


@pytest.mark.proves("F15")
def test_moving_the_reference_by_hand():
    reference, policy = nn.Linear(2, 1), nn.Linear(2, 1)
    nn.init.constant_(reference.weight, 1.0)
    nn.init.constant_(policy.weight, 3.0)
    move_reference(reference, policy, share=0.25)
    assert reference.weight.tolist() == [[1.5, 1.5]]
    move_reference(reference, policy, share=1.0)
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), policy.parameters(), strict=True))
    with pytest.raises(ValueError, match="bias"):
        move_reference(nn.Linear(2, 1, bias=False), policy, share=1.0)


def test_an_average_reference_is_the_exponential_mean_of_the_policies():
    reference, policy = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(reference.weight, 0.0)
    expected = 0.0
    for step in range(5):
        nn.init.constant_(policy.weight, float(step))
        move_reference(reference, policy, share=0.3)
        expected = 0.7 * expected + 0.3 * step
    assert reference.weight.item() == pytest.approx(expected, abs=1e-14)


def test_the_rows_of_prepare_must_be_those_of_the_rewards():
    _, batch = rows()
    with pytest.raises(ValueError, match="4 rows cannot be matched with 2 rewards"):
        make().prepare(batch, rewards_of([[1.0, 0.0]]))


def test_most_algorithms_get_the_batch_back_as_it_is():
    _, batch = rows()
    assert make("dapo", kl_coef=0.1).prepare(batch, rewards_of([[1.0, 0.0], [1.0, 0.0]])) is batch
    assert make("rloo", kl_coef=0.0).prepare(batch, rewards_of([[1.0, 0.0], [1.0, 0.0]])) is batch


def test_high_entropy_takes_the_share_that_is_asked_for():
    entropy = torch.arange(100.0).reshape(10, 10)
    everything = torch.ones(10, 10, dtype=torch.bool)
    assert high_entropy(entropy, everything, share=0.2).sum() == 20
    assert torch.equal(high_entropy(entropy, everything, share=0.2), entropy >= 80)
    assert torch.equal(high_entropy(entropy, everything, share=1.0), everything)
    assert not high_entropy(entropy, ~everything, share=0.2).any()


def test_high_entropy_agrees_with_the_quantile_of_torch():
    draw = torch.Generator().manual_seed(0)
    entropy = torch.rand(7, 11, generator=draw, dtype=torch.float64)
    mask = torch.rand(7, 11, generator=draw) < 0.6
    for share in (0.05, 0.2, 0.5, 0.9):
        threshold = torch.quantile(entropy[mask], 1 - share)
        assert torch.equal(high_entropy(entropy, mask, share=share), mask & (entropy >= threshold))


def test_training_on_high_entropy_without_prepare_is_refused():
    policy, batch = rows()
    with pytest.raises(ValueError, match="prepare"):
        make("high_entropy").loss(*policy.logprobs(batch), batch)
    with pytest.raises(ValueError, match="entropies"):
        make("high_entropy").prepare(replace(batch, old_entropy=None), rewards_of([[1.0, 0.0], [1.0, 0.0]]))


def test_the_entropy_bonus_pushes_entropy_up():
    policy, batch = rows()
    batch = replace(batch, advantages=torch.zeros(4, dtype=torch.float64))
    logprobs, entropy = policy.logprobs(batch)
    loss, found = make(entropy_coef=0.5).loss(logprobs, entropy, batch)
    assert loss.item() == pytest.approx(-0.5 * entropy[batch.mask].mean().item(), abs=1e-12)
    loss.backward()
    before = entropy[batch.mask].mean().item()
    with torch.no_grad():
        for weight in policy.weights:
            assert weight.grad is not None
            weight -= 0.1 * weight.grad
    assert policy.logprobs(batch)[1][batch.mask].mean().item() > before
    assert found["policy/entropy_coef"].value == 0.5


def test_an_adaptive_bonus_follows_its_rule():
    bonus = EntropyBonus(coefficient=0.01, target=1.0, step=0.005, highest=0.02)
    assert bonus.applied == 0.0  # nothing has been measured yet
    applied = []
    for entropy in (0.9, 0.9, 0.9, 1.1, 1.2, 0.8, math.nan):
        bonus.adapt(entropy)
        applied.append((round(bonus.coefficient, 6), round(bonus.applied, 6)))
    assert applied == [
        (0.015, 0.015),
        (0.02, 0.02),
        (0.02, 0.02),
        (0.015, 0),
        (0.01, 0),
        (0.015, 0.015),
        (0.015, 0.015),
    ]


def test_a_constant_bonus_stays_and_state_survives_a_checkpoint():
    bonus = EntropyBonus(coefficient=0.01)
    bonus.adapt(0.1)
    assert bonus.applied == 0.01
    other = EntropyBonus(coefficient=0.0, target=0.5)
    adapted = EntropyBonus(coefficient=0.1, target=0.5)
    adapted.adapt(0.3)
    other.load_state_dict(adapted.state_dict())
    assert other.applied == adapted.applied > 0


def test_two_algorithms_do_not_share_their_bonus():
    one, other = make(entropy_target=1.0), make(entropy_target=1.0)
    one.entropy.adapt(0.1)
    assert other.entropy.measured == math.inf


def test_largest_and_effective_fraction_add_up():
    assert (Largest.of(2.0) + Largest.of(3.0) + Largest.of(1.0)).value == 3.0
    whole = EffectiveFraction(6.0, 3.0, 14.0)
    parts = EffectiveFraction(1.0, 1.0, 1.0) + EffectiveFraction(5.0, 2.0, 13.0)
    assert parts == whole
    assert whole.value == pytest.approx(36 / 42)
    with pytest.raises(TypeError):
        whole + Largest.of(1.0)


def hinge(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, margin: float = 0.1) -> Tensor:
    """A made-up loss: nothing to gain beyond a margin."""
    return torch.relu(margin - advantages[:, None] * (logprobs - old_logprobs))


def test_a_loss_of_ones_own_takes_the_place_of_a_name():
    policy, batch = rows()
    logprobs, entropy = policy.logprobs(batch)
    loss, found = make("dapo", loss=partial(hinge, margin=0.3)).loss(logprobs, entropy, batch)
    assert batch.old_logprobs is not None
    expected = hinge(logprobs, batch.old_logprobs, batch.advantages, batch.mask, margin=0.3)[batch.mask].mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert "policy/clip_fraction" not in found


def test_an_advantage_of_ones_own_takes_the_place_of_a_name():
    def ranks(rewards: Rewards) -> Tensor:
        return rewards.values.argsort(dim=1).argsort(dim=1).double()

    assert make(advantage=ranks).advantages(rewards_of([[0.3, 0.1]])).tolist() == [[1.0, 0.0]]


def test_a_loss_in_a_file_of_the_user_comes_in_through_the_recipe(tmp_path: Path):
    from oncurve.algorithm.settings import AlgorithmSection
    from oncurve.data.settings import WordProblemsData
    from oncurve.recipe.schema import Config
    from oncurve.run.builder import make_algorithm

    (tmp_path / "mine.py").write_text(
        "def cubic(logprobs, old_logprobs, advantages, mask):\n"
        "    return -advantages[:, None] * (logprobs - old_logprobs + 1) ** 3\n",
        encoding="utf-8",
    )
    section = AlgorithmSection(type="custom", function=f"{tmp_path / 'mine.py'}:cubic", group_size=2)
    algorithm = make_algorithm(Config(model="embedded", data=WordProblemsData(), algorithm=section))
    policy, batch = rows()
    logprobs, entropy = policy.logprobs(batch)
    loss, _ = algorithm.loss(logprobs, entropy, batch)
    assert batch.old_logprobs is not None
    cubes = -batch.advantages[:, None] * (logprobs - batch.old_logprobs + 1) ** 3
    per_row = torch.where(batch.mask, cubes, 0.0).sum(dim=1) / batch.mask.sum(dim=1)
    assert loss.item() == pytest.approx(per_row.mean().item(), abs=1e-12)
