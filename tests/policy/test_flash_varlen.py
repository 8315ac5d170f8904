"""Does attention in runs give the loss and gradients of padded rows? With a reference kernel, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tasks
import torch
import workers
from doubles import in_double
from lanes import gate
from runs_reference import KINDS, Reference, heads_of
from torch import Tensor

from oncurve.core.batch import Batch
from oncurve.model.packing import Block, make_layout
from oncurve.policy.distributed import ALONE, Processes
from oncurve.policy.lora import add_adapter
from oncurve.policy.packed_attention import attend
from oncurve.policy.settings import LoraSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakePolicy = Callable[..., TrainedPolicy]
MakeModel = Callable[..., "PreTrainedModel"]
MakeBatch = Callable[[str], Batch]
CPU = torch.device("cpu")
RECOMPUTED = ("gradient_checkpointing", "offload_activations")
every_batch = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def make_double(make_policy: MakePolicy, tiny_model: MakeModel) -> MakePolicy:
    """A policy in float64, with a stirred adapter if asked for one."""

    def make(architecture: str = "qwen2", *, lora: bool = False, **options: Any) -> TrainedPolicy:
        model = in_double(tiny_model(architecture))
        if lora:
            options["adapter"] = add_adapter(model, LoraSettings(rank=4, alpha=8.0), base="")
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        return make_policy(model, compute_type="float64", **options)

    return make


def loss_and_gradients(policy: TrainedPolicy, batch: Batch) -> dict[str, Tensor]:
    """A loss in which every log-probability and entropy has a weight of its own, and what every weight gets of it."""
    generator = torch.Generator().manual_seed(3)
    shares = torch.randn(2, *batch.mask.shape, generator=generator, dtype=torch.float64)
    logprobs, entropy = policy.logprobs(batch)
    loss = (shares[0] * logprobs + shares[1] * entropy).sum()
    policy.backward(loss)
    trained = {name: part for name, part in policy.model.named_parameters() if part.requires_grad}
    assert all(part.grad is not None for part in trained.values())
    return {"loss": loss.detach()} | {name: part.grad for name, part in trained.items() if part.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert values.dtype == torch.float64
        assert (found[name] - values).abs().max().item() < 1e-10, name
    assert max(float(values.abs().max()) for name, values in expected.items() if name != "loss") > 1e-2


@pytest.mark.parametrize(
    ("architecture", "lora", "option"),
    gate(
        itertools.product(("qwen2", "llama", "gpt2"), (False, True), (None, *RECOMPUTED)),
        *(("qwen2", False, option) for option in (None, *RECOMPUTED)),
        ("llama", True, "gradient_checkpointing"),
        ("gpt2", False, None),
        ("qwen2", True, None),
    ),
)
def test_runs_give_the_loss_and_every_gradient_of_padded_rows(
    architecture: str,
    lora: bool,
    option: str | None,
    make_double: MakePolicy,
    make_batch: MakeBatch,
    reference: Reference,
) -> None:
    batch = make_batch("ragged")
    expected = loss_and_gradients(make_double(architecture, lora=lora, packing=False), batch)
    policy = make_double(architecture, lora=lora, **({option: True} if option else {}))
    assert policy.is_packed
    reference.seen.clear()
    assert_same(loss_and_gradients(policy, batch), expected)
    assert len(reference.seen) == (8 if option == "gradient_checkpointing" else 4), "two calls for each of two layers"
    assert len({id(runs) for runs, _ in reference.seen}) == 2, "tables are made once for all layers"


@every_batch
def test_every_kind_of_batch_has_the_gradients_of_padded_rows(
    kind: str, make_double: MakePolicy, make_batch: MakeBatch, reference: Reference
) -> None:
    batch = make_batch(kind)
    expected = loss_and_gradients(make_double(packing=False), batch)
    policy = make_double()
    reference.seen.clear()
    assert_same(loss_and_gradients(policy, batch), expected)
    assert len(reference.seen) == (2 if kind == "one token each" else 4), "where no prompt is read, one call a layer"


@pytest.mark.parametrize("scale", [None, 0.4])
@every_batch
def test_the_gradient_is_that_of_finite_differences(kind: str, scale: float | None, make_batch: MakeBatch) -> None:
    layout = make_layout(make_batch(kind), CPU)
    parts = heads_of(layout, heads=2, kv_heads=1, size=2, dtype=torch.float64)
    weights = torch.randn(*parts[0].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attend(q, k, v, layout, Reference(), scale=scale) * weights).sum()

    assert torch.autograd.gradcheck(weighted, parts, fast_mode=True)


def test_runs_are_cut_where_rows_begin_and_end(make_batch: MakeBatch) -> None:
    batch = replace(
        make_batch("ragged").select(torch.tensor([0, 4, 1, 8])),
        prompt_lengths=torch.tensor([3, 2, 3, 1]),
        completion_lengths=torch.tensor([4, 2, 6, 1]),
    )
    layout = make_layout(batch, CPU)  # prompts of 3, 2 and 1 tokens, completions of 3, 1 and 5, one filler of 1
    own, prompts = layout.own_runs, layout.prompt_runs
    assert prompts is not None
    assert (own.queries, own.keys) == (slice(0, 16), slice(0, 16))
    assert own.query_starts.tolist() == own.key_starts.tolist() == [0, 3, 5, 6, 9, 10, 15, 16]
    assert own.longest_queries == own.longest_keys == 5
    assert isinstance(prompts.queries, Tensor)
    assert prompts.queries.tolist() == [6, 7, 8, 10, 11, 12, 13, 14, 9]
    assert prompts.keys == slice(0, 5)
    assert (prompts.query_starts.tolist(), prompts.key_starts.tolist()) == ([0, 8, 9], [0, 3, 5])
    assert (prompts.longest_queries, prompts.longest_keys) == (8, 3)


def test_rows_side_by_side_are_read_in_place(make_batch: MakeBatch) -> None:
    read = make_layout(make_batch("ragged"), CPU).prompt_runs
    assert read is not None
    assert isinstance(read.queries, slice)
    assert isinstance(read.keys, slice)


def test_rows_that_do_not_lie_end_to_end_are_refused(make_batch: MakeBatch) -> None:
    layout = make_layout(make_batch("ragged"), CPU)
    longer = replace(layout, ids=torch.zeros(1, layout.ids.shape[1] + 1, dtype=torch.long))
    moved = replace(layout, blocks=tuple(Block(block.spans + torch.tensor([1, 0, 0, 0])) for block in layout.blocks))
    for wrong in (longer, moved, replace(longer, blocks=moved.blocks)):
        with pytest.raises(ValueError, match="end to end"):
            _ = wrong.own_runs


def in_parts(processes: Processes, kernel: Reference) -> dict[str, Any]:
    """A whole training with weights in parts where there are several processes, and the calls that it made."""
    options: dict[str, Any] = {"double": True, "lora": True, "gradient_checkpointing": True}
    made = tasks.make_policy(processes, "fsdp", **options)
    assert made.is_packed
    kernel.seen.clear()
    trained = tasks.train(processes, way="fsdp", policy=made, double=True, lora=True)
    return {"weights": trained["weights"], "calls": len(kernel.seen)}


def test_weights_in_parts_end_where_whole_ones_in_padded_rows_do(tmp_path: Path, reference: Reference) -> None:
    """Two processes under FSDP2 through runs, and one alone through padding."""
    found = workers.run(2, in_parts, tmp_path, kernel=reference)
    expected = tasks.train(ALONE, way="ddp", double=True, lora=True, packing=False)["weights"]
    for one in found:
        assert one["calls"] > 0
        for name, weight in expected.items():
            assert (one["weights"][name] - weight).abs().max().item() < 1e-10, name
