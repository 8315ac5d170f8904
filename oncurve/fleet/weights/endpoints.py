"""The trainer's end of a transfer from its GPU. Here alone is vLLM imported into the process that trains."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl

from oncurve.core.errors import ConfigError
from oncurve.fleet.weights.weight_stream import Shipment

BUFFER_BYTES = 2**28
"""Size of a packed buffer. vLLM's own default, four times as much, is held twice on each side."""
NUM_BUFFERS = 2


def packing() -> dict[str, Any]:
    """The layout of weights in buffers, which both ends must know."""
    return {"packed": True, "packed_buffer_size_bytes": BUFFER_BYTES, "packed_num_buffers": NUM_BUFFERS}


class NcclEnd:
    """The trainer's place in a group with servers: vLLM's own communicator and its packed broadcast.

    Its calls wait for the others and know no deadline: each is made in a thread that may be left behind. Has not yet
    run: it needs two GPUs.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._communicator: Any = None

    def version(self) -> list[int | str]:
        """The version of the NCCL that torch brings along and vLLM loads; it must be the same for all."""
        return list(nccl.version())

    def join(self, address: str, port: int, size: int) -> None:
        """Become member 0 of ``size``, who meet at an address of this machine."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init  # pyright: ignore[reportMissingImports]

        torch.cuda.set_device(self._device)  # each thread has its own
        self._communicator = trainer_init({"master_address": address, "master_port": port, "world_size": size})
        if self._communicator.disabled:  # it would send nothing, without a word
            raise RuntimeError("NCCL cannot be loaded into the process that trains")

    def send(self, shipment: Shipment) -> None:
        """Give all weights to all members; they have left this GPU when it returns."""
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
        """Let go of the group, also in the middle of something; who waits in it is told of an error."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()


def _weight(pair: tuple[str, Tensor]) -> Tensor:
    return pair[1]


def give_back_cache() -> None:
    """Let another process have the memory of this GPU that torch keeps for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_device(*, has_gpu: bool) -> None:
    """Raises ConfigError if this process cannot send weights over NCCL."""
    if not has_gpu:
        raise ConfigError(
            "rollouts.transfer is nccl, which needs a CUDA device, and there is none here. Set "
            "`rollouts.transfer=fetch`"
        )
    try:
        importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"rollouts.transfer is nccl, for which this process needs vLLM as well, and it has none that can be loaded "
            f"({error}). Run `pip install 'oncurve[vllm]'` in an environment for both: vLLM 0.32, torch 2.13 and a "
            f"transformers below 5.20. Or set `rollouts.transfer=fetch`"
        ) from None
