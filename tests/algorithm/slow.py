"""Slow references: the formulas of the papers as loops over plain numbers, in float64, without a tensor operation."""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = Sequence[float]
Table = Sequence[Row]


def mean(values: Row) -> float:
    return sum(values) / len(values)


def deviation(values: Row, ddof: int) -> float:
    centre = mean(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - ddof))


def graded_only(row: Sequence[float | None]) -> list[float]:
    return [value for value in row if value is not None]


def flat(row: Sequence[float | None]) -> bool:
    """A group without signal: fewer than two rewards, or rewards that are all the same."""
    values = graded_only(row)
    return len(values) < 2 or max(values) - min(values) < 1e-6


def group_relative(
    table: Sequence[Sequence[float | None]], *, scale_by_std: bool, ddof: int, epsilon: float
) -> list[list[float]]:
    result = []
    for row in table:
        values = graded_only(row)
        if flat(row):
            result.append([0.0] * len(row))
            continue
        divisor = deviation(values, ddof) + epsilon if scale_by_std else 1.0
        result.append([0.0 if value is None else (value - mean(values)) / divisor for value in row])
    return result


def ratio(logprob: float, old: float) -> float:
    return math.exp(logprob - old)


def clipped(logprob: float, old: float, advantage: float, low: float, high: float) -> float:
    w = ratio(logprob, old)
    bounded = min(max(w, 1 - low), 1 + high)
    return -min(w * advantage, bounded * advantage)


def sequence_mean(loss: Table, mask: Sequence[Sequence[bool]], num_rows: int) -> float:
    total = 0.0
    for losses, kept in zip(loss, mask, strict=True):
        counted = [value for value, keep in zip(losses, kept, strict=True) if keep]
        total += mean(counted) if counted else 0.0
    return total / num_rows


def token_sum(loss: Table, mask: Sequence[Sequence[bool]]) -> float:
    return sum(
        value for losses, kept in zip(loss, mask, strict=True) for value, keep in zip(losses, kept, strict=True) if keep
    )
