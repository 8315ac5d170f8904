"""Is the loss of a supervised stage the mean of -log p over the shown tokens? In float64, packed and padded alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from doubles import in_double
from torch.nn.functional import cross_entropy

from oncurve.algorithm.presets import build
from oncurve.core.batch import collate
from oncurve.core.records import Prompt, Segment
from oncurve.core.sampler import SamplingRequest
from oncurve.data.demonstrations import Demonstration, render_demonstrations
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.demonstrated import DemonstrationSampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def ragged(tokenizer: Any) -> list[Demonstration]:
    """Five rows of unequal lengths, and one in which somebody else speaks in between."""
    sizes = ((3, 2), (9, 5), (4, 1), (1, 7), (6, 3))
    rows = [{"prompt": "a" * size, "question": "", "completion": "bc " * more} for size, more in sizes]
    shown, _ = render_demonstrations(rows, tokenizer)
    turns = (Segment(True, 0, 2, "ab"), Segment(False, 2, 5, "cde"), Segment(True, 5, 7, "fg"))
    return [*shown, Demonstration(Prompt("", (65, 66), 5), tuple(range(70, 77)), "", turns)]


@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradient_are_those_of_a_plain_loop(
    packing: bool, make_policy: Callable[..., TrainedPolicy], tiny_model: Callable[..., PreTrainedModel], tokenizer: Any
) -> None:
    policy = make_policy(
        in_double(tiny_model("qwen2")), compute_type="float64", packing=packing, tokens_per_microbatch=40
    )
    shown = ragged(tokenizer)
    algorithm = build("rft", group_size=1, max_completion_tokens=8)
    request = SamplingRequest([one.prompt for one in shown], 1)
    batch = collate(DemonstrationSampler(shown).sample(request), torch.ones(len(shown), 1))
    total = 0.0
    for microbatch in policy.microbatches(batch):
        loss, _ = algorithm.loss(*policy.logprobs(microbatch), microbatch)
        policy.backward(loss)
        total += loss.item()
    weights = dict(policy.trained_model.named_parameters())
    found = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
    policy.trained_model.zero_grad()
    expected = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
    for one in shown:
        ids = torch.tensor([[*one.prompt.prompt_ids, *one.token_ids]])
        logits = policy.model(input_ids=ids).logits[0, len(one.prompt.prompt_ids) - 1 : -1]
        per_token = cross_entropy(logits, torch.tensor(one.token_ids), reduction="none")
        turns = one.segments or (Segment(True, 0, len(one.token_ids), ""),)
        for turn in turns:
            if turn.is_policy:
                expected = expected + per_token[turn.start : turn.end].sum()
                num_tokens += turn.end - turn.start
    (expected / num_tokens).backward()
    assert total == pytest.approx(expected.item() / num_tokens, abs=1e-10)
    assert found.keys() == {name for name, weight in weights.items() if weight.grad is not None}
    for name, gradient in found.items():
        assert (gradient - weights[name].grad).abs().max() < 1e-10, name
