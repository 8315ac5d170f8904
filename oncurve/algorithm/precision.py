"""Matrix products of 16-bit inputs that are accumulated and returned in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that the safetensors format has for types."""
HALF = (torch.bfloat16, torch.float16)
_GIVES_SUMS = "dtype" in torch.ops.aten.mm.overloads()
"""This torch gives the float32 sums of half-width products as they are (2.8 and later)."""


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b in float32 or better [N, M], of a [N, K] and b [K, M] of one type; written into ``out`` if it is given.

    A GPU sums half-width products in float32 and gives them so; a CPU rounds them first.
    """
    if a.dtype not in HALF:
        return torch.mm(a, b, out=out)
    if a.is_cuda and _GIVES_SUMS:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float() if out is None else out.copy_(a @ b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their type [N, M], of a [N, K] and b [K, M]; see ``linear``."""
    return (a.float() @ b.float()).to(a.dtype) if is_slow(a) else a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in the type of x [N, M].

    A processor without instructions for bfloat16 takes such products in float32 and rounds what they give: the sums are
    the same, and torch's own products of that type are six times slower there.
    """
    if not is_slow(x):
        return nn.functional.linear(x, weight, bias)
    wide = None if bias is None else bias.float()
    return nn.functional.linear(x.float(), weight.float(), wide).to(x.dtype)


def is_slow(x: Tensor) -> bool:
    """Products of this type are slow on this processor, and better taken in float32."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not multiplies_bfloat16()


@cache
def multiplies_bfloat16() -> bool:
    """This processor has instructions with which torch multiplies bfloat16."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def head_type(device: torch.device, compute_type: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """In which type the head is multiplied, in training and in sampling.

    A GPU is ten times slower in float32, so it takes bfloat16 where everything else does. The gradients of logits
    would leave the range of float16.
    """
    return torch.bfloat16 if device.type == "cuda" and compute_type == torch.bfloat16 else wide


def arithmetic_type(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """The type of matrix products here and now: that of autocast where it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else otherwise


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """While it lasts, linear layers with half-width matrices multiply in the type of what they are given."""
    halved = [part for part in model.modules() if type(part) is nn.Linear and part.weight.dtype in HALF]
    for part in halved:
        part.forward = _Widened(part)
    try:
        yield
    finally:
        for part in halved:
            del part.forward


class _Widened:
    """The pass through a linear layer, its matrix in the type of the input for as long as it takes."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, input: Tensor) -> Tensor:
        bias = None if self.layer.bias is None else self.layer.bias.to(input.dtype)
        return nn.functional.linear(input, self.layer.weight.to(input.dtype), bias)
