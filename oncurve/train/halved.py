"""Which matrices take half the memory, and nothing that is computed under autocast changes?"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from oncurve.products import HALF
from oncurve.trunk.matrices import linear_layers

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def halve_frozen_matrices(model: nn.Module) -> None:
    """Keep the frozen matrices of linear layers in bfloat16 where not one number of them is rounded by it.

    Most checkpoints are in bfloat16, and autocast rounds matrices at each use: what it computes is the same.
    Without autocast such a layer takes no float32 input; see ``widened``.
    """
    for part in linear_layers(model):
        if not part.weight.requires_grad:
            half = part.weight.bfloat16()
            if torch.equal(half.to(part.weight.dtype), part.weight):
                part.weight.data = half


def frozen_copy(model: M, device: torch.device, *, halved: bool) -> M:
    """A copy of a model on a device, which is not trained.

    ``halved`` keeps the matrices of its linear layers in bfloat16, to which autocast would round them at each use.
    """
    linear = {id(part.weight) for part in linear_layers(model)} if halved else set()
    known: dict[int, object] = {}
    for weight in model.parameters():  # one at a time: nothing is there twice in full width
        dtype = torch.bfloat16 if id(weight) in linear else weight.dtype
        copied = weight.detach().to(device, dtype, copy=True)
        known[id(weight)] = nn.Parameter(copied, requires_grad=False)
    return copy.deepcopy(model, known).to(device)  # pyright: ignore[reportReturnType]


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
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
