"""Parts of matrices that FSDP2 puts together as dithered copies, not rounded to the nearest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from oncurve.algorithm.precision import narrow, weight_key

aten = torch.ops.aten
_STAYS = {
    *(aten.empty_like.default, aten.new_zeros.default, aten.clone.default, aten.detach.default, aten._to_copy.default),
    *(aten.slice.Tensor, aten.split.Tensor, aten.view.default, aten.as_strided.default, aten._pin_memory.default),
}
"""Operations of FSDP2 and of a loader on a weight, whose results have its key still."""
_FILLS = {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar}


class DitheredPart(Tensor):
    """The float32 numbers of a matrix, or of some rows of it, with the key of their dither.

    FSDP2 asks a tensor that has ``fsdp_pre_all_gather`` for its own cast before all parts are put together, in the
    forward pass and in the backward pass. For everything else it is the tensor inside.
    """

    _inner: Tensor
    _key: int

    @staticmethod
    def __new__(cls, inner: Tensor, key: int) -> DitheredPart:
        """A tensor of the same shape without memory of its own."""
        return Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor, key: int) -> None:
        self._inner, self._key = inner, key

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DitheredPart({self._inner!r})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*pytree.tree_map_only(cls, plain, args), **pytree.tree_map_only(cls, plain, dict(kwargs or {})))
        first = args[0] if args else None
        if not isinstance(first, cls):
            return out
        if func in _FILLS:
            return first
        return pytree.tree_map_only(Tensor, lambda tensor: cls(tensor, first._key), out) if func in _STAYS else out

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor], None]:
        """The copy of this part, filled up to the height of all parts."""
        height = -(-outer_size[0] // mesh.size())
        first = mesh.get_local_rank() * height * outer_size[1:].numel()
        copy = narrow(self._inner, mp_policy.param_dtype, self._key, first)
        if len(copy) < height:
            copy = torch.cat([copy, copy.new_zeros(height - len(copy), *outer_size[1:])])
        return (copy,), None

    @staticmethod
    def fsdp_post_all_gather(
        outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """All parts as they came, below one another; they lie in ``out`` already where that is given."""
        return None if out is not None else (outputs[0], ())


def plain(part: Tensor) -> Tensor:
    """The numbers themselves."""
    return part._inner if isinstance(part, DitheredPart) else part


def dither_parts(block: nn.Module) -> None:
    """Let the matrices of a block that is about to be cut be put together as dithered copies, those with a key."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in block.modules():
        for name, weight in module._parameters.items():
            key = weight_key(module, name)
            if key is not None and weight is not None and weight.ndim > 1 and weight.dtype == torch.float32:
                if id(weight) not in made:
                    part = DitheredPart(weight.detach(), key)
                    made[id(weight)] = weight, nn.Parameter(part, weight.requires_grad)
                module._parameters[name] = made[id(weight)][1]
