"""Dithered copies on a GPU in one pass over the weights, where torch alone takes a dozen."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from oncurve.algorithm.precision import KERNELS, Kernel, dithered_by_torch
from oncurve.core.errors import first_line, is_out_of_memory
from oncurve.model.stand_in import FAILURES

log = logging.getLogger(__name__)
BLOCK = 1024
PROBE = (3, 2**32 - 700, 2500)
"""Key, first index and count of the numbers with which the kernel is held against torch."""


@cache
def make_kernel() -> Any:
    """The kernel. Raises ImportError where there is no Triton."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["key", "first", "count"])
    def dither(x: Any, out: Any, key: Any, first: Any, count: Any, BLOCK: tl.constexpr) -> None:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        bits = tl.load(x + index, mask=inside, other=0.0).to(tl.uint32, bitcast=True)
        h = (index + first).to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
        h = (h ^ (h >> 16)) * 0x85EBCA6B
        h = (h ^ (h >> 13)) * 0xC2B2AE35
        threshold = (h ^ (h >> 16)) & 0xFFFF
        size = bits & 0x7FFFFFFF
        moved = tl.where(size < 0x7F800000, bits + threshold, bits)
        moved = tl.where(size > 0x7F800000, moved | 0x400000, moved)
        tl.store(out + index, (moved >> 16).to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)

    def call(numbers: Tensor, key: int, first: int) -> Tensor:
        out = torch.empty(numbers.shape, dtype=torch.bfloat16, device=numbers.device)
        if len(numbers):
            grid = (triton.cdiv(len(numbers), BLOCK),)
            dither[grid](numbers, out.view(torch.int16), key, first, len(numbers), BLOCK=BLOCK)
        return out

    return call


def proven(device: torch.device) -> Kernel | None:
    """The kernel, if it gives on this device what torch gives; None, with a line in the log, if it does not."""
    if importlib.util.find_spec("triton") is None:
        return None
    key, first, count = PROBE
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(device)
    numbers[:4] = torch.tensor([torch.inf, -torch.inf, 0.0, 1e-40])
    try:
        kernel = make_kernel()
        same = torch.equal(kernel(numbers, key, first), dithered_by_torch(numbers, torch.bfloat16, key, first))
    except FAILURES as error:  # torch computes the same
        if is_out_of_memory(error):
            raise
        log.warning("copies of weights are made by torch alone, slower: Triton says %s", first_line(error))
        return None
    if not same:
        log.warning("copies of weights are made by torch alone, slower: Triton's differ on this device")
    return kernel if same else None


KERNELS["cuda"] = cache(lambda: proven(torch.device("cuda")))
