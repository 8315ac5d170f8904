"""AdamW over the trained weights, whole or in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from oncurve.errors import ConfigError
from oncurve.settings import OptimizerSettings


def make_adamw(trained: Sequence[Sequence[nn.Parameter]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW over the trained weights, its moments in the weights' type or in 8 bits; groups are computed with apart.

    Raises ConfigError where 8 bits are asked for and bitsandbytes is not installed.
    """
    groups = [{"params": list(group)} for group in trained]
    common = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon}
    if settings.type == "adamw":
        return torch.optim.AdamW(groups, **common, weight_decay=settings.weight_decay, fused=True)
    try:
        from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "optimizer.type is adamw_8bit, which needs bitsandbytes, and it is not installed. "
            "Run `pip install bitsandbytes`, or set optimizer.type to adamw"
        ) from None
    return AdamW8bit(groups, **common, weight_decay=settings.weight_decay)
