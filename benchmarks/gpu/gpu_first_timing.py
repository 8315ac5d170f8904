"""Seconds, bytes and kernels of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from gpu_first_rows import DEVICES, entry_of

TABLE_ROWS = 15
"""Kernels of a table: those that take longest."""


@dataclass(frozen=True)
class Nominal:
    """What the data sheet of a device says."""

    operations_per_second: float
    bytes_per_second: float


def is_gpu(device: str) -> bool:
    """A CUDA device, real or pretended."""
    return device.startswith("cuda")


def wait(device: str) -> None:
    """Until the device has done what it was told."""
    if is_gpu(device):
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], device: str, *, repeats: int = 5, warmup: int = 1) -> float:
    """The median of some repeats, each waited for."""
    taken = []
    for number in range(warmup + repeats):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        if number >= warmup:
            taken.append(time.perf_counter() - started)
    return median(taken)


def seconds_each(work: Callable[[], Any], device: str, *, times: int, warmup: int = 3) -> float:
    """Of work that is repeated without waiting in between, as kernels are in a loop."""
    for _ in range(warmup):
        work()
    wait(device)
    started = time.perf_counter()
    for _ in range(times):
        work()
    wait(device)
    return (time.perf_counter() - started) / times


def memory(device: str) -> dict[str, float]:
    """GiB that tensors hold, that torch holds, and the most that tensors held since this was last asked."""
    if not is_gpu(device):
        return {}
    kept = {
        "allocated_gib": torch.cuda.memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.memory_reserved() / 2**30,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    torch.cuda.reset_peak_memory_stats()
    return kept


def nominal(device: str) -> Nominal | None:
    """The entry of the planner's list for this device; None where it is not in it."""
    if not is_gpu(device) or torch.version.cuda is None:
        return None
    text, found = DEVICES.read_text(encoding="utf-8"), torch.cuda.get_device_properties(0)
    entry = entry_of(found.name, found.total_memory / 2**30, text)
    if entry is None:
        return None
    facts = yaml.safe_load(text)[entry]
    return Nominal(facts["bf16"] * 1e12, facts["bandwidth"] * 1e9)


def kernels(work: Callable[[], Any], device: str) -> dict[str, Any]:
    """What takes longest on the device and on the host while some work is done once."""
    from torch.profiler import ProfilerActivity, profile

    chosen = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu(device) else [])]
    wait(device)
    with profile(activities=chosen) as watched:
        work()
        wait(device)
    rows = list(watched.key_averages())
    on_device = [row for row in rows if row.self_device_time_total > 0]
    return {
        "device_seconds": sum(row.self_device_time_total for row in on_device) / 1e6,
        "device_launches": sum(row.count for row in on_device),
        "by_device_time": _longest(on_device, "self_device_time_total"),
        "by_host_time": _longest(rows, "self_cpu_time_total"),
    }


def _longest(rows: list[Any], key: str) -> list[dict[str, Any]]:
    ordered = sorted(rows, key=lambda row: getattr(row, key), reverse=True)[:TABLE_ROWS]
    return [{"name": row.key[:90], "calls": row.count, "milliseconds": getattr(row, key) / 1e3} for row in ordered]


def checkpoint(work: Path, size: str) -> Path:
    """The random model of a size that item B0 made."""
    folder = work / "models" / size
    if not (folder / "config.json").is_file():
        raise SystemExit(f"there is no {folder}: run item B0 first")
    return folder
