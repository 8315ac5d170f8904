"""The metrics of a run by key: what a page and the doctor read of a file of any length."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

from oncurve.observe.record import iterate_metrics

LARGEST = 1e100
"""Largest finite value; sums and squares of larger ones would overflow."""


class Columns:
    """The metrics of a run, eight bytes each; rows of one step are merged, later values over earlier ones.

    What has no whole number as its step is left out.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        indices: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}
        self._broken: dict[str, set[int]] = {}
        for row in rows:
            step = row.get("step")
            if type(step) is int:
                index = indices.setdefault(step, len(indices))
                for key, value in row.items():
                    column = self._columns.get(key)
                    if column is not None and len(column) == index and type(value) is float and abs(value) <= LARGEST:
                        column.append(value)  # the usual case, in a file of millions of values
                    elif key != "step":
                        self._put(key, index, step, value)
        self.steps = sorted(indices)
        """All steps, in their order."""
        if self.steps != list(indices):
            order = [indices[step] for step in self.steps]
            for key, column in self._columns.items():
                column.extend([math.nan] * (len(order) - len(column)))
                self._columns[key] = array("d", [column[index] for index in order])

    def _put(self, key: str, index: int, step: int, value: Any) -> None:
        is_number = isinstance(value, (float, int)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
        if not is_number:
            self._broken.setdefault(key, set()).add(step)
        elif key in self._broken:
            self._broken[key].discard(step)
        column = self._columns.setdefault(key, array("d"))
        if index >= len(column):
            column.extend([math.nan] * (index + 1 - len(column)))
        column[index] = value if is_number else math.nan

    @property
    def keys(self) -> list[str]:
        """The keys of all metrics, as they came."""
        return list(self._columns)

    def finite(self, key: str) -> tuple[list[int], list[float]]:
        """The steps with a finite value of a metric, in their order, and these values."""
        column = self._columns.get(key, ())
        is_finite = [value == value for value in column]
        return list(compress(self.steps, is_finite)), list(compress(column, is_finite))

    def broken(self, key: str) -> list[int]:
        """The steps in which a metric is there and not finite."""
        return sorted(self._broken.get(key, ()))

    def measured(self, key: str) -> list[int]:
        """The steps in which a metric is there, finite or not."""
        return sorted({*self.finite(key)[0], *self._broken.get(key, ())})

    def values(self, key: str) -> list[float]:
        """The finite values of a metric, in the order of the steps."""
        return self.finite(key)[1]

    def total(self, key: str) -> float:
        """Their sum; 0 where there are none."""
        return sum(self.values(key))

    def elapsed_seconds(self) -> float:
        """Wall time up to the last row. The clock starts anew when a run is resumed, so that its falls are added up."""
        clock = self.values("time/elapsed_seconds")
        return sum(before for before, after in pairwise(clock) if after < before) + (clock[-1] if clock else 0.0)


def read_columns(path: str | Path) -> Columns:
    """The metrics of a run's folder, or of its ``metrics.jsonl``, read line by line. A torn last line is dropped.

    Raises DataError for a missing file, a broken line elsewhere, or a row without a step.
    """
    return Columns(iterate_metrics(path))
