"""Statistics that are not means, and how they add up over microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oncurve.records import Mean


@dataclass(frozen=True, slots=True)
class Largest(Mean):
    """A maximum: adding two keeps the larger.

    >>> (Largest.of(1.5) + Largest.of(0.5)).value
    1.5
    """

    @classmethod
    def of(cls, value: float) -> Largest:
        """The maximum of one value."""
        return cls(value, 1.0)

    def __add__(self, other: Mean) -> Largest:
        return Largest.of(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class EffectiveFraction(Mean):
    """The effective sample size of weights over their number, 1 when all weigh the same.

        (sum w)^2 / (n sum w^2)                       Kish 1965; ``total`` is sum w and ``count`` n

    >>> (EffectiveFraction(2.0, 2.0, 2.0) + EffectiveFraction(0.0, 2.0, 0.0)).value
    0.5
    """

    squares: float = 0.0
    """Sum of the squared weights."""

    def __add__(self, other: Mean) -> EffectiveFraction:
        if not isinstance(other, EffectiveFraction):
            raise TypeError("an effective fraction adds only to another one")
        return EffectiveFraction(self.total + other.total, self.count + other.count, self.squares + other.squares)

    @property
    def value(self) -> float:
        """The share of the weights that counts; NaN over nothing."""
        return self.total**2 / (self.count * self.squares) if self.count and self.squares else math.nan
