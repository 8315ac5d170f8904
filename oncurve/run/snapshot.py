"""A run between two steps, copied to the memory of the CPU: by one process, or a share of it by each."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oncurve.core.records import Group
from oncurve.policy.backend import Piece, piece_of, trained_parameters
from oncurve.policy.model_folder import is_converted
from oncurve.policy.trained_policy import TrainedPolicy


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps, copied to the memory of the CPU: nothing in it changes while training goes on.

    Where there are several processes each has a share of the tensors, and all shares together are the run.
    """

    step: int
    """Steps done."""
    state: Mapping[str, Any]
    """The small things, as plain data."""
    facts: Mapping[str, Any]
    """For the manifest: what the run is, so that another one is not taken for it."""
    weights: Mapping[str, Tensor] | None
    """By the names of the model's own state; None before the first step, when they are those of the base."""
    is_whole: bool
    """All weights are trained, so that the folder is an ordinary checkpoint; otherwise only the trained ones."""
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    """``<parameter>:<moment>``."""
    reference: Mapping[str, Tensor] = field(default_factory=dict)
    """The weights of a reference that moves; empty if it stands still."""
    is_partial: bool = False
    """Other processes hold the other tensors."""
    ahead: Mapping[int, Sequence[Group]] = field(default_factory=dict)
    """Groups of steps that come later, which are sampled already."""
    owners: Mapping[str, int] | None = None
    """Which process has which weight of a whole model; None where process 0 has all of them."""


def is_trained_whole(model: nn.Module) -> bool:
    """Every weight of the model is trained."""
    return all(parameter.requires_grad for parameter in model.parameters())


def capture(
    policy: TrainedPolicy,
    *,
    step: int,
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
    moves_reference: bool = False,
) -> Snapshot:
    """A copy of everything that training changes: of all of it, or of this process's share where there are several.

    All processes must call it. Tensors are put together one after the other and kept by one process each, as many bytes
    by each as by the others: a process needs memory for its share and one tensor besides.
    """
    model = policy.trained_model
    is_whole = is_trained_whole(model)
    if step == 0:
        return Snapshot(step, state, facts, None, is_whole)
    kinds = [_weights(policy, is_whole), policy.backend.moments(_room), _reference(policy) if moves_reference else {}]
    owners = _divide(policy, kinds)
    weights, optimizer, reference = (_own_copies(kind, owners, policy.processes.rank) for kind in kinds)
    names = {name: owners[piece.identity] for name, piece in kinds[0].items()}
    return Snapshot(
        step,
        state,
        facts,
        weights,
        is_whole,
        optimizer,
        reference,
        is_partial=max(owners.values(), default=0) > 0,
        owners=names if is_whole and max(names.values()) > 0 else None,
    )


def _weights(policy: TrainedPolicy, is_whole: bool) -> dict[str, Piece]:
    model = policy.trained_model
    tensors = model.state_dict(keep_vars=True) if is_whole else trained_parameters(model)
    return {name: piece_of(policy.backend, tensor, _room) for name, tensor in tensors.items()}


def _reference(policy: TrainedPolicy) -> dict[str, Piece]:
    if policy.reference is None:
        return {}
    weights = dict(policy.reference.named_parameters())
    return {name: piece_of(policy.backend, weights[name], _room) for name in trained_parameters(policy.trained_model)}


def _divide(policy: TrainedPolicy, kinds: Sequence[Mapping[str, Piece]]) -> dict[object, int]:
    """Which process keeps which tensor: large ones first, each by the process that has least so far.

    Process 0 keeps an adapter, and weights that transformers names and cuts otherwise in files than in modules.
    """
    count = 1 if policy.adapter is not None else policy.processes.count
    loads, owners = [0] * count, dict[object, int]()
    sizes = {piece.identity: piece.num_bytes for kind in kinds for piece in kind.values()}
    names = {piece.identity: (index, name) for index, kind in enumerate(kinds) for name, piece in kind.items()}
    if is_converted(policy.model):
        owners = {piece.identity: 0 for piece in kinds[0].values()}
        loads[0] = sum(sizes[identity] for identity in owners)
    for identity in sorted(
        sizes, key=lambda identity: (-sizes[identity], names[identity])
    ):  # the same in every run and process
        if identity not in owners:
            owners[identity] = loads.index(min(loads))
            loads[owners[identity]] += sizes[identity]
    return owners


def _own_copies(pieces: Mapping[str, Piece], owners: Mapping[object, int], rank: int) -> dict[str, Tensor]:
    """Copies in CPU memory; a tensor under two names stays one, as with a head that is the embedding's matrix."""
    made: dict[object, Tensor] = {}
    for piece in {piece.identity: piece for piece in pieces.values()}.values():
        tensor = piece.gather().detach()
        if owners[piece.identity] == rank:
            is_apart = piece.is_copied and tensor.device.type == "cpu"
            made[piece.identity] = tensor if is_apart else _room(tensor.shape, tensor.dtype).copy_(tensor)
        del tensor  # before the next one is put together
    return {name: made[piece.identity] for name, piece in pieces.items() if piece.identity in made}


def _room(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """CPU memory that the heap has no part in, so that a freed snapshot leaves no gaps there."""
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, shape.numel() * dtype.itemsize), dtype=dtype).view(shape)
