"""Dynamic loss scaling, which keeps small gradients in float16 from becoming zero (arXiv:1710.03740)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

GROWTH_UPDATES = 200
"""Updates in a row with finite gradients after which the scale is doubled."""


class LossScale:
    """The factor of the loss: halved after an update whose gradient was not finite, doubled when that is long ago."""

    def __init__(self, value: float = 2.0**12) -> None:
        self.value = value
        self.num_finite = 0
        """Updates in a row with finite gradients."""

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the factor that they have from the loss."""
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        with torch.no_grad():
            for gradient in gradients:
                gradient.div_(self.value)

    def adapt(self, *, is_finite: bool) -> bool:
        """Choose the next factor; whether the last one is to blame for a gradient that was not finite."""
        if is_finite:
            self.num_finite += 1
            if self.num_finite >= GROWTH_UPDATES:
                self.value, self.num_finite = self.value * 2, 0
            return False
        was_scaled, self.num_finite = self.value > 1, 0
        self.value = max(self.value / 2, 1.0)
        return was_scaled
