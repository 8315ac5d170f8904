"""Adapters beside the matrices of transformers' modules: how they are computed, switched off, and put into a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from oncurve.algorithm.precision import HALF, arithmetic_type, use_key
from oncurve.model.lora_linear import ADAPTER
from oncurve.model.lora_weights import AnotherModel, LoraWeights


class FusedSum:
    """The pass through a linear layer with an adapter. In half width both are one sum, which is rounded once.

    peft adds the adapter's output to a rounded one, where nearly all of a small adapter is lost: W x has 8 bits.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output."""
        layer = self.layer
        kind = arithmetic_type(x.device, x.dtype)
        if kind not in HALF or args or kwargs or layer.disable_adapters or not _is_plain(layer):
            return type(layer).forward(layer, x, *args, **kwargs)
        flat = x.reshape(-1, x.shape[-1]).to(kind)
        a, b = (part[ADAPTER].weight.to(kind) for part in (layer.lora_A, layer.lora_B))
        thin = nn.functional.linear(nn.functional.linear(layer.lora_dropout[ADAPTER](flat), a), b)
        base = layer.base_layer
        matrix = base.weight if layer.fan_in_fan_out else base.weight.T
        out = torch.addmm(thin * layer.scaling[ADAPTER], flat, matrix.to(kind))
        return (out if base.bias is None else out + base.bias.to(kind)).unflatten(0, x.shape[:-1])


def sum_at_once(model: nn.Module) -> None:
    """Let the adapters in a model be computed so."""
    for part in model.modules():
        kind = type(part)
        if (kind.__module__, kind.__name__) == ("peft.tuners.lora.layer", "Linear"):
            part.forward = FusedSum(part)


def _is_plain(layer: Any) -> bool:
    """One adapter of two matrices, beside a matrix that is here as a whole and in full width or half."""
    weight = layer.base_layer.weight
    return (
        type(layer.base_layer) in (nn.Linear, Conv1D)
        and list(layer.lora_A) == [ADAPTER]
        and list(layer.active_adapters) == [ADAPTER]
        and not (layer.merged or layer.lora_variant)
        and layer.lora_B[ADAPTER].bias is None
        and weight.dim() == 2
        and weight.is_floating_point()
        and not isinstance(weight, DTensor)
    )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """While it lasts, a model computes with its base weights alone; what is trained stays what it is."""
    if not _has_adapter(model):  # peft takes seconds to import
        yield
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    parts = [part for part in model.modules() if isinstance(part, BaseTunerLayer) and not part.disable_adapters]
    try:
        for part in parts:
            part._disable_adapters = True
        yield
    finally:
        for part in parts:
            part._disable_adapters = False


@torch.no_grad()
def put_adapter(model: nn.Module, thin: LoraWeights) -> None:
    """Put an adapter beside the matrices of a model that only computes, in the place of one that it has."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    remove_adapter(model)
    for name, (a, b) in thin.pairs.items():
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        base: Any = model.get_submodule(name.removesuffix(".weight"))
        config = LoraConfig(
            r=len(a), lora_alpha=len(a), fan_in_fan_out=isinstance(base, Conv1D), init_lora_weights=False
        )
        layer: Any = Linear(base, ADAPTER, config=config, r=len(a), lora_alpha=len(a))
        layer.scaling[ADAPTER] = thin.scales[name]
        for part, matrix, key in zip(
            (layer.lora_A, layer.lora_B), (a, b), thin.keys.get(name, (None, None)), strict=True
        ):
            part[ADAPTER].weight = nn.Parameter(matrix.to(base.weight.device, torch.float32), requires_grad=False)
            use_key(part[ADAPTER], key)
        setattr(model.get_submodule(parent), last, layer.eval())
    sum_at_once(model)


def remove_adapter(model: nn.Module) -> None:
    """Leave the base alone, as it was before ``put_adapter``."""
    if not _has_adapter(model):
        return
    from peft.tuners.lora import Linear

    for name, part in [(name, part) for name, part in model.named_modules() if isinstance(part, Linear)]:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, part.base_layer)


def _has_adapter(model: nn.Module) -> bool:
    return any("lora_A." in name for name, _ in model.named_parameters())


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model's base, under the names that they have without an adapter."""
    return {
        name.replace(".base_layer.", "."): weight
        for name, weight in model.state_dict().items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def check_shapes(model: nn.Module, thin: LoraWeights) -> None:
    """Raises AnotherModel for an adapter that does not fit beside the matrices of this model."""
    own = dict(base_state(model))
    parts = {name.replace(".base_layer", ""): part for name, part in model.named_modules()}
    for name, (a, b) in thin.pairs.items():
        part, weight = parts.get(name.removesuffix(".weight")), own.get(name)
        if not isinstance(part, (nn.Linear, Conv1D)) or weight is None:
            raise AnotherModel(f"its {name} is no linear layer, beside which the adapter belongs")
        shape = (a.shape[1], b.shape[0]) if isinstance(part, Conv1D) else (b.shape[0], a.shape[1])
        if tuple(weight.shape) != shape:
            raise AnotherModel(f"{name} has the shape {tuple(weight.shape)}, and its adapter {shape}")
