"""Does an episode in several rows weigh as much as the same episode in one? In float64, packed and padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from doubles import in_double
from torch import Tensor

from oncurve.algorithm.presets import build
from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch, Rewards, collate
from oncurve.core.records import Completion, Group, Segment
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP_SIZE = 4
RandomGroups = Callable[..., list[Group]]


def in_turns(completion: Completion) -> Completion:
    """Three turns with two answers between them, where there are tokens enough."""
    count = len(completion.token_ids)
    cuts = [0, 1, 2, 4, 5, count] if count > 5 else [0, count]
    segments = tuple(Segment(turn % 2 == 0, start, end, "") for turn, (start, end) in enumerate(pairwise(cuts)))
    return replace(completion, segments=segments)


def in_rows(completion: Completion) -> Completion:
    """The same episode with a row for every turn, whose prompt is all that was read before it."""
    rows = [
        replace(
            completion,
            prompt_ids=(*completion.prompt_ids, *completion.token_ids[: part.start]),
            token_ids=completion.token_ids[part.start : part.end],
            sampler_logprobs=completion.sampler_logprobs[part.start : part.end],
            segments=(),
            own_prompt="own",
        )
        for part in completion.segments
        if part.is_policy
    ]
    return replace(rows[0], branches=tuple(rows[1:]))


def both_ways(random_groups: RandomGroups) -> tuple[list[Group], list[Group]]:
    whole = [
        Group(group.prompt, tuple(map(in_turns, group.completions)))
        for group in random_groups(3, GROUP_SIZE, longest=12, seed=2)
    ]
    return whole, [Group(group.prompt, tuple(map(in_rows, group.completions))) for group in whole]


@pytest.fixture
def double(
    make_policy: Callable[..., TrainedPolicy], tiny_model: Callable[..., PreTrainedModel]
) -> Callable[[bool], TrainedPolicy]:
    def make(packing: bool) -> TrainedPolicy:
        return make_policy(
            in_double(tiny_model("qwen2")),
            optimizer=OptimizerSettings(learning_rate=1e-3),
            compute_type="float64",
            packing=packing,
        )

    return make


def gradient(policy: TrainedPolicy, algorithm: Algorithm, batch: Batch, parts: int = 1) -> Tensor:
    """The gradient of all weights, over microbatches of some rows each."""
    size = -(-len(batch) // parts)
    for start in range(0, len(batch), size):
        microbatch = batch.select(torch.arange(start, min(start + size, len(batch))))
        logprobs, entropy = policy.logprobs(microbatch)
        policy.backward(algorithm.loss(logprobs, entropy, microbatch)[0])
    return torch.cat([weight.grad.flatten() for weight in policy.model.parameters() if weight.grad is not None])


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_an_episode_in_rows_has_the_gradient_of_the_whole(
    random_groups: RandomGroups, double: Callable[[bool], TrainedPolicy], preset: str, packing: bool
) -> None:
    whole, rows = both_ways(random_groups)
    advantages = torch.randn(3, GROUP_SIZE, generator=torch.Generator().manual_seed(1))
    algorithm = build(preset, group_size=GROUP_SIZE, max_completion_tokens=12)
    one, many = collate(whole, advantages).measured(), collate(rows, advantages).measured()
    assert len(many) > len(one) == 3 * GROUP_SIZE
    assert many.size == one.size
    expected = gradient(double(packing), algorithm, one)
    for parts in (1, 4):
        found = gradient(double(packing), algorithm, many, parts)
        assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_updates_hold_whole_episodes_and_a_kl_in_the_reward_is_that_of_the_episode(random_groups: RandomGroups) -> None:
    whole, rows = both_ways(random_groups)
    values = torch.randn(3, GROUP_SIZE, generator=torch.Generator().manual_seed(1))
    rewards = Rewards.of(values.tolist())
    algorithm = build("rloo", group_size=GROUP_SIZE, max_completion_tokens=12, kl_coef=0.1, kl_in="reward")
    prepared = []
    for groups in (whole, rows):
        batch = collate(groups, algorithm.advantages(rewards))
        sampled = batch.sampler_logprobs
        prepared.append(algorithm.prepare(replace(batch, old_logprobs=sampled, ref_logprobs=sampled * 0.5), rewards))
    one, many = prepared
    assert many.episode_ids is not None
    torch.testing.assert_close(many.advantages, one.advantages[many.episode_ids])
    updates = list(many.split(6))
    assert [update.size.num_rows for update in updates] == [6, 6]
    assert sum(map(len, updates)) == len(many)
    assert [update.size for update in updates] == [update.size for update in one.split(6)]
    with pytest.raises(ValueError, match="12 completions do not divide"):
        list(many.split(5))
