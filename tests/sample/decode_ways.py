"""The ways in which the engine can compute: each must sample the same."""

from __future__ import annotations

import pytest

from oncurve.model import decode_proof as proof
from oncurve.model import decode_torch, decoding, ops_torch
from oncurve.model.decode_cuda_graph import RecordedLayers
from oncurve.model.ops_native import library

WAYS = ("kernels", "torch", "recorded", "module")


def take_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engine compute with the compiled kernels, with torch alone, there in a GPU's few shapes, or through the
    model's own module."""
    if way == "kernels" and library() is None:
        pytest.skip(
            "the kernels are not built: there is no C++ compiler (sudo apt-get install g++), or ONCURVE_KERNELS is 0"
        )
    if way in ("torch", "recorded"):
        monkeypatch.setattr(decoding, "operations", lambda *_: ops_torch)
    if way == "recorded":
        monkeypatch.setattr(decode_torch, "TorchLayers", RecordedLayers)
    if way == "module":
        monkeypatch.setattr(proof, "backbone_of", lambda model: None)
