"""How is a model computed in float64 throughout, to compare gradients beyond rounding?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64 throughout; its own norms would round to float32 in between, whatever the weights are."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model.double()
