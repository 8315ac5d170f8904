"""What ``torch.cuda`` answers about the pretend GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.graphs
import torch.cuda.memory
import torch.cuda.random
import torch.cuda.streams

from pretend import kernels, recording

OPS = torch.ops.pretend_gpu
NAME = "NVIDIA H100 80GB HBM3"
"""A name that tables of GPUs know, so that what follows from it is tried too."""
TOTAL, LIVE, PEAK, RESERVED, PEAK_RESERVED = range(5)


def memory(which: int) -> Callable[..., int]:
    """A function that answers one figure of the memory."""
    return lambda device=None: OPS.memory()[which]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes, as the driver sees them."""
    total, _, _, reserved, _ = OPS.memory()
    return total - reserved, total


def memory_stats(device: Any = None) -> dict[str, int]:
    """The figures that ``torch.cuda.memory_stats`` has and this device knows."""
    _, live, peak, reserved, peak_reserved = OPS.memory()
    return {
        "allocated_bytes.all.current": live,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": reserved,
        "reserved_bytes.all.peak": peak_reserved,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def properties(device: Any = None) -> SimpleNamespace:
    """Those of an H100."""
    return SimpleNamespace(
        name=NAME, total_memory=OPS.memory()[TOTAL], major=9, minor=0, multi_processor_count=132, warp_size=32,
        max_threads_per_multi_processor=2048, uuid="00000000-0000-0000-0000-000000000000", gcnArchName="",
    )  # fmt: skip


def set_sync_debug_mode(mode: int | str) -> None:
    """``torch.cuda.set_sync_debug_mode``: what the device does where the host waits for it."""
    names = ("default", "warn", "error")
    OPS.set_waits(names[mode] if isinstance(mode, int) else mode)


def _nothing() -> Callable[..., None]:
    """A function of its own that has nothing to do on this device; torch tells functions apart by what they are."""
    return lambda *_, **__: None


def _of_cuda() -> dict[str, Any]:
    return {
        "_lazy_init": _nothing(), "init": _nothing(), "is_initialized": lambda: True, "is_available": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": _nothing(),
        "_exchange_device": lambda device: 0, "_maybe_exchange_device": lambda device: 0,
        "synchronize": lambda device=None: OPS.synchronize("device"), "ipc_collect": _nothing(),
        "get_device_name": lambda device=None: NAME, "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": properties, "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True, "get_arch_list": lambda: ["sm_90"], "utilization": lambda device=None: 0,
        "set_sync_debug_mode": set_sync_debug_mode,
    }  # fmt: skip


MEMORY: dict[str, Any] = {
    "memory_allocated": memory(LIVE), "max_memory_allocated": memory(PEAK), "memory_reserved": memory(RESERVED),
    "max_memory_reserved": memory(PEAK_RESERVED), "mem_get_info": mem_get_info, "memory_stats": memory_stats,
    "empty_cache": lambda: OPS.empty_cache(), "reset_peak_memory_stats": lambda device=None: OPS.reset_peak(),
    "reset_max_memory_allocated": lambda device=None: OPS.reset_peak(), "memory_summary": lambda *_, **__: "",
    "set_per_process_memory_fraction": _nothing(), "_record_memory_history": _nothing(),
}  # fmt: skip
STREAMS: dict[str, Any] = {"Stream": recording.Stream, "Event": recording.Event}
GRAPHS: dict[str, Any] = {
    "CUDAGraph": recording.CUDAGraph,
    "graph_pool_handle": recording.graph_pool_handle,
    "is_current_stream_capturing": lambda: OPS.is_recording(),
}
CURRENT: dict[str, Any] = {
    "current_stream": recording.current_stream, "default_stream": recording.default_stream,
    "stream": recording.StreamContext, "StreamContext": recording.StreamContext, "set_stream": recording.set_stream,
}  # fmt: skip


def _load(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """What ``torch.load`` puts on the device; a build for CPUs makes no storages there."""
    if not location.startswith("cuda"):
        return None
    return _moved(storage, "cuda")


def _moved(storage: torch.UntypedStorage, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
    """A copy of a storage on a device."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.to(device, non_blocking=non_blocking, copy=True).untyped_storage()


def install() -> None:
    """Answer for ``torch.cuda`` from here on; what the environment asks of the device is set."""
    cuda = torch.cuda
    for module, answers in (
        (cuda, {**_of_cuda(), **MEMORY, **STREAMS, **GRAPHS, **CURRENT}),
        (cuda.memory, MEMORY),
        (cuda.streams, STREAMS),
        (cuda.graphs, GRAPHS),
        (cuda.random, {name: answer for name, answer in _of_cuda().items() if name in vars(cuda.random)}),
    ):
        for name, answer in answers.items():
            setattr(module, name, answer)
    torch._C._host_emptyCache = lambda: None  # type: ignore[attr-defined]
    cuda.default_generators = (torch.Generator("cuda"),)  # type: ignore[assignment]
    torch.backends.cuda.is_built = lambda: True
    torch.UntypedStorage.clone = lambda storage: _moved(storage, storage.device)  # type: ignore[method-assign]
    torch.serialization.register_package(5, lambda storage: None, _load)
    kernels.install()
    obey(os.environ)


def obey(environment: Any) -> None:
    """``PRETEND_GPU_BYTES``: the memory's size. ``PRETEND_GPU_FAIL_AT``: what runs out of memory, see ``fail_at``."""
    if environment.get("PRETEND_GPU_BYTES"):
        OPS.set_total(int(float(environment["PRETEND_GPU_BYTES"])))
    for one in filter(None, environment.get("PRETEND_GPU_FAIL_AT", "").split(",")):
        fail_at(one)


def fail_at(asked: str) -> None:
    """``allocation:N``, ``operation:N`` or either with a name, ``operation:aten::mm.out:N``, ``allocation:update:N``.

    The Nth from now raises ``torch.OutOfMemoryError``, once; a name is that of an operation or of an open scope.
    """
    kind, *name, number = asked.split(":")
    if kind not in ("allocation", "operation") or not number.isdigit():
        raise SystemExit(f"a failure is allocation:N or operation:NAME:N, not {asked!r}")
    OPS.fail(kind, ":".join(name), int(number))
