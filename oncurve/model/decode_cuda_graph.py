"""A decode step in few shapes, each of which a GPU records once and then repeats without waiting for Python.

Which rows there are and what they read is told by numbers, never by shapes: every slot up to ``span`` is computed, and
masks hide what it must not see. The newest token of each row stays on the device, so that a step may start before
Python knows what the one before has drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oncurve.model.caches import LayerCache
from oncurve.model.decode_memory import BLOCK, NEWEST
from oncurve.model.decode_torch import PrefixGroups, StepInputs, TorchLayers
from oncurve.model.forward_backward import Angles
from oncurve.model.ops_native import Ops
from oncurve.model.recordings import Recordings
from oncurve.model.weights import Backbone, LayerWeights

Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes hidden states [span, H] and a uniform number each; gives tokens and their log-probabilities."""


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
class RecordingPlan:
    """The sizes with which a step of some rows is recorded."""

    shape: Any
    """The argument of ``step``: a tuple that begins with the number of rows that are computed, span."""
    numbers: np.ndarray
    span: int
    at: np.ndarray
    """Index of each row [R] among those that are computed."""


class DeviceDraw:
    """Tokens on their way from the device."""

    def __init__(self, both: Tensor, at: np.ndarray) -> None:
        """``both`` holds tokens and log-probabilities [2, span] of float64 numbers, until the next step."""
        self._at, self._event = at, None
        if not both.is_cuda:
            self._both = both.clone()
            return
        self._both = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
        self._both.copy_(both, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def get(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities of the rows [R], as soon as they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        tokens, logprobs = self._both.numpy()[:, self._at]
        return tokens.astype(np.int64), logprobs.astype(np.float32)


class RecordedLayers(TorchLayers):
    """All layers for one token per row on a GPU.

    On a CPU, or with ``records`` off, the same step runs operation by operation.
    """

    draws: ClassVar[bool] = True

    def __init__(
        self,
        backbone: Backbone,
        weights: Sequence[LayerWeights],
        ops: Ops,
        compute_type: torch.dtype,
        *,
        slots: int,
        records: bool = True,
    ) -> None:
        super().__init__(backbone, weights, ops, compute_type, slots=slots)
        self.recordings = Recordings(backbone.device, records=records)
        self._table = (1, 1)
        """Prompts and readers of the table of the step before."""
        self._newest = torch.zeros(slots, dtype=torch.int64, device=backbone.device)
        self._capacity = 0
        """Positions of the buffers that the recordings write to; larger ones lie elsewhere."""

    def __call__(
        self, tokens: Tensor, angles: Angles, positions: Tensor, addresses: Tensor, caches: Sequence[LayerCache]
    ) -> Tensor:
        """See ``TorchLayers``; tokens, positions and addresses are read on the CPU."""
        plan = self.plan(tokens.numpy(), positions.numpy(), addresses.numpy(), caches)
        step = partial(self.step, plan.shape, angles=angles, caches=caches)
        out = self._run(plan.shape, plan.numbers, step, caches)
        return out.index_select(0, torch.from_numpy(plan.at).to(out.device))

    def draw(
        self,
        tokens: Tensor,
        angles: Angles,
        positions: Tensor,
        addresses: Tensor,
        caches: Sequence[LayerCache],
        *,
        uniform: np.ndarray,
        choose: Choose,
    ) -> DeviceDraw:
        """One more token per row and the token that follows it, by a uniform number of each [R].

        A token may be ``NEWEST``. ``choose`` is the same in all steps.
        """
        plan = self.plan(tokens.numpy(), positions.numpy(), addresses.numpy(), caches)
        numbers = np.full(plan.span, 0.5)
        numbers[plan.at] = uniform
        step = partial(self._drawn, plan, angles=angles, caches=caches, choose=choose)
        both = self._run(("draw", plan.shape), np.concatenate([plan.numbers, numbers.view(np.int64)]), step, caches)
        return DeviceDraw(both, plan.at)

    def plan(
        self, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, caches: Sequence[LayerCache]
    ) -> RecordingPlan:
        """The shape and the numbers of a step; ``rows`` holds what ``LayerDecoder.step`` is told of each row."""
        slots = np.ascontiguousarray(rows[:, 0])
        seen = min(few_positions(int(rows[:, 1].max()) + 1), caches[0].positions)
        prompts, readers = self._fit_table(rows[:, 2], len(caches[0].prompt_keys))
        shape = Shape(self.span(int(slots.max()) + 1), seen, readers, prompts)
        width = caches[0].prompt_keys.shape[2]
        return RecordingPlan(shape, write_numbers(shape, tokens, positions, rows, width=width), shape.span, slots)

    def _fit_table(self, prompts: np.ndarray, most: int) -> tuple[int, int]:
        """Prompts and readers of a table that holds all rows: that of the step before, unless it is much too large."""
        counts = np.bincount(prompts)
        needed = (min(power(len(counts)), most), power(int(counts.max())))
        joined = (max(needed[0], self._table[0]), max(needed[1], self._table[1]))
        self._table = joined if joined[0] * joined[1] <= 4 * self.slots else needed
        return self._table

    def _run(
        self, kind: Hashable, numbers: np.ndarray, step: Callable[[Tensor], Tensor], caches: Sequence[LayerCache]
    ) -> Tensor:
        if caches[0].positions != self._capacity:
            self.recordings.clear()
            self._capacity = caches[0].positions
        return self.recordings.run(kind, numbers, step)

    def _drawn(
        self, plan: RecordingPlan, numbers: Tensor, angles: Angles, caches: Sequence[LayerCache], choose: Choose
    ) -> Tensor:
        """The tokens that are drawn after a step, and their log-probabilities [2, span]."""
        known, uniform = numbers.split([len(numbers) - plan.span, plan.span])
        hidden = self.step(plan.shape, known, angles=angles, caches=caches)
        tokens, logprobs = choose(hidden, uniform.view(torch.float64))
        self._keep(known, tokens)
        return torch.stack([tokens.double(), logprobs.double()])

    def _keep(self, numbers: Tensor, tokens: Tensor) -> None:
        """Hold the newest tokens of all slots that were computed."""
        self._newest[: len(tokens)].copy_(tokens)

    def step(self, shape: Any, numbers: Tensor, *, angles: Angles, caches: Sequence[LayerCache]) -> Tensor:
        """The normed output of the last layer of all slots up to the span [span, H], also of those without a row.

        Nothing is read back from the device.
        """
        span, seen, readers, prompts = shape
        by_slot, table, read = numbers.split([4 * span, prompts * readers, prompts])
        tokens, positions, past, back = by_slot.view(4, span)
        width = caches[0].prompt_keys.shape[2]
        kv_heads, queries = self.sizes.kv_heads, self.sizes.heads // self.sizes.kv_heads
        turn = StepInputs(
            span,
            None,
            (torch.arange(span, device=numbers.device), past),
            seen,
            PrefixGroups(table, back, prompts, width, self._hidden(read, width)),
            self._hidden(past + 1, seen),
            angles.turn().index_select(0, positions)[:, None].expand(-1, kv_heads, queries + 1, -1).contiguous(),
        )
        residual = self._embedded(tokens, self._newest[:span])
        return self._compute(residual, partial(self._mixed, turn=turn), caches)

    def _embedded(self, tokens: Tensor, newest: Tensor) -> Tensor:
        """The embeddings of tokens, or of the newest where these are asked for [span, H]."""
        return self.backbone.embed(torch.where(tokens == NEWEST, newest, tokens))

    def _norm_weight(self, weight: Tensor) -> Tensor:
        return weight.to(self.wide)

    def _add_norm(self, residual: Tensor, added: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum x, written over the residual, and its norm, which a GPU computes in one kernel."""
        total = residual if added is None else residual.add_(added)
        return total, torch.nn.functional.rms_norm(total, weight.shape, weight, self.sizes.epsilon)

    def _hidden(self, counts: Tensor, width: int) -> Tensor:
        """-inf from a count of positions on, 0 before it [rows, 1, 1, width]."""
        shut = torch.arange(width, device=counts.device) >= counts[:, None]
        dtype = self.compute_type if counts.is_cuda else self.wide
        return torch.zeros(shut.shape, dtype=dtype, device=counts.device).masked_fill_(shut, -torch.inf)[:, None, None]


def write_numbers(
    shape: Shape, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, *, width: int
) -> np.ndarray:
    """One run of integers: for each slot its token, position, past tokens and index in the table [4, span]; for each
    prompt slot its readers' slots [P, G], filled up with slot 0; for each prompt slot its tokens [P].

    ``rows`` holds what ``LayerDecoder.step`` is told of each row. A slot without a row writes where its next row
    begins. A prompt that nobody reads counts as ``width`` tokens long: a softmax over nothing would not be a number.
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


def power(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (count - 1).bit_length()
