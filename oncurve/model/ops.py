"""Choice of the operations between matrix products: compiled kernels where they can be used, torch elsewhere."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from oncurve.model import ops_torch
from oncurve.model.build import library
from oncurve.model.ops_native import NativeOps

Ops = NativeOps | ModuleType


@cache
def operations(compute_type: torch.dtype, device: str = "cpu") -> Ops:
    """The operations for a compute type on a type of device."""
    built = library() if device == "cpu" and compute_type in (torch.float32, torch.bfloat16) else None
    return ops_torch if built is None else NativeOps(built, compute_type)
