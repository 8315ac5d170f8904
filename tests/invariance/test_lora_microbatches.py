"""With an adapter, is an update still the same padded, packed and with shared prompts? In float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from doubles import in_double
from torch import Tensor

from oncurve.algorithm.chunked_head import from_hidden
from oncurve.algorithm.presets import build
from oncurve.core.batch import Batch, collate
from oncurve.core.records import Group
from oncurve.policy.lora import Adapter, add_adapter
from oncurve.policy.settings import LoraSettings, OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakePolicy = Callable[..., TrainedPolicy]
MakeModel = Callable[..., "PreTrainedModel"]
RandomGroups = Callable[..., list[Group]]
PROMPTS, GROUP_SIZE, LONGEST = 4, 4, 12

architectures = pytest.mark.parametrize("architecture", ["qwen2", "llama"])
recomputed = pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])


def stirred(adapter: Adapter) -> Adapter:
    """The adapter with both of its matrices random: a fresh one adds nothing and hides its own mistakes."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return adapter


@pytest.fixture
def make_double(make_policy: MakePolicy, tiny_model: MakeModel) -> MakePolicy:
    """A policy in float64 with an adapter that is not zero."""

    def make(architecture: str, **options: object) -> TrainedPolicy:
        adapter = stirred(add_adapter(in_double(tiny_model(architecture)), LoraSettings(rank=4, alpha=8.0), base=""))
        settings = OptimizerSettings(learning_rate=1e-3, max_gradient_norm=0.5)
        return make_policy(adapter.model, adapter=adapter, optimizer=settings, compute_type="float64", **options)

    return make


@pytest.fixture
def batch(random_groups: RandomGroups) -> Batch:
    """Ragged rows with random advantages, those that were cut off left out of the loss."""
    groups = random_groups(PROMPTS, GROUP_SIZE, longest=LONGEST)
    advantages = torch.randn(PROMPTS, GROUP_SIZE, generator=torch.Generator().manual_seed(1))
    return collate(groups, advantages, mask_truncated=True)


def by_rows(batch: Batch, rows: int) -> Iterator[Batch]:
    for start in range(0, len(batch), rows):
        yield batch.select(torch.arange(start, min(start + rows, len(batch))))


def gradient(policy: TrainedPolicy, microbatches: Iterator[Batch]) -> Tensor:
    """The gradient of the adapter, with a KL to the base under it, as one long vector."""
    algorithm = build("grpo", group_size=GROUP_SIZE, max_completion_tokens=LONGEST, kl_coef=0.1)
    policy.backend.optimizer.zero_grad(set_to_none=True)
    for microbatch in microbatches:
        logprobs, entropy = policy.logprobs(microbatch)
        policy.backward(algorithm.loss(logprobs, entropy, microbatch)[0])
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is None for parameter in policy.model.parameters() if not parameter.requires_grad)
    return torch.cat([p.grad.flatten() for p in trained if p.grad is not None]).clone()


@architectures
@recomputed
def test_padded_packed_shared_and_chunked_give_one_gradient(
    architecture: str, checkpointing: bool, make_double: MakePolicy, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = make_double(architecture, packing=False, gradient_checkpointing=checkpointing)
    packed = make_double(architecture, gradient_checkpointing=checkpointing, tokens_per_microbatch=70)
    assert packed.is_packed
    assert not padded.is_packed
    annotated = padded.annotate(batch, old=False, entropy=False, reference=True)
    again = packed.annotate(batch, old=False, entropy=False, reference=True)
    assert annotated.ref_logprobs is not None
    assert again.ref_logprobs is not None
    assert (annotated.ref_logprobs - again.ref_logprobs).abs().max() < 1e-5  # kept in float32
    whole = gradient(padded, iter([annotated]))
    assert whole.dtype == torch.float64
    assert whole.abs().max() > 1e-3
    alone = replace(annotated, group_ids=torch.arange(len(batch)))  # every row brings its own prompt
    ways = {
        "padded in parts": gradient(padded, by_rows(annotated, 3)),
        "packed": gradient(packed, iter([alone])),
        "packed with shared prompts": gradient(packed, iter([annotated])),
        "packed with shared prompts in parts": gradient(packed, packed.microbatches(annotated)),
    }
    monkeypatch.setattr("oncurve.policy.forward.from_hidden", partial(from_hidden, chunk_tokens=7))
    ways["in chunks of the head"] = gradient(packed, iter([annotated]))
    for way, found in ways.items():
        assert (found - whole).abs().max().item() < 1e-10, way


@architectures
def test_the_reference_of_an_adapter_is_the_base_under_it(
    architecture: str, make_double: MakePolicy, make_policy: MakePolicy, tiny_model: MakeModel, batch: Batch
) -> None:
    policy = make_double(architecture)
    base = make_policy(in_double(tiny_model(architecture)), compute_type="float64")
    annotated = policy.annotate(batch, old=True, entropy=False, reference=True)
    expected = base.annotate(batch, old=True, entropy=False, reference=False)
    assert policy.reference is None
    assert annotated.ref_logprobs is not None
    assert annotated.old_logprobs is not None
    assert torch.equal(annotated.ref_logprobs, expected.old_logprobs)
    assert (annotated.ref_logprobs - annotated.old_logprobs).abs().max() > 1e-2
    again = policy.annotate(batch, old=True, entropy=False, reference=False)
    assert torch.equal(again.old_logprobs, annotated.old_logprobs), "the adapter is on again"
