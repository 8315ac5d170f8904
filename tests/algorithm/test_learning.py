"""Every named algorithm learns a task of one token: say again what the prompt says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lanes import gate
from toy import Toy, annotate, make_batch, rewards_of

from oncurve.algorithm.presets import PRESETS, build

GROUP, LIMIT = 8, 3
CHOICES = {
    "high_entropy": {"high_entropy_share": 0.6},  # a fifth of a few dozen tokens would be too few
    "distil": {"advantage": "group_std", "kl_coef": 0.02},  # its teacher knows nothing here
}


def learn(name: str, *, seed: int, prompts: int, steps: int, rate: float) -> tuple[float, float]:
    """Mean reward of the first step and of the last three, with two updates per step, so that ratios leave 1."""
    algorithm = build(name, group_size=GROUP, max_completion_tokens=LIMIT, **CHOICES.get(name, {}))
    policy, draw = Toy(seed, scale=0.3), torch.Generator().manual_seed(seed)
    reference = policy.near(0, distance=0.0)
    optimizer = torch.optim.Adam(policy.weights, lr=rate)
    starts = torch.arange(1, prompts + 1).repeat_interleave(GROUP)
    history: list[float] = []
    for step in range(steps):
        completions = policy.sample(starts, max_tokens=LIMIT, draw=draw)
        earned = [float(tokens[0] == start) for tokens, start in zip(completions, starts.tolist(), strict=True)]
        history.append(sum(earned) / len(earned))
        rewards = rewards_of([earned[start : start + GROUP] for start in range(0, len(earned), GROUP)])
        batch = make_batch(starts.tolist(), completions, (starts - 1).tolist())
        batch = annotate(batch, old=policy, sampler=policy, reference=reference)
        batch = replace(batch, advantages=algorithm.advantages(rewards).reshape(-1))
        for update in algorithm.prepare(batch, rewards).split(len(batch) // 2):
            algorithm.loss(*policy.logprobs(update), update)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert algorithm.reference_share(step) == 0  # within one stage
    return history[0], sum(history[-3:]) / 3


@pytest.mark.parametrize("name", PRESETS)
def test_a_toy_policy_gets_better(name: str):
    first, last = learn(name, seed=1, prompts=2, steps=8, rate=0.25)
    assert last >= first + 0.3


OF_EACH_KIND = ("grpo", "dr_grpo", "cispo", "gspo", "rloo", "sapo")
"""Presets whose losses differ in more than numbers that other tests prove; one step of each preset's kind is above."""


@pytest.mark.slow
@pytest.mark.parametrize("name", gate(PRESETS, *OF_EACH_KIND))
@pytest.mark.parametrize("seed", gate(range(3), 0))
def test_a_toy_policy_learns_the_task(name: str, seed: int):
    first, last = learn(name, seed=seed, prompts=5, steps=45, rate=0.08)
    assert first < 0.4
    assert last >= 0.9
