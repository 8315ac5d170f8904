"""A decode step whose attention reads the tokens that exist and no others, by torch's own flash kernel.

The kernel takes runs of queries, and for each where its keys begin and how many there are: integers on the device. The
queries of a key head are one run over the row's own tokens; those of all rows of a group, one after another, a run over
their prompt. The two parts are weighted by their shares of the softmax.

Rows are computed in the order of their prompts, wherever their tokens lie. So the kernels of a step depend on the
number of rows alone, and rows need not be moved together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oncurve.algorithm.precision import HALF
from oncurve.model.caches import LayerCache
from oncurve.model.decode_cuda_graph import RecordedLayers, RecordingPlan, power
from oncurve.model.decode_torch import Layer
from oncurve.model.forward_backward import Angles
from oncurve.model.packing import HEAD_STEP, LARGEST_HEAD
from oncurve.model.stand_in import KERNEL_FAILURES
from oncurve.model.weights import AttentionSizes, LayerParameters, LayerWeights

log = logging.getLogger(__name__)

TOLERANCE = 0.03
"""Largest difference to attention in float32, of numbers around one: some roundings to bfloat16."""


@dataclass(frozen=True, eq=False)
class FlashRuns:
    """Which queries read which keys."""

    query_starts: Tensor
    """Start of each run, and the end of the last [N + 1]."""
    key_starts: Tensor
    """Start of each run, in any order; the last number is not read [N + 1]."""
    used: Tensor
    """Keys of each run [N]."""
    most_queries: int
    """No run has more."""
    most_keys: int


Kernel = Callable[[Tensor, Tensor, Tensor, FlashRuns], tuple[Tensor, Tensor]]
"""Takes q [M, heads, D], k and v [N, heads, D] and runs; gives what every query gathers [M, heads, D], and the
logarithms of its sums of exp(score) [heads, M]."""


def flash(q: Tensor, k: Tensor, v: Tensor, runs: FlashRuns) -> tuple[Tensor, Tensor]:
    """Torch's kernel; it needs a CUDA device."""
    out, logs, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, runs.query_starts, runs.key_starts, runs.most_queries, runs.most_keys, 0.0, False, False,
        seqused_k=runs.used,
    )  # fmt: skip
    return out, logs


class FlashShape(NamedTuple):
    """All that kernels of a step depend on besides numbers."""

    span: int
    """Rows that are computed."""
    readers: int
    """Rows that may read one prompt."""


@dataclass(frozen=True, eq=False)
class FlashTurn:
    """Inputs and buffers of one decode step, the same for every layer."""

    slots: Tensor
    """Slot of each row [span]."""
    past: Tensor
    """The position of its new token [span]."""
    angles: Tensor
    """exp(i angle) of every pair [span, 1, 1, D / 2]."""
    own: FlashRuns
    prompts: FlashRuns


