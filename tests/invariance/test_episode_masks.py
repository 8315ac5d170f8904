"""Is an episode trained on what the policy wrote and on nothing else? In float64, packed and padded alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from doubles import in_double
from torch import Tensor

from oncurve.algorithm.presets import build
from oncurve.core.batch import Batch, Size, collate
from oncurve.core.records import Completion, Group, Segment
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakePolicy = Callable[..., TrainedPolicy]
RandomGroups = Callable[..., list[Group]]
GROUP_SIZE = 4


def as_episode(completion: Completion, draw: random.Random) -> Completion:
    """The same tokens in turns of random lengths, the first and the last of them the policy's."""
    count = len(completion.token_ids)
    cuts = [0, *sorted(draw.sample(range(1, count), min(4, (count - 1) // 2 * 2))), count] if count > 2 else [0, count]
    segments = tuple(Segment(turn % 2 == 0, start, end, "") for turn, (start, end) in enumerate(pairwise(cuts)))
    logprobs = tuple(
        value if is_written else 0.0
        for value, is_written in zip(
            completion.sampler_logprobs, replace(completion, segments=segments).written, strict=True
        )
    )
    return replace(completion, segments=segments, sampler_logprobs=logprobs)


def episodes(random_groups: RandomGroups) -> list[Group]:
    draw = random.Random(3)
    return [
        Group(group.prompt, tuple(as_episode(completion, draw) for completion in group.completions))
        for group in random_groups(3, GROUP_SIZE, longest=12)
    ]


def with_own_prompts(groups: list[Group]) -> list[Group]:
    """Episodes that their environments began in words of their own: two different prompts in each group."""
    return [
        Group(
            group.prompt,
            tuple(
                replace(one, prompt_ids=(*one.prompt_ids, 7 + place % 2), own_prompt="own")
                for place, one in enumerate(group.completions)
            ),
        )
        for group in groups
    ]


@pytest.fixture
def double(make_policy: MakePolicy, tiny_model: Callable[..., PreTrainedModel]) -> Callable[[bool], TrainedPolicy]:
    def make(packing: bool) -> TrainedPolicy:
        return make_policy(
            in_double(tiny_model("qwen2")),
            optimizer=OptimizerSettings(learning_rate=1e-3),
            compute_type="float64",
            packing=packing,
        )

    return make


def advantages(groups: list[Group]) -> Tensor:
    return torch.randn(len(groups), GROUP_SIZE, generator=torch.Generator().manual_seed(1))


def gradient(policy: TrainedPolicy, batch: Batch) -> tuple[Tensor, Tensor]:
    """The gradient of all weights, and that of the log-probabilities [B, T]."""
    logprobs, entropy = policy.logprobs(batch)
    logprobs.retain_grad()
    loss, _ = build("grpo", group_size=GROUP_SIZE, max_completion_tokens=12).loss(logprobs, entropy, batch)
    policy.backward(loss)
    assert logprobs.grad is not None
    whole = torch.cat([weight.grad.flatten() for weight in policy.model.parameters() if weight.grad is not None])
    return whole, logprobs.grad


@pytest.mark.parametrize("own_prompts", [False, True], ids=["shared", "own_prompts"])
def test_packed_and_padded_episodes_have_the_same_gradient_and_answers_have_none(
    random_groups: RandomGroups, double: Callable[[bool], TrainedPolicy], own_prompts: bool
) -> None:
    groups = with_own_prompts(episodes(random_groups)) if own_prompts else episodes(random_groups)
    batch = collate(groups, advantages(groups)).measured()
    answered = torch.arange(batch.mask.shape[1]) < batch.completion_lengths[:, None]
    answered &= ~batch.mask
    assert answered.any()
    packed, of_packed = gradient(double(True), batch)
    padded, of_padded = gradient(double(False), batch)
    assert (packed - padded).abs().max() <= 1e-10 * padded.abs().max()
    assert (of_packed[answered] == 0).all()
    assert (of_padded[answered] == 0).all()
    assert (of_packed[batch.mask] != 0).any()


def test_the_loss_of_an_episode_is_the_mean_over_what_the_policy_wrote(
    random_groups: RandomGroups, double: Callable[[bool], TrainedPolicy]
) -> None:
    groups = episodes(random_groups)
    policy, given = double(True), advantages(groups)
    batch = collate(groups, given).measured()
    logprobs, entropy = policy.logprobs(batch)
    loss, _ = build("dapo", group_size=GROUP_SIZE, max_completion_tokens=12).loss(logprobs, entropy, batch)
    total, count = 0.0, 0
    for group, row in zip(groups, given, strict=True):
        for completion, advantage in zip(group.completions, row.tolist(), strict=True):
            ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
            with torch.no_grad():
                logits = policy.model(input_ids=ids[None]).logits[0]
            of_tokens = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
            for place, is_written in enumerate(completion.written):
                if is_written:
                    now = of_tokens[len(completion.prompt_ids) - 1 + place].item()
                    ratio = torch.tensor(now - now).exp().item()  # one update: the old policy is this one
                    total, count = total - ratio * advantage, count + 1
    assert batch.size == Size(num_rows=12, num_tokens=count, num_prompts=3)
    assert loss.item() == pytest.approx(total / count, rel=1e-6)


def test_lengths_and_truncation_count_what_the_policy_wrote(random_groups: RandomGroups) -> None:
    [group] = random_groups(1, 1, longest=12, seed=4)
    completion = replace(
        group.completions[0],
        token_ids=(1, 2, 3, 4, 5),
        sampler_logprobs=(-1.0, -1.0, 0.0, 0.0, -1.0),
        segments=(Segment(True, 0, 2, "ask"), Segment(False, 2, 4, "told"), Segment(True, 4, 5, "say")),
        finish_reason="turns",
    )
    assert (completion.num_tokens, completion.num_turns) == (3, 2)
    assert completion.written_ids == (1, 2, 5)
    assert completion.is_truncated
    assert completion.as_graded().text == "ask\nsay"
    batch = collate([Group(group.prompt, (completion,))], torch.ones(1, 1))
    assert batch.mask.tolist() == [[True, True, False, False, True]]


def test_segments_with_a_gap_are_refused(random_groups: RandomGroups) -> None:
    [group] = random_groups(1, 1)
    with pytest.raises(ValueError, match="do not cover"):
        replace(group.completions[0], segments=(Segment(True, 1, len(group.completions[0].token_ids), ""),))
