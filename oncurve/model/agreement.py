"""Agreement of a fast way to compute something with the plain way: judged by what rounding does to the plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Distance = Callable[[Tensor, Tensor], float]
KERNEL_FAILURES = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
"""Errors of a kernel that cannot do what it is asked for."""


@dataclass(frozen=True)
class Agreement:
    """Two distances from the exact result: that of the fast way, and that of the plain way in the same type."""

    name: str
    """Name of the computed quantity."""
    error: float
    rounding: float
    allowed: float

    @property
    def holds(self) -> bool:
        """The fast way is not further away than rounding explains; nan never is near."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.name} that differ by {self.error:.2g} from the exact ones, those of the plain way by "
            f"{self.rounding:.2g} (at most {self.allowed:.2g} is rounding)"
        )


def agreement(
    name: str, fast: Tensor, plain: Tensor, exact: Tensor, *, times: float, floor: float, distance: Distance
) -> Agreement:
    """Whether the fast way is as near to the exact result as ``times`` the plain one is, or nearer than the floor."""
    error, rounding = (distance(actual.double(), exact.double()) for actual in (fast, plain))
    return Agreement(name, error, rounding, max(floor, times * rounding))


def of_size(actual: Tensor, exact: Tensor) -> float:
    """|a - b| / |b|, as a part of the size of the whole."""
    return float((actual - exact).norm() / exact.norm())


def largest(actual: Tensor, exact: Tensor) -> float:
    """The largest difference of a number."""
    return float((actual - exact).abs().max())


def mean(actual: Tensor, exact: Tensor) -> float:
    """The mean difference."""
    return float((actual - exact).abs().mean())


def worst_step(actual: Tensor, exact: Tensor) -> float:
    """The mean difference over rows [R, T] of the step where it is largest."""
    return float((actual - exact).abs().mean(dim=0).max())
