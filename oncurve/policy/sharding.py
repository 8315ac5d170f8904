"""Weights in parts: what FSDP2 cuts, in which types it puts it together, and each process's part of a tensor.

Matrices are cut, block by block. Vectors (norms, biases) are so small that every process keeps them whole, in their own
type: a process group computes what one process computes, in which autocast rounds matrices and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from oncurve.algorithm.precision import HALF
from oncurve.core.errors import ConfigError
from oncurve.policy.distributed import Processes, without_deadlines

_gather_into: Callable[..., Any] = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
"""Its name from torch 2.13 on, and before."""
Reader = Callable[[slice], Tensor]
"""Some rows of a tensor, read from wherever it lies."""
Room = Callable[[torch.Size, torch.dtype], Tensor]
"""Memory for a tensor."""
ReplicaLocation = Literal["device", "cpu", "none"]
"""Place of this process's whole copy of a model in parts, to sample or to publish from."""
AUTO = "auto"
"""The word in DeepSpeed's file for what the recipe says."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """Weights cut over processes: FSDP2, one unit per block."""

    reshard_after_forward: bool = True
    """Free the weights of a block until its backward pass (as ZeRO-3); otherwise they stay until then (as ZeRO-2)."""
    offload: bool = False
    """Keep the parts, their gradients and moments in the CPU's memory."""
    degree: int | None = None
    """Processes in a row over which weights are cut, as over those of every other row (HSDP); None: all."""


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """The settings in DeepSpeed's file, and those of the recipe beside it."""

    config: Mapping[str, Any]
    source: str = "the default"
    """Its origin, for messages."""
    offload: bool = False
    """Moments in the CPU's memory where the file does not say."""

    @property
    def stage(self) -> int:
        """1, 2 or 3. Raises ConfigError for anything else."""
        stage = section_of(self.config, "zero_optimization", self.source).get("stage", 2)
        if stage == AUTO:
            return 2
        if stage not in (1, 2, 3):
            raise ConfigError(f"{self.source}: zero_optimization.stage is {stage!r}; use 1, 2 or 3")
        return stage


def section_of(config: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """A section of DeepSpeed's file, empty if it has none. Raises ConfigError for what is no section."""
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"{source}: {name} is {section!r}; it must be an object")
    return section


def make_mesh(processes: Processes, sharding: Sharding, device: torch.device) -> DeviceMesh:
    """The processes in a row over which weights are cut, or in several such rows. All must call it."""
    degree = sharding.degree or processes.count
    shape, names = (processes.count // degree, degree), ("rows", "parts")
    first = int(shape[0] == 1)
    mesh = init_device_mesh(device.type, shape[first:], mesh_dim_names=names[first:])
    without_deadlines()  # of the groups of a row
    return mesh


def add_between_rows(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Replace this process's part of every gradient by its sum over the rows, which have made as many passes."""
    for parameter in parameters if mesh.ndim > 1 else ():
        if isinstance(parameter.grad, DTensor):
            dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("rows"))


def shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    sharding: Sharding,
    *,
    compute_type: torch.dtype,
) -> None:
    """Leave every process a part of each matrix, its gradient and its moments. The model may be on the meta device.

    Matrices of blocks are put together in the compute type, as autocast would round them. What stands outside of blocks
    (embeddings, head) and what flows between them keep their type, as they do in one process. Gradients are summed, not
    averaged: the denominators are those of all processes already.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from oncurve.policy.dithered_parts import dither_parts  # lazy

    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    rounded = MixedPrecisionPolicy(compute_type, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": mesh["parts"],
        "offload_policy": CPUOffloadPolicy() if sharding.offload else OffloadPolicy(),
        "ignored_params": {parameter for parameter in module.parameters() if parameter.ndim < 2},
    }
    for block in blocks:
        policy = rounded if compute_type in HALF else exact
        if compute_type in HALF:
            dither_parts(block)
        fully_shard(block, reshard_after_forward=sharding.reshard_after_forward, mp_policy=policy, **options)
    fully_shard(module, reshard_after_forward=False, mp_policy=exact, **options)
    for part in _units(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def _units(module: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    return (part for part in module.modules() if isinstance(part, FSDPModule))


def reshard(module: nn.Module) -> None:
    """After a pass without gradients: every process keeps its own part of each weight only."""
    for part in _units(module):
        part.reshard()


def is_cut(tensor: Tensor) -> bool:
    """This process has a part of the tensor only."""
    return isinstance(tensor, DTensor)


def split_by_cut(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The sharded and the unsharded parameters, which torch does not compute with in one call; no list is empty."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(is_cut(parameter), []).append(parameter)
    return list(kinds.values())


def whole(tensor: Tensor, room: Room | None = None) -> Tensor:
    """All of a tensor of which each process has a part, which all must call; other tensors as they are.

    It takes the memory of the whole tensor once; on a CPU, that which ``room`` gives.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    from oncurve.policy.dithered_parts import plain  # lazy

    if not tensor.placements[0].is_shard(0):  # as that of a norm over all parts
        return tensor.full_tensor()
    rows, part, count = tensor.shape[0], plain(tensor.to_local()), tensor.device_mesh.size()
    height = -(-rows // count)
    if len(part) < height:
        part = torch.cat([part, part.new_zeros(height - len(part), *part.shape[1:])])
    shape = torch.Size((height * count, *part.shape[1:]))
    together = part.new_empty(shape) if room is None or part.device.type != "cpu" else room(shape, part.dtype)
    _gather_into(together, part.contiguous(), group=tensor.device_mesh.get_group())
    return together[:rows]


def own_rows_of(tensor: DTensor) -> slice:
    """The rows of a tensor that are this process's part: as many for each, the last ones with what is left."""
    rows, rank = tensor.shape[0], tensor.device_mesh.get_local_rank()
    height = -(-rows // tensor.device_mesh.size())
    return slice(min(rank * height, rows), min((rank + 1) * height, rows))


@torch.no_grad()
def fill(target: Tensor, read: Reader) -> None:
    """Put values into a tensor, or into this process's part of it: no other rows are read."""
    if isinstance(target, DTensor):
        target.to_local().copy_(read(own_rows_of(target)))
    else:
        target.copy_(read(slice(None)))
