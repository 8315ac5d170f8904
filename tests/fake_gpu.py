"""What does a GPU's path ask of tensors, where there is no GPU? A CUDA device of shapes and types, without numbers.

Tensors on it are torch's fake ones. An operation that mixes devices, or types or shapes that do not fit, raises the
error that it would raise on a GPU; tensors on the CPU stay real.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
"""A build of torch for CPUs knows no current CUDA device, and asks for one even where nothing is computed."""


class FakeGpu(TorchDispatchMode):
    """Operations with a tensor or a device of CUDA go to torch's fake tensors, all others to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.called: list[str] = []
        """Names of the operations on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        on_gpu = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        if not on_gpu and not any(isinstance(x, FakeTensor) for x in leaves):
            return func(*args, **(kwargs or {}))
        self.called.append(func.name())
        with self.fake:
            return func(*args, **(kwargs or {}))


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """While it lasts, tensors can be put on "cuda"."""
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with patch("torch.cuda._lazy_init", lambda: None), FakeGpu() as gpu:
            yield gpu
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)


def register_guard(folder: Path) -> bool:
    """Teach a build of torch for CPUs that there is a CUDA device; False where there is no compiler."""
    if torch.version.cuda is not None:
        return True
    compiler = shutil.which("g++")
    if compiler is None:
        return False
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    torch_folder = Path(torch.__file__).parent
    headers, libraries = f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-O0", headers, str(source), "-o", str(library), libraries]
    subprocess.run([*command, "-lc10"], check=True, capture_output=True)
    torch.ops.load_library(library)
    return True
