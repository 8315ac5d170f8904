"""Recordings of GPU work as CUDA graphs: what is asked for again is started at once, on other numbers.

A decode step of a small batch is hundreds of kernels of some microseconds, which Python starts more slowly than they
run. A CUDA graph starts all of them at once; it repeats the same work on the same memory, so that whatever changes
from step to step lies in one buffer of integers.

The memory that recorded work writes to belongs to the recordings of one sampling call, and is free again after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

SPARE_BYTES = 2**30
"""With less free memory on a device, what others hold without need is given back before work is recorded."""
Work = Callable[[Tensor], Tensor]
"""Takes a buffer of integers on the device; reads nothing back from it."""


@dataclass(frozen=True, eq=False)
class Recording:
    """Recorded work."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    """Read by every repetition."""
    out: Tensor
    """Written by every repetition."""

    def repeat(self, numbers: Tensor) -> Tensor:
        """The work on other numbers; what it gives holds until the next time."""
        self.numbers.copy_(numbers, non_blocking=True)
        self.graph.replay()
        return self.out


class Recordings:
    """The recordings of one sampling call on a device."""

    def __init__(self, device: torch.device, *, records: bool) -> None:
        """Without ``records`` everything runs operation by operation, as on a CPU."""
        self.device = device
        self.records = records and device.type == "cuda"
        self.count = 0
        """Recordings that were made."""
        self._recordings: dict[Hashable, Recording] = {}
        self._pool: Any = None

    def run(self, kind: Hashable, numbers: np.ndarray, work: Work) -> Tensor:
        """The work on these numbers; ``kind`` says all that it depends on besides them.

        The first time it runs operation by operation, and is recorded after that.
        """
        sent = pinned(torch.from_numpy(numbers), self.device)
        if not self.records:
            return work(sent.to(self.device, non_blocking=True))
        with torch.cuda.device(self.device):
            if kind in self._recordings:
                return self._recordings[kind].repeat(sent)
            return self._record(kind, sent.to(self.device, non_blocking=True), work)

    def clear(self) -> None:
        """Forget all recordings, whose memory is free from then on."""
        self._recordings.clear()
        self._pool = None  # a pool that nothing uses any more takes no new recordings

    def _record(self, kind: Hashable, numbers: Tensor, work: Work) -> Tensor:
        """Do the work, beside, where libraries make what they need for it, and record it.

        If that fails nothing is recorded any more, and no half of a recording is left.
        """
        if torch.cuda.mem_get_info()[0] < SPARE_BYTES:
            torch.cuda.empty_cache()  # while work is recorded, nothing that others left is given back
        now, beside = torch.cuda.current_stream(), _beside(torch.cuda.current_device())
        beside.wait_stream(now)
        done = None
        try:
            with torch.cuda.stream(beside):
                done = work(numbers)
                graph, out = self._captured(lambda: work(numbers))
            self._recordings[kind] = Recording(graph, numbers, out)
            self.count += 1
        except RuntimeError as error:  # of memory too
            self.records = False
            self.clear()
            _say_once(error)
        now.wait_stream(beside)
        return work(numbers) if done is None else done

    def _captured(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record what a function does on the device; the recording, and the function's result."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, is_whole = torch.cuda.CUDAGraph(), False
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            out = work()
            graph.capture_end()
            is_whole = True
        finally:
            if not is_whole:
                _break_off(graph, self._pool)
        return graph, out


_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Captures that CUDA broke off itself: torch's allocator of pinned memory still asks them."""


def _break_off(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture in which something failed, so that the stream and the memory serve others again."""
    try:
        graph.capture_end()
    except RuntimeError:  # it left the allocator as it is while work is captured
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        _BROKEN.append(graph)


@cache
def _beside(device: int) -> torch.cuda.Stream:
    """The stream on which all work of a device is recorded; memory belongs to a stream, so there is one."""
    return torch.cuda.Stream(device)


_REPORTED: set[str] = set()


def _say_once(error: RuntimeError) -> None:
    """Once for each kind of failure: every step of training samples anew."""
    kind = type(error).__name__
    if kind not in _REPORTED:
        _REPORTED.add(kind)
        message = (str(error).splitlines() or [""])[0]
        log.warning("decode steps run without CUDA graphs, slower: recording one raised %s: %s", kind, message)


def pinned(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the CPU where a device can read them while Python goes on."""
    return numbers.pin_memory() if device.type == "cuda" else numbers
