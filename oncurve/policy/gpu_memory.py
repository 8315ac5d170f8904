"""GPU memory at named points of a step, and releasing what is unused."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oncurve.constants import GIB


def gpu_memory(point: str, *, rank: int | None = None) -> dict[str, float]:
    """GiB that tensors take (allocated) and that this process holds for them (reserved), of every GPU that it sees.

    The keys are ``memory/<point>_gpu<n>_allocated_gib`` and the same with ``reserved``. One of several processes has
    one GPU, the current one, which is counted under the process's ``rank``. Empty on a machine without CUDA.
    """
    if not torch.cuda.is_available():
        return {}
    if rank is None:
        gpus = [(number, number) for number in range(torch.cuda.device_count())]
    else:
        gpus = [(rank, torch.cuda.current_device())]
    sizes: dict[str, float] = {}
    for name, device in gpus:
        sizes[f"memory/{point}_gpu{name}_allocated_gib"] = torch.cuda.memory_allocated(device) / GIB
        sizes[f"memory/{point}_gpu{name}_reserved_gib"] = torch.cuda.memory_reserved(device) / GIB
    return sizes


def together(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The findings of several processes, as one."""
    return {key: value for part in parts for key, value in part.items()}


def start_peak() -> None:
    """From here on the peak is that of a new step."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    """Most that tensors took on this process's GPU since ``start_peak``; None without CUDA."""
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None
