"""What computes the operations between matrix products? The kernels where they can, torch elsewhere."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from oncurve.trunk import torch_ops
from oncurve.trunk.build import library
from oncurve.trunk.native_ops import NativeOps

Ops = NativeOps | ModuleType


@cache
def operations(compute_type: torch.dtype, device: str = "cpu") -> Ops:
    """The operations for a compute type on a type of device."""
    built = library() if device == "cpu" and compute_type in (torch.float32, torch.bfloat16) else None
    return torch_ops if built is None else NativeOps(built, compute_type)
