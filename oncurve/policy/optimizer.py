"""AdamW and its learning rate: with what the weights are moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from oncurve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule, which is a pure function of the number of the update."""

    type: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit keeps the two moments in 8 bits, through bitsandbytes: a quarter of their memory."""
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.99)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    """The gradient is scaled down to this norm; 0 leaves it alone."""
    warmup_updates: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_updates: int = 1

    def rate(self, update: int) -> float:
        """The learning rate of an update, counted from 0: warm-up, then the schedule down to zero."""
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / (self.warmup_updates + 1)
        if self.schedule == "constant":
            return self.learning_rate
        span = max(self.total_updates - self.warmup_updates, 1)
        done = min((update - self.warmup_updates) / span, 1.0)
        share = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * share


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
