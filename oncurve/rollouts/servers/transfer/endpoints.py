"""The trainer's end of a transfer from its GPU. Here alone is vLLM imported into the process that trains."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.cuda import nccl

from oncurve.errors import ConfigError
from oncurve.rollouts.servers.transfer.handles import to_plain
from oncurve.rollouts.servers.transfer.weight_stream import Shipment, type_name

BUFFER_BYTES = 2**28
"""Of one packed buffer. vLLM's own default, four times as much, is twice on each side."""
NUM_BUFFERS = 2


class GroupEnd(Protocol):
    """The trainer's place in a group with servers. Its calls wait for the others and know no deadline: each is made in
    a thread that may be left behind."""

    def version(self) -> list[int | str] | None:
        """Of the library that connects the members, which must be the same for all; None where that does not matter."""
        ...

    def join(self, address: str, port: int, size: int) -> None:
        """Become member 0 of ``size``, who meet at an address of this machine."""
        ...

    def send(self, shipment: Shipment) -> None:
        """Give all weights to all members; they have left this GPU when it returns."""
        ...

    def leave(self) -> None:
        """Let go of the group, also in the middle of something."""
        ...


class SharedEnd(Protocol):
    """Memory of the trainer's GPU that another process reads."""

    def chunks(self, shipment: Shipment) -> Iterator[dict[str, Any]]:
        """What to send for each part of the weights. A part is gone when the next is asked for."""
        ...


def packing() -> dict[str, Any]:
    """How weights are put together in buffers, which both ends must know."""
    return {"packed": True, "packed_buffer_size_bytes": BUFFER_BYTES, "packed_num_buffers": NUM_BUFFERS}


class NcclEnd:
    """vLLM's own communicator and its packed broadcast. Has not yet run: it needs two GPUs."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._communicator: Any = None

    def version(self) -> list[int | str] | None:
        """Of NCCL, as torch brings it along and vLLM loads it."""
        return list(nccl.version())

    def join(self, address: str, port: int, size: int) -> None:
        """Become member 0."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init  # pyright: ignore[reportMissingImports]

        torch.cuda.set_device(self._device)  # each thread has its own
        self._communicator = trainer_init({"master_address": address, "master_port": port, "world_size": size})
        if self._communicator.disabled:  # it would send nothing, without a word
            raise RuntimeError("NCCL cannot be loaded into the process that trains")

    def send(self, shipment: Shipment) -> None:
        """Broadcast buffer after buffer."""
        from vllm.distributed.weight_transfer.packed_tensor import (  # pyright: ignore[reportMissingImports]
            packed_nccl_broadcast_producer,
        )

        torch.cuda.set_device(self._device)
        torch.cuda.synchronize()  # the last update of the weights ran on another stream
        packed_nccl_broadcast_producer(
            iterator=iter(shipment),
            group=self._communicator,
            src=0,
            post_iter_func=_weight,
            buffer_size_bytes=BUFFER_BYTES,
            num_buffers=NUM_BUFFERS,
        )

    def leave(self) -> None:
        """End the communicator; who waits in it is told of an error."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()


class IpcEnd:
    """One buffer of the trainer's GPU, filled again and again. Has not yet run: it needs a GPU."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()

    def chunks(self, shipment: Shipment) -> Iterator[dict[str, Any]]:
        """Fill the buffer with as many weights as go into it, and say where it is. Each part may be asked for in
        another thread."""
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize(self._device)
        largest = max((_num_bytes(shipment, weight) for weight in shipment.weights.values()), default=0)
        buffer = torch.empty(max(BUFFER_BYTES, largest), dtype=torch.uint8, device=f"cuda:{self._device}")
        handle = to_plain(reduce_tensor(buffer)[1])
        gpu = str(torch.cuda.get_device_properties(self._device).uuid)
        for header in fill(buffer, shipment):
            torch.cuda.synchronize(self._device)
            yield header | {"handles": {gpu: handle}}
        del buffer
        torch.cuda.ipc_collect()


def fill(buffer: Tensor, shipment: Shipment) -> Iterator[dict[str, list[Any]]]:
    """Put weights behind one another into a buffer of bytes until the next has no room; what is in it now.

    Raises ValueError for a weight that is larger than the buffer.
    """
    header, used = _empty(), 0
    for name, weight in shipment:
        flat = weight.view(-1).view(torch.uint8)
        if flat.numel() > buffer.numel():
            raise ValueError(f"{name} has {flat.numel()} bytes, and the buffer {buffer.numel()}")
        if used + flat.numel() > buffer.numel():
            yield header
            header, used = _empty(), 0
        buffer[used : used + flat.numel()].copy_(flat)
        used += flat.numel()
        facts = (name, type_name(weight.dtype), list(weight.shape), flat.numel())
        for values, fact in zip(header.values(), facts, strict=True):
            values.append(fact)
    if used:
        yield header


def _empty() -> dict[str, list[Any]]:
    return {"names": [], "dtype_names": [], "shapes": [], "tensor_sizes": []}


def _num_bytes(shipment: Shipment, weight: Tensor) -> int:
    return weight.numel() * shipment.type_of(weight).itemsize


def _weight(pair: tuple[str, Tensor]) -> Tensor:
    return pair[1]


def give_back_cache() -> None:
    """Let another process have the memory of this GPU that torch keeps for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_device(transfer: str, *, has_gpu: bool) -> None:
    """Raises ConfigError if this process cannot send weights that way."""
    if not has_gpu:
        raise ConfigError(
            f"rollouts.transfer is {transfer}, which needs a CUDA device, and there is none here. Set "
            f"`rollouts.transfer=fetch`"
        )
    if transfer != "nccl":
        _check_allocator()
        return
    try:
        importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"rollouts.transfer is nccl, for which this process needs vLLM as well, and it has none that can be loaded "
            f"({error}). Run `pip install 'oncurve[vllm]'` here, or set `rollouts.transfer=fetch`"
        ) from None


def _check_allocator() -> None:
    """Raises ConfigError if torch's memory cannot be opened by another process."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            raise ConfigError(
                f"rollouts.transfer is ipc, and {name} is {os.environ[name]!r}: a server cannot open memory in "
                f"segments that grow. Run `unset {name}`, or set `rollouts.transfer=fetch`"
            )