class FlashLayers(RecordedLayers):
    """All layers for one token per row on a GPU."""

    reads_anywhere: ClassVar[bool] = True
    kernel = staticmethod(flash)

    _readers = 1
    """Readers of the step before."""

    def _layer(self, parameters: LayerParameters, matrices: LayerWeights) -> Layer:
        layer = Layer.of(parameters, matrices, self.sizes, self._norm_weight, by_key_head=False)
        return layer if layer.head_norms is None else replace(layer, head_norms=layer.head_norms[:, None])

    def plan(
        self, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, caches: Sequence[LayerCache]
    ) -> RecordingPlan:
        """See ``RecordedLayers``."""
        cache = caches[0]
        span, prompts = self.span(len(rows)), len(cache.prompt_keys)
        most = max(int(np.bincount(rows[:, 2]).max()), span - len(rows))
        self._readers = max(self._readers, power(most))
        numbers, at = self._numbers(tokens, positions, rows, span=span, prompts=prompts, cache=cache)
        return RecordingPlan(FlashShape(span, self._readers), numbers, span, at)

    def _numbers(
        self, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, *, span: int, prompts: int, cache: LayerCache
    ) -> tuple[np.ndarray, np.ndarray]:
        """One run of integers, and where each row is among those that are computed [R].

        For each of these: token, position, slot and past tokens [4, span]. Then, of half the width, the runs over own
        tokens and those over prompts. What is computed beyond the rows writes to slots without a row, where their next
        row begins, and reads one token of the first prompt's slot: a run of its own behind those of all prompt slots.
        """
        count, (slots, past, of, lengths) = len(rows), rows.T
        order, at = np.argsort(of, kind="stable"), np.empty(len(rows), dtype=np.int64)
        at[order] = np.arange(count)
        by_row = np.zeros((4, span), dtype=np.int64)
        by_row[:, :count] = np.stack([tokens, positions, slots, past])[:, order]
        by_row[2, count:] = np.setdiff1d(np.arange(self.slots), slots)[: span - count]
        queries, kv_heads = self.sizes.heads // self.sizes.kv_heads + 2, self.sizes.kv_heads
        readers, used = np.bincount(of, minlength=prompts + 1), np.ones(prompts + 1)
        readers[prompts], used[of] = span - count, lengths
        prompt_starts = np.arange(prompts + 2) % (prompts + 1) * kv_heads * cache.prompt_keys.shape[2]
        prompt_starts[prompts] = 0
        narrow = [
            np.arange(span + 1) * queries,
            np.append(by_row[2], 0) * kv_heads * cache.positions,
            by_row[3] + 1,
            np.append(0, np.cumsum(readers)) * queries,
            prompt_starts,
            used,
        ]
        joined = np.concatenate([*narrow, [0]]).astype(np.int32)
        return np.concatenate([by_row.ravel(), joined[: len(joined) // 2 * 2].view(np.int64)]), at

    def step(self, shape: Any, numbers: Tensor, *, angles: Angles, caches: Sequence[LayerCache]) -> Tensor:
        """The normed output of the last layer of all rows that are computed [span, H].

        Nothing is read back from the device.
        """
        span, prompts = shape.span, len(caches[0].prompt_keys)
        tokens, positions, slots, past = numbers[: 4 * span].view(4, span)
        sizes = [span + 1, span + 1, span, prompts + 2, prompts + 2, prompts + 1]
        narrow = numbers[4 * span :].view(torch.int32)[: sum(sizes)].split(sizes)
        own_queries, own_keys, own_used, prompt_queries, prompt_keys, prompt_used = narrow
        queries = self.sizes.heads // self.sizes.kv_heads + 2
        turn = FlashTurn(
            slots,
            past,
            angles.turn().index_select(0, positions)[:, None],
            FlashRuns(own_queries, own_keys, own_used, queries, caches[0].positions),
            FlashRuns(
                prompt_queries, prompt_keys, prompt_used, shape.readers * queries, caches[0].prompt_keys.shape[2]
            ),
        )
        residual = self._embedded(tokens, self._newest.index_select(0, slots))
        return self._compute(residual, partial(self._gathered, turn=turn), caches)

    def _keep(self, numbers: Tensor, tokens: Tensor) -> None:
        slots = numbers[2 * len(tokens) : 3 * len(tokens)]
        self._newest.index_copy_(0, slots, tokens)

    def _gathered(self, qkv: Tensor, layer: Layer, cache: LayerCache, *, turn: FlashTurn) -> Tensor:
        """Attention's output for all rows [span, heads D]; ``qkv`` is overwritten.

        Key and value go with the queries as if they were two more: what they gather is not looked at, and a run has
        room for them, so that nothing is copied.
        """
        sizes, span = self.sizes, len(qkv)
        heads = qkv.view(span, -1, sizes.kv_heads, sizes.head_size)
        turned = heads[:, :-1].to(self.wide)
        if layer.head_norms is not None:
            turned = torch.nn.functional.rms_norm(turned, turned.shape[-1:], None, sizes.epsilon).mul_(layer.head_norms)
        torch.view_as_complex(turned.unflatten(-1, (-1, 2))).mul_(turn.angles)
        heads[:, :-1].copy_(turned)
        cache.own[:, turn.slots, :, turn.past] = heads[:, -2:].to(cache.own.dtype)
        q = heads.flatten(0, 1)
        own, own_logs = self.kernel(q, by_token(cache.own[0]), by_token(cache.own[1]), turn.own)
        read, read_logs = self.kernel(q, by_token(cache.prompt_keys), by_token(cache.prompt_values), turn.prompts)
        shares = torch.stack([own_logs, read_logs]).softmax(dim=0).transpose(1, 2).unsqueeze(-1)
        own, read, *shares = (part.view(span, -1, *part.shape[1:])[:, :-2] for part in (own, read, *shares))
        mixed = qkv.new_empty(span, sizes.kv_heads, own.shape[1], sizes.head_size)
        torch.addcmul(own * shares[0], read, shares[1], out=mixed.transpose(1, 2))
        return mixed.flatten(1)


def by_token(cached: Tensor) -> Tensor:
    """Keys or values [slots, kv_heads, positions, D] as the kernel takes them [N, kv_heads, D], without a copy.

    Token t of a slot s stands at s kv_heads positions + t.
    """
    slots, kv_heads, positions, size = cached.shape
    count = slots * kv_heads * positions - (kv_heads - 1) * positions
    return cached.as_strided((count, kv_heads, size), (size, positions * size, 1))


def can_decode(sizes: AttentionSizes, compute_type: torch.dtype, device: torch.device) -> bool:
    """The kernel is there for heads of this size, and reads what it is told."""
    size = sizes.head_size
    if device.type != "cuda" or compute_type not in HALF or size % HEAD_STEP or size > LARGEST_HEAD:
        return False
    return _agrees(size, compute_type, device)


@cache
def _agrees(size: int, compute_type: torch.dtype, device: torch.device) -> bool:
    """Found out once: some runs are read, and compared with attention in float32."""
    try:
        difference = largest_difference(flash, size, compute_type, device)
    except KERNEL_FAILURES as error:
        reason = f"raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    else:
        reason = f"differs by {difference:.2g}"
        if difference <= TOLERANCE:
            return True
    log.warning("attention in sampling reads up to the longest row, slower: torch's flash kernel %s", reason)
    return False


def largest_difference(kernel: Kernel, size: int, compute_type: torch.dtype, device: torch.device) -> float:
    """Between what a kernel makes of some runs and attention in float32; not a number where it reads a token too many.

    The runs stand in a buffer in another order than their queries, with keys between them that are no numbers.
    """
    random = torch.Generator().manual_seed(0)
    slots, used, queries, positions = (2, 0, 1), (1, 70, 33), (4, 1, 3), 96
    cached = torch.full((2, len(slots), 2, positions, size), torch.nan)
    for slot, count in zip(slots, used, strict=True):
        cached[:, slot, :, :count] = torch.randn(2, 2, count, size, generator=random)
    q = torch.randn(sum(queries), 2, size, generator=random)
    cached, q = cached.to(device, compute_type), q.to(device, compute_type)
    starts = [[0, 4, 5, 8], [*(slot * 2 * positions for slot in slots), 0], used]
    query_starts, key_starts, counts = (torch.tensor(part, dtype=torch.int32, device=device) for part in starts)
    runs = FlashRuns(query_starts, key_starts, counts, 6, positions)
    out, logs = kernel(q, by_token(cached[0]), by_token(cached[1]), runs)
    worst = torch.zeros((), device=device)
    for slot, count, rows in zip(slots, used, (slice(0, 4), slice(4, 5), slice(5, 8)), strict=True):
        k, v = cached[:, slot, :, :count].float().unbind()
        scores = q[rows].float().transpose(0, 1) @ k.transpose(1, 2) * size**-0.5
        expected = (scores.softmax(dim=-1) @ v).transpose(0, 1)
        for actual, right in ((out[rows].float(), expected), (logs[:, rows].float(), scores.logsumexp(dim=-1))):
            worst = torch.maximum(worst, (actual - right).abs().amax())
    return float(worst)
