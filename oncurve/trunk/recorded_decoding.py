"""How does a GPU decode without waiting for Python? The tables of a step have few shapes, and each is recorded once.

A decode step of a small batch is hundreds of kernels of some microseconds, which Python starts more slowly than they
run. A CUDA graph starts all of them at once; it repeats the same work on the same memory, so that whatever changes
from step to step lies in one buffer of integers. Which rows there are and what they read is told by numbers, never by
shapes: every slot up to ``span`` is computed, and masks hide what it must not see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oncurve.trunk.caches import BLOCK, LayerCache
from oncurve.trunk.ops import Ops
from oncurve.trunk.torch_decoding import Groups, TorchLayers, Turn
from oncurve.trunk.training import Angles
from oncurve.trunk.weights import LayerWeights, Trunk

SPARE_BYTES = 2**30
"""With less free memory on a device, what others hold without need is given back before a step is recorded."""


class Shape(NamedTuple):
    """All that kernels of a step depend on besides numbers."""

    span: int
    """Slots that are computed."""
    seen: int
    """Own positions that are read."""
    readers: int
    """Slots that may read one prompt: G."""
    prompts: int
    """Prompt slots that are read: P."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A step of one shape."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    """Read by every repetition; see ``write_numbers``."""
    out: Tensor
    """Written by every repetition [span, H]."""

    def repeat(self, numbers: Tensor) -> Tensor:
        """The step with other numbers; what it gives holds until the next one."""
        self.numbers.copy_(numbers)
        self.graph.replay()
        return self.out


