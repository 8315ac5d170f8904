"""Weights from a GPU, taken by vLLM's own engine, which is told when to touch the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.cuda import nccl
from vllm.distributed.weight_transfer.base import WeightTransferEngine  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)

TRANSFER = "nccl"


def check_nccl(theirs: list[int | str]) -> None:
    """Raises ValueError unless the trainer's NCCL is this server's: two versions wait for each other in vain."""
    if not torch.cuda.is_available():
        raise ValueError("weights cannot come over nccl: this server has no CUDA device")
    own = list(nccl.version())
    if own != theirs:
        here, there = (".".join(map(str, version)) for version in (own, theirs))
        raise ValueError(f"this server has NCCL {here}, and the trainer {there}; install the same torch in both")


class DeviceTransfer:
    """vLLM's own engine for NCCL. The model is as it was until the first weights come, so that an update which is given
    up before costs nothing."""

    def __init__(self, transfer: str, settings: dict[str, Any], owner: WeightTransferEngine) -> None:
        """Waits for the others of a group. Raises ValueError for a way that cannot be here."""
        if transfer != TRANSFER:
            raise ValueError(f"there is no way {transfer!r} for weights; there are {TRANSFER} and file")
        if not torch.cuda.is_available():
            raise ValueError(f"weights cannot come over {transfer}: this server has no CUDA device")
        self._engine = WeightTransferEngineFactory.create_engine(
            replace(owner.config, backend=transfer), owner.vllm_config, owner.device, owner.model
        )
        self._engine.init_transfer_engine(self._engine.parse_init_info(settings))
        self._has_begun = False

    def receive(self, update: dict[str, Any]) -> None:
        """Take all weights, under the names that a checkpoint has for them."""
        self._has_begun = True
        self._engine.start_weight_update()
        self._engine.update_weights(update)

    def finish(self) -> None:
        """Let them take the place of the old ones. Raises ValueError if none came."""
        has_begun, self._has_begun = self._has_begun, False
        if not has_begun:
            raise ValueError("no weights were sent")
        self._engine.finish_weight_update()

    def close(self) -> None:
        """Leave the group."""
        self._engine.shutdown()
