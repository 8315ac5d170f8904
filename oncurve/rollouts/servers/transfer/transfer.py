"""The way of weights without files, and what must be known for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oncurve.rollouts.servers.transfer.nccl_group import GroupPush


@dataclass(frozen=True)
class Transfer:
    """How weights leave the trainer's GPU."""

    push: GroupPush
    matrix_type: torch.dtype | None = None
    """The type of the servers' matrices; None sends those of the policy as they are."""
    trains_meanwhile: bool = False
    """The policy trains while servers sample, so that weights for a late server are copied first."""