class Recorder:
    """The stream on which all steps of a device are recorded, and the memory that the recordings share.

    Memory belongs to a stream, so there is one; and it is lost with the last recording in it, so one is kept.
    """

    def __init__(self) -> None:
        """On the current device."""
        self.stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        number = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self._kept, self._number = self.record(lambda: number + 1)

    def record(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """What a function does on the device, and what it gives; the stream must be the current one."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            out = step()
        finally:
            graph.capture_end()
        return graph, out


@cache
def recorder(device: int) -> Recorder:
    """That of a device, which must be the current one."""
    return Recorder()


class RecordedLayers(TorchLayers):
    """All layers for one token per row on a GPU.

    On a CPU, or with ``records`` off, the same step runs operation by operation.
    """

    reads_copies: ClassVar[bool] = False

    def __init__(
        self,
        trunk: Trunk,
        weights: Sequence[LayerWeights],
        ops: Ops,
        compute_type: torch.dtype,
        *,
        slots: int,
        records: bool = True,
    ) -> None:
        super().__init__(trunk, weights, ops, compute_type, slots=slots)
        self.records = records and trunk.device.type == "cuda"
        self._table = (1, 1)
        """Prompts and readers of the table of the step before."""
        self._recordings: dict[Shape, Recording] = {}
        self._capacity = 0
        """Positions of the buffers that the recordings write to; larger ones lie elsewhere."""

    def __call__(
        self, tokens: Tensor, angles: Angles, positions: Tensor, places: Tensor, caches: Sequence[LayerCache]
    ) -> Tensor:
        """See ``TorchLayers``; tokens, positions and places are read on the CPU."""
        rows, capacity = places.numpy(), caches[0].positions
        slots = rows[:, 0]
        seen = min(few_positions(int(rows[:, 1].max()) + 1), capacity)
        prompts, readers = self._fit_table(rows[:, 2], len(caches[0].prompt_keys))
        shape = Shape(self.span(int(slots.max()) + 1), seen, readers, prompts)
        width = caches[0].prompt_keys.shape[2]
        numbers = torch.from_numpy(write_numbers(shape, tokens.numpy(), positions.numpy(), rows, width=width))
        out = self._repeat(shape, numbers.to(self.trunk.device), angles, caches, capacity)
        return out.index_select(0, torch.from_numpy(np.ascontiguousarray(slots)).to(out.device))

    def _fit_table(self, prompts: np.ndarray, most: int) -> tuple[int, int]:
        """Prompts and readers of a table that holds all rows: that of the step before, unless it is much too large."""
        counts = np.bincount(prompts)
        needed = (min(_power(len(counts)), most), _power(int(counts.max())))
        joined = (max(needed[0], self._table[0]), max(needed[1], self._table[1]))
        self._table = joined if joined[0] * joined[1] <= 4 * self.slots else needed
        return self._table

    def _repeat(
        self, shape: Shape, numbers: Tensor, angles: Angles, caches: Sequence[LayerCache], capacity: int
    ) -> Tensor:
        if not self.records:
            return self.step(shape, numbers, angles, caches)
        if capacity != self._capacity:
            self._recordings.clear()
            self._capacity = capacity
        with torch.cuda.device(self.trunk.device):
            if shape not in self._recordings:
                self._recordings[shape] = self._record(shape, numbers, angles, caches)
            return self._recordings[shape].repeat(numbers)

    def _record(self, shape: Shape, numbers: Tensor, angles: Angles, caches: Sequence[LayerCache]) -> Recording:
        """Run the step once beside, so that libraries make what they need, then record it."""
        if torch.cuda.mem_get_info()[0] < SPARE_BYTES:
            torch.cuda.empty_cache()  # while a step is recorded, nothing that others left is given back
        kept, now, beside = numbers.clone(), torch.cuda.current_stream(), recorder(torch.cuda.current_device())
        beside.stream.wait_stream(now)
        with torch.cuda.stream(beside.stream):
            self.step(shape, kept, angles, caches)
            graph, out = beside.record(lambda: self.step(shape, kept, angles, caches))
        now.wait_stream(beside.stream)
        return Recording(graph, kept, out)

    def step(self, shape: Shape, numbers: Tensor, angles: Angles, caches: Sequence[LayerCache]) -> Tensor:
        """The normed output of the last layer of all slots up to the span [span, H], also of those without a row.

        Nothing is read back from the device.
        """
        span, seen, readers, prompts = shape
        by_slot, table, read = numbers.split([4 * span, prompts * readers, prompts])
        tokens, positions, past, back = by_slot.view(4, span)
        width = caches[0].prompt_keys.shape[2]
        kv_heads, queries = self.sizes.kv_heads, self.sizes.heads // self.sizes.kv_heads
        turn = Turn(
            span,
            None,
            (torch.arange(span, device=numbers.device), past),
            seen,
            Groups(table, back, prompts, width, self._hidden(read, width)),
            self._hidden(past + 1, seen),
            angles.turn().index_select(0, positions)[:, None].expand(-1, kv_heads, queries + 1, -1).contiguous(),
        )
        return self._compute(self.trunk.embed(tokens), turn, caches)

    def _hidden(self, counts: Tensor, width: int) -> Tensor:
        """-inf from a count of positions on, 0 before it [rows, 1, 1, width]."""
        shut = torch.arange(width, device=counts.device) >= counts[:, None]
        dtype = self.compute_type if counts.is_cuda else self.wide
        return torch.zeros(shut.shape, dtype=dtype, device=counts.device).masked_fill_(shut, -torch.inf)[:, None, None]


def write_numbers(
    shape: Shape, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, *, width: int
) -> np.ndarray:
    """One run of integers: for each slot its token, position, past tokens and place in the table [4, span]; for each
    prompt slot its readers' slots [P, G], filled up with slot 0; for each prompt slot its tokens [P].

    ``rows`` holds what ``Decoder.step`` is told of each row. A slot without a row writes where its next row begins. A
    prompt that nobody reads counts as ``width`` tokens long: a softmax over nothing would not be a number.
    """
    slots, past, prompts, lengths = rows.T
    by_slot = np.zeros((4, shape.span), dtype=np.int64)
    table, read = np.zeros((shape.prompts, shape.readers), dtype=np.int64), np.full(shape.prompts, width)
    by_slot[0, slots], by_slot[1, slots], by_slot[2, slots] = tokens, positions, past
    read[prompts] = lengths
    order = np.argsort(prompts, kind="stable")
    sizes = np.bincount(prompts, minlength=shape.prompts)
    ordered = prompts[order]
    rank = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[ordered]
    table[ordered, rank] = slots[order]
    by_slot[3, slots[order]] = ordered * shape.readers + rank
    return np.concatenate([by_slot.ravel(), table.ravel(), read])


def few_positions(positions: int) -> int:
    """Positions, rounded up to whole blocks so that two numbers occur between a power of two and the next."""
    step = max(BLOCK, 1 << max((positions - 1).bit_length() - 2, 0))
    return -(-positions // step) * step


def _power(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (count - 1).bit_length()
