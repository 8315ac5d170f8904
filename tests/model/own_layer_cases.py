"""Small models of the families that are computed here, and what transformers' modules make of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from oncurve.core.batch import Batch, Size
from oncurve.policy.forward import completion_logprobs

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


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


def ragged_batch() -> Batch:
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
