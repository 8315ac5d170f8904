from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oncurve.algorithm.presets import PRESETS, build
from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch, Rewards, Size


def make(name: str, **choices) -> Algorithm:
    return build(name, group_size=4, max_completion_tokens=10, **choices)


def rows(advantages: list[float], lengths: list[int]) -> Batch:
    width, count = max(lengths), len(lengths)
    long = torch.tensor(lengths)
    mask = torch.arange(width)[None, :] < long[:, None]
    batch = Batch(
        prompt_ids=torch.zeros(count, 1, dtype=torch.long),
        prompt_lengths=torch.ones(count, dtype=torch.long),
        completion_ids=torch.zeros(count, width, dtype=torch.long),
        mask=mask,
        completion_lengths=long,
        group_ids=torch.zeros(count, dtype=torch.long),
        advantages=torch.tensor(advantages),
        sampler_logprobs=torch.zeros(count, width),
        size=Size(count, sum(lengths), 1),
    )
    return batch


def test_every_preset_builds_and_gives_advantages():
    for name in PRESETS:
        rewards = Rewards.of([[1.0, 0.0, 0.0, 1.0]])
        advantages = make(name).advantages(replace(rewards, parts={"correct": rewards.values}))
        assert advantages.shape == (1, 4)


def test_grpo_scales_by_the_deviation_and_takes_the_mean_of_every_completion():
    algorithm = make("grpo")
    advantages = algorithm.advantages(Rewards.of([[1.0, 1.0, 0.0, 0.0]]))
    assert advantages[0].tolist() == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-3)
    batch = rows([1.0, 1.0], [1, 4])
    loss, _ = algorithm.loss(batch.sampler_logprobs, torch.zeros(2, 4), batch)
    assert loss.item() == pytest.approx(-(1 + 4 / 4) / 2)


@pytest.mark.proves("F5", "D2")
def test_dr_grpo_drops_the_deviation_and_divides_by_the_token_limit():
    algorithm = make("dr_grpo")
    advantages = algorithm.advantages(Rewards.of([[1.0, 1.0, 0.0, 0.0]]))
    assert advantages[0].tolist() == pytest.approx([0.5, 0.5, -0.5, -0.5])
    batch = rows([1.0, 1.0], [1, 4])
    loss, _ = algorithm.loss(batch.sampler_logprobs, torch.zeros(2, 4), batch)
    assert loss.item() == pytest.approx(-(1 + 4) / (2 * 10))


@pytest.mark.proves("F4", "F6")
def test_a_choice_replaces_that_of_the_preset():
    assert make("grpo", scale_by_std=False).advantages(Rewards.of([[1.0, 0.0, 0.0, 0.0]]))[0, 0].item() == 0.75
    assert make("grpo", loss="no_baseline").advantages(Rewards.of([[1.0, 0.0, 0.0, 1.0]])).tolist() == [[1, 0, 0, 1]]


@pytest.mark.proves("F14", "D27")
def test_only_a_kl_term_needs_a_reference():
    assert not make("grpo").needs_reference
    assert make("grpo", kl_coef=0.04).needs_reference
