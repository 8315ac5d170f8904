"""Peak arithmetic and memory bandwidth of this machine, measured in about a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from oncurve.observe.profile import MachineLimits


def measure_limits(dtype: torch.dtype, device: torch.device) -> MachineLimits:
    """The rate of matrix products in a type, and of reading memory: the best of some tries."""
    return MachineLimits(
        gemm_flops(dtype, device=str(device), repeats=8),
        read_bandwidth(device=str(device), gibibytes=0.5, repeats=4),
    )


def gemm_flops(dtype: torch.dtype, *, size: int = 1024, repeats: int = 12, device: str = "cpu") -> float:
    """Floating-point operations per second of a square matrix product: the best of some repeats."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    return 2 * size**3 / _best(lambda: left @ right, repeats, device)


def read_bandwidth(*, gibibytes: float = 1.0, repeats: int = 5, device: str = "cpu") -> float:
    """Bytes per second while a tensor that no cache holds is summed: the best of some repeats."""
    data = torch.ones(int(gibibytes * 2**30 / 4), device=device)
    return data.numel() * 4 / _best(data.sum, repeats, device)


def _best(work: Callable[[], Any], repeats: int, device: str) -> float:
    seconds = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        work()
        if not device.startswith("cpu"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[2:])
