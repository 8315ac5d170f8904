"""Do our own layers compute with an adapter what peft's modules compute, and nothing of the frozen base's gradient?"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from lanes import gate
from own_layer_cases import FAMILIES, gradients, largest_error, make, ragged_batch
from torch import Tensor

from oncurve.core.batch import Batch
from oncurve.core.policy import compute_context
from oncurve.model import decode_torch, decoding, ops_torch
from oncurve.model.decode_cuda_graph import RecordedLayers
from oncurve.model.decoding import LayerDecoder
from oncurve.model.lora_linear import Matrix
from oncurve.model.ops_native import library
from oncurve.model.weights import Backbone, _apart, backbone_of, project, supports
from oncurve.policy.forward import completion_logprobs, row_logprobs
from oncurve.policy.lora import Adapter, add_adapter
from oncurve.policy.settings import LoraSettings

families = pytest.mark.parametrize("family", FAMILIES)
SUBSETS = ("all-linear", ("q_proj", "v_proj"), ("o_proj", "down_proj"), ("up_proj",))


@pytest.fixture
def batch() -> Batch:
    return ragged_batch()


def adapted(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Adapter:
    """A model with an adapter that has been trained: both of its matrices are random."""
    adapter = add_adapter(make(family, dtype), LoraSettings(rank=3, alpha=5.0, **settings), base="")
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapter.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return adapter


@families
@pytest.mark.parametrize("targets", SUBSETS, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_float64_gradients_of_an_adapter_are_those_of_pefts_modules(
    family: str, targets: str | tuple[str, ...], recompute: bool, batch: Batch
) -> None:
    model = adapted(family, target_modules=targets).model
    assert supports(model)
    padded, expected = gradients(model, batch)
    packed, found = gradients(model, batch, packed=True, recompute=recompute)
    assert (padded - packed).abs().max() < 1e-10
    assert expected
    assert all(".lora_" in name for name in expected)
    assert largest_error(found, expected) < 1e-10


def test_biases_and_parts_of_an_adapter_are_trained_as_pefts_are(batch: Batch) -> None:
    model = adapted("qwen2", bias="all").model
    for name, parameter in model.named_parameters():
        if "lora_A" in name and "layers.1" in name:
            parameter.requires_grad_(False)
    _, expected = gradients(model, batch)
    _, found = gradients(model, batch, packed=True)
    assert any(name.endswith("q_proj.base_layer.bias") for name in expected)
    assert largest_error(found, expected) < 1e-10


@families
def test_without_its_adapter_the_model_is_its_base(family: str, batch: Batch) -> None:
    adapter = adapted(family)
    with torch.no_grad():
        base = completion_logprobs(make(family, torch.float64), batch, temperature=0.8, packed=True)[0]
        with adapter.off():
            assert torch.equal(completion_logprobs(adapter.model, batch, temperature=0.8, packed=True)[0], base)
        other = completion_logprobs(adapter.model, batch, temperature=0.8, packed=True)[0]
    assert (other - base).abs().max() > 1e-3


def test_the_gradient_of_a_frozen_matrix_is_never_computed(batch: Batch) -> None:
    """Nothing as large as the smallest matrix of the base comes out of a backward pass through an adapter."""
    model, made = adapted("llama", torch.float32).model, []
    own = Matrix.gradients

    def watched(self: Matrix, g: Tensor, x: Tensor) -> list[Tensor | None]:
        made.append(own(self, g, x))
        return made[-1]

    with patch.object(Matrix, "gradients", watched):
        gradients(model, batch, packed=True)
    assert len(made) == 3 * 7
    assert all(base is None and a is not None and b is not None for base, a, b in made)


def test_an_adapter_that_comes_or_goes_is_noticed(batch: Batch) -> None:
    model = make("qwen2", torch.float64)
    before = backbone_of(model)
    adapter = add_adapter(model, LoraSettings(rank=2), base="")
    assert backbone_of(model) is not before
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    expected = gradients(model, batch)[0]
    merged = adapter.merge()
    assert merged is model
    assert supports(merged)
    torch.testing.assert_close(gradients(merged, batch, packed=True)[0], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("settings", [{"dropout": 0.1}, {"target_modules": ("q_proj",), "dropout": 0.5}], ids=str)
def test_an_adapter_with_dropout_goes_through_the_modules(settings: dict[str, Any]) -> None:
    assert not supports(adapted("llama", **settings).model)


@pytest.mark.parametrize("way", ["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_decoding_with_an_adapter_is_decoding_the_merged_model(way: str, dtype: torch.dtype) -> None:
    if way == "kernels" and library() is None:
        pytest.skip("no C++ compiler, so there are no kernels: sudo apt-get install g++")
    adapter = adapted("qwen3", torch.float32)

    def logits(model: Any) -> Tensor:
        backbone = backbone_of(model)
        assert backbone is not None
        operations = decoding.operations if way == "kernels" else lambda *_: ops_torch
        with patch.object(decoding, "operations", operations):
            room = {"slots": 1, "prompt_slots": 1, "prompt_tokens": 5, "completion_tokens": 4}
            decoder = LayerDecoder(backbone, model.get_output_embeddings().weight, dtype, **room)
            first = decoder.prefill([[1, 2, 3, 4, 5]], [0])
            return torch.cat([first, decoder.step(torch.tensor([7]), torch.tensor([5]), torch.tensor([[0, 0, 0, 5]]))])

    found = logits(adapter.model)
    expected = logits(adapter.merge())
    assert torch.equal(found, expected) or (found - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)


def decoded(model: Any, dtype: torch.dtype, steps: int = 3) -> Tensor:
    """Logits after a prompt and after some tokens, as a GPU decodes: in few shapes, adapters apart."""
    backbone = backbone_of(model)
    assert backbone is not None
    with (
        patch.object(decoding, "operations", lambda *_: ops_torch),
        patch.object(decode_torch, "TorchLayers", RecordedLayers),
        patch.object(Backbone, "layer_weights", lambda self, layer, kind: _apart(layer, kind)),
    ):
        room = {"slots": 2, "prompt_slots": 1, "prompt_tokens": 5, "completion_tokens": 4}
        decoder = LayerDecoder(backbone, model.get_output_embeddings().weight, dtype, **room)
        logits = [decoder.prefill([[1, 2, 3, 4, 5]], [0])]
        for step in range(steps):
            logits.append(
                decoder.step(torch.tensor([7 + step]), torch.tensor([5 + step]), torch.tensor([[1, step, 0, 5]]))
            )
    return torch.cat(logits)


@families
@pytest.mark.parametrize("targets", SUBSETS, ids=str)
@torch.no_grad()
def test_an_adapter_that_is_kept_apart_decodes_as_pefts_modules(family: str, targets: str | tuple[str, ...]) -> None:
    model = adapted(family, target_modules=targets).model
    expected = model(torch.tensor([[1, 2, 3, 4, 5, 7, 8, 9]])).logits[0, 4:]
    torch.testing.assert_close(decoded(model, torch.float64), expected, atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_small_adapter_is_not_lost_in_the_rounding_of_its_matrix() -> None:
    """Added to a matrix of bfloat16 numbers first, most of a small adapter would be rounded away."""
    model = adapted("qwen2", torch.float32).model
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.mul_(1e-3)
        elif "lora_A" not in name:
            parameter.copy_(parameter.bfloat16())
    layer = Backbone(model).layers[1]
    exact = torch.cat([matrix.current() - matrix.weight for matrix in layer.gate_up])
    weights = _apart(layer, torch.bfloat16)
    assert torch.equal(torch.cat(weights.gate_up).float(), torch.cat([matrix.weight for matrix in layer.gate_up]))
    assert weights.thin.gate_up is not None
    found = weights.thin.gate_up.b.float() @ weights.thin.gate_up.a.float()
    assert float((found - exact).norm()) < 0.01 * float(exact.norm())
    merged = torch.cat([(matrix.current().bfloat16().float() - matrix.weight) for matrix in layer.gate_up])
    assert float((merged - exact).norm()) > 0.5 * float(exact.norm())


def little(family: str, rate: float = 2e-4) -> Adapter:
    """A base of bfloat16 numbers under an adapter that changes outputs by less than their last digit."""
    adapter = adapted(family, torch.float32)
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in adapter.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw).sign() * rate)
            elif "lora_A" not in name:
                parameter.copy_(parameter.bfloat16())
    return adapter


def share(found: Tensor, of: Tensor) -> float:
    """The projection of a change on the one that it should be."""
    return float((found * of).sum() / of.square().sum())


@families
@torch.no_grad()
def test_what_an_adapter_adds_is_rounded_together_with_what_it_is_added_to(family: str) -> None:
    layer = Backbone(little(family).model).layers[1]
    x = torch.randn(4096, layer.qkv[0].weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = torch.cat([x.float() @ (matrix.current() - matrix.weight).T for matrix in layer.qkv], dim=1)
    weights = _apart(layer, torch.bfloat16)
    base = project(x, weights.qkv, weights.qkv_bias)
    with_it = project(x, weights.qkv, weights.qkv_bias, thin=weights.thin.qkv)
    assert share((with_it - base).float(), exact) == pytest.approx(1, abs=0.05)
    assert weights.thin.qkv is not None
    after = base + weights.thin.qkv.outputs(x)  # as peft's modules and most engines add it
    assert share((after - base).float(), exact) < 0.6


@pytest.mark.parametrize("way", ["kernels", "torch"])
@families
@torch.no_grad()
def test_decoding_in_half_width_has_all_of_a_little_adapter(way: str, family: str) -> None:
    if way == "kernels" and library() is None:
        pytest.skip("no C++ compiler, so there are no kernels: sudo apt-get install g++")
    adapter, rows = little(family), 512
    draw = torch.Generator().manual_seed(2)
    prompts = torch.randint(0, 64, (rows, 4), generator=draw).tolist()

    def logits(dtype: torch.dtype) -> list[Tensor]:
        backbone = backbone_of(adapter.model)
        assert backbone is not None
        operations = decoding.operations if way == "kernels" else lambda *_: ops_torch
        with patch.object(decoding, "operations", operations):
            room = {"slots": rows, "prompt_slots": rows, "prompt_tokens": 4, "completion_tokens": 2}
            decoder = LayerDecoder(backbone, adapter.model.get_output_embeddings().weight, dtype, **room)
            first = decoder.prefill(prompts, list(range(rows)))
            places = torch.tensor([[row, 0, row, 4] for row in range(rows)])
            step = decoder.step(torch.full((rows,), 7), torch.full((rows,), 4), places)
        return [one.float() for one in (first, step)]

    changes = {}
    for dtype in (torch.float32, torch.bfloat16):
        with adapter.off():
            before = logits(dtype)
        changes[dtype] = [new - old for new, old in zip(logits(dtype), before, strict=True)]
    for found, exact in zip(changes[torch.bfloat16], changes[torch.float32], strict=True):
        assert share(found, exact) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("family", gate(FAMILIES, "qwen3"))
def test_training_in_half_width_has_all_of_a_little_adapter(family: str) -> None:
    adapter = little(family, rate=4e-4)
    rows = torch.randint(0, 64, (86, 63), generator=torch.Generator().manual_seed(3))
    changes = []
    for kind in ("float32", "bfloat16"):
        with torch.no_grad(), compute_context(torch.device("cpu"), kind):
            with adapter.off():
                before = torch.cat([row_logprobs(adapter.model, row) for row in rows])
            changes.append(torch.cat([row_logprobs(adapter.model, row) for row in rows]) - before)
    assert share(changes[1], changes[0]) == pytest.approx(1, abs=0.2)
