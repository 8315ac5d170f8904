"""16-bit storage of the matrices for which autocast computes the same."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from oncurve.algorithm.precision import narrow, weight_key
from oncurve.model.lora_linear import linear_layers

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def halve_frozen_matrices(model: nn.Module) -> None:
    """Keep the frozen matrices of linear layers in bfloat16 where not one number of them is rounded by it.

    Most checkpoints are in bfloat16, and autocast rounds matrices at each use: what it computes is the same.
    Without autocast such a layer takes no float32 input; see ``products.widened``.
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
    linear = {id(part.weight): weight_key(part) for part in linear_layers(model)} if halved else {}
    known: dict[int, object] = {}
    for weight in model.parameters():  # one at a time: nothing is there twice in full width
        dtype = torch.bfloat16 if id(weight) in linear else weight.dtype
        copied = narrow(weight.detach(), dtype, linear.get(id(weight))).to(device, copy=dtype == weight.dtype)
        known[id(weight)] = nn.Parameter(copied, requires_grad=False)
    return copy.deepcopy(model, known).to(device)  # pyright: ignore[reportReturnType]
