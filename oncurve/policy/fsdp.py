"""FSDP2 backend: each process keeps a part of every matrix, its gradient and its moments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from oncurve.algorithm.precision import like
from oncurve.policy.activation_checkpointing import recomputable_layers
from oncurve.policy.backend import DataParallel, Scorers, trained_parameters
from oncurve.policy.distributed import Processes
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.sharding import (
    ReplicaLocation,
    Sharding,
    add_between_rows,
    is_cut,
    make_mesh,
    reshard,
    shard,
    split_by_cut,
    whole,
)
from oncurve.policy.unread_model import Unread, fill_copy, make_replica


class Fsdp(DataParallel):
    """Weights in parts; the reference is cut as well."""

    is_divided = True
    is_lockstep = True

    def __init__(
        self,
        model: PreTrainedModel,
        scorers: Scorers,
        settings: OptimizerSettings,
        processes: Processes,
        *,
        sharding: Sharding,
        compute_type: torch.dtype,
        replica_location: ReplicaLocation,
        unread: Unread | None,
    ) -> None:
        """Make the copy to sample from, and leave this process its part of everything.

        ``unread`` says where the weights are, if they are to be read when they are in parts.
        """
        device = model.device if unread is None else unread.device
        halved = compute_type == torch.bfloat16
        self.replica = make_replica(model, replica_location, device, halved=halved, is_unread=unread is not None)
        if self.replica is not None:
            like(model, self.replica)
        self._mesh = make_mesh(processes, sharding, device)
        for scorer in scorers.values():
            part: PreTrainedModel = scorer.model  # type: ignore[assignment]
            if unread is not None:
                unread.put_on(part)
            blocks = recomputable_layers(part)
            shard(scorer, blocks, self._mesh, sharding, compute_type=compute_type)
            if unread is not None:
                unread.fill(part, offload=sharding.offload)
        super().__init__(model, scorers, settings, processes)
        if unread is not None:
            fill_copy(self.replica, model, self.full_tensor, only_trained=False)

    def after_scoring(self, model: PreTrainedModel) -> None:
        """Every process keeps its own part of each weight only."""
        reshard(self.scorer(model))

    def publish(self) -> None:
        """Put the weights together one after the other, into the replica where this process has one."""
        fill_copy(self.replica, self.model, self.full_tensor, only_trained=True)

    def _groups(self) -> Sequence[list[nn.Parameter]]:
        return split_by_cut(list(trained_parameters(self.model).values()))

    def _clip(self, limit: float) -> float:
        """As on one device; of what is cut, FSDP has added up the gradients of a row."""
        kinds = self._groups()
        for parameters in kinds:
            if is_cut(parameters[0]):
                add_between_rows(parameters, self._mesh)
            else:
                self.processes.add_gradients(parameters)
        norms = [whole(nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None])) for kind in kinds]
        norm = norms[0] if len(norms) == 1 else torch.stack([part.to(norms[0].device) for part in norms]).norm()
        for parameters in kinds:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)
