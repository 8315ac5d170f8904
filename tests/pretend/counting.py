"""What work does the pretend GPU get? Launches, waits of the host, allocations and peaks, of any part of a program."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch

OPS = torch.ops.pretend_gpu


class Counts:
    """What was counted between the begin and the end of ``counting``, by kind and by the name of what it was."""

    def __init__(self) -> None:
        self.launches: dict[str, int] = {}
        """Operations that start a kernel; views and what is repeated from a graph are none."""
        self.launches_in_graphs: dict[str, int] = {}
        """Operations that graphs repeated."""
        self.graph_launches = 0
        self.synchronizations: dict[str, int] = {}
        """Times that the host waited for the device, by why it did."""
        self.allocations = 0
        self.peak_bytes = 0

    def read(self, text: str) -> None:
        """Take over what the device counted."""
        found = json.loads(text)
        self.launches = found.get("launches", {})
        self.launches_in_graphs = found.get("launches_in_graphs", {})
        self.graph_launches = sum(found.get("graph_launches", {}).values())
        self.synchronizations = found.get("synchronizations", {})
        self.allocations = sum(found.get("allocations", {}).values())
        self.peak_bytes = found["peak_bytes"]

    @property
    def num_launches(self) -> int:
        """All that the host started by itself, a graph being one."""
        return sum(self.launches.values()) + self.graph_launches

    @property
    def num_kernels(self) -> int:
        """All that the device ran."""
        return sum(self.launches.values()) + sum(self.launches_in_graphs.values())

    @property
    def num_synchronizations(self) -> int:
        """All waits."""
        return sum(self.synchronizations.values())


@contextmanager
def counting() -> Iterator[Counts]:
    """Count all that the device gets meanwhile, from every thread; figures are there at the end."""
    counts, number = Counts(), OPS.open_count()
    try:
        yield counts
    finally:
        counts.read(OPS.read_count(number))
        OPS.close_count(number)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """A part of a program that failures can be asked for by name; see ``device.fail_at``."""
    OPS.enter_scope(name)
    try:
        yield
    finally:
        OPS.leave_scope()
