"""Do our own layers compute the hidden states and gradients of transformers' modules?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.batch import Batch, Size
from oncurve.train.forward import completion_logprobs
from oncurve.trunk.layout import make_layout, whole_tokens
from oncurve.trunk.weights import Trunk, supports, trunk_of

families = pytest.mark.parametrize("family", FAMILIES)


class ExactNorm(torch.nn.Module):
    """The root-mean-square norm in the type of its input; transformers' own computes in float32 whatever comes."""

    def __init__(self, weight: torch.nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


def make(family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    config, kind = FAMILIES[family]
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    if family == "qwen3":
        sizes["head_dim"] = 16
    model = kind(config(**(sizes | changes))).to(dtype).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # the same numbers in every type
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    if dtype == torch.float64:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(module, name, ExactNorm(child.weight, child.variance_epsilon))
    return model


@pytest.fixture
def batch() -> Batch:
    """Two groups of ragged rows, a completion of one token and a masked one among them."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 1, 7, 2, 6, 3])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    mask = torch.arange(7)[None] < lengths[:, None]
    mask[2, 3:] = False
    prompts = torch.randint(0, 64, (2, 4), generator=draw)[groups]
    return Batch(
        prompts,
        torch.tensor([4, 4, 4, 2, 2, 2]),
        torch.randint(0, 64, (6, 7), generator=draw),
        mask,
        lengths,
        groups,
        torch.linspace(-1, 1, 6),
        torch.zeros(6, 7),
        Size(6, int(mask.sum()), 2),
    )


def gradients(model: PreTrainedModel, batch: Batch, **how: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logprobs, entropy = completion_logprobs(model, batch, temperature=0.8, **how)
    weights = torch.linspace(-1, 2, batch.mask.numel(), dtype=logprobs.dtype).view(batch.mask.shape)
    ((logprobs - 0.3 * entropy) * weights).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n].double() - expected[n].double()).norm() / expected[n].double().norm()) for n in expected)


@families
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_float64_gradients_are_those_of_the_padded_model(
    family: str, tied: bool, recompute: bool, batch: Batch
) -> None:
    model = make(family, torch.float64, tie_word_embeddings=tied)
    assert supports(model)
    padded, expected = gradients(model, batch)
    packed, found = gradients(model, batch, packed=True, recompute=recompute)
    assert (padded - packed).abs().max() < 1e-10
    assert largest_error(found, expected) < 1e-10


@families
def test_float32_gradients_are_those_of_the_padded_model(family: str, batch: Batch) -> None:
    model = make(family)
    _, expected = gradients(model, batch)
    _, found = gradients(model, batch, packed=True)
    assert largest_error(found, expected) < 1e-5


@families
def test_bfloat16_gradients_are_as_near_to_float64_as_those_of_the_padded_model(family: str, batch: Batch) -> None:
    """The error of all gradients together, over several models: the error of one is as much chance as arithmetic."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(6):
        _, exact = gradients(make(family, torch.float64, seed=seed), batch)
        for packed in errors:
            with torch.autocast("cpu", torch.bfloat16):
                _, found = gradients(make(family, seed=seed), batch, packed=packed)
            square = sum(float((found[n].double() - exact[n]).square().sum()) for n in exact)
            errors[packed].append((square / sum(float(exact[n].square().sum()) for n in exact)) ** 0.5)
    assert sum(errors[True]) <= sum(errors[False])


def test_models_with_something_unknown_are_left_to_transformers() -> None:
    assert not supports(make("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0))
    assert not supports(make("llama", mlp_bias=True))
    assert not supports(make("llama", hidden_act="gelu"))
    assert not supports(make("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}))
    model = make("qwen2")
    assert trunk_of(model) is trunk_of(model)
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    assert trunk_of(model) is None


def test_rounded_matrices_follow_the_weights() -> None:
    model = make("qwen2")
    trunk = Trunk(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    again = trunk.weights(torch.bfloat16)
    assert torch.equal(again[0].output, model.model.layers[0].self_attn.o_proj.weight.bfloat16())
    assert trunk.weights(torch.float32)[0].output is model.model.layers[0].self_attn.o_proj.weight


def test_sequences_come_in_few_lengths_and_are_filled_up_by_little() -> None:
    filled = {tokens: whole_tokens(tokens) for tokens in range(1, 5000)}
    assert all(tokens <= whole < tokens + max(16, tokens / 15) for tokens, whole in filled.items())
    assert len(set(filled.values())) < 100


def test_a_row_that_fills_up_the_sequence_is_read_by_nobody(batch: Batch) -> None:
    layout = make_layout(batch, torch.device("cpu"))
    real = 4 + 2 + int((batch.completion_lengths - 1).sum())
    assert layout.ids.shape[1] == whole_tokens(real) > real
    assert int(layout.predicts.max()) < real
    assert all(prompt.stop <= real for prompt, _ in layout.readers)
