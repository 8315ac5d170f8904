"""The library behind the pretend GPU: how it is built, and how it gets into a process before torch does."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.abc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
PARTS = ("memory.cpp", "counting.cpp", "hooks.cpp", "recording.cpp", "kernels.cpp")
NO_COMPILER = "no g++, which the pretend GPU is compiled with"


def has_compiler() -> bool:
    """The library can be built here."""
    return shutil.which("g++") is not None


def library(torch_folder: Path) -> Path:
    """The library for a torch, built where it is not there yet."""
    sources = [FOLDER / "device.h", FOLDER / "aliases.h", *(FOLDER / part for part in PARTS)]
    version = (torch_folder / "version.py").read_text(encoding="utf-8")
    known = hashlib.sha256("".join([version, str(torch_folder), *(one.read_text() for one in sources)]).encode())
    folder = Path(tempfile.gettempdir()) / f"pretend-gpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"{known.hexdigest()[:16]}.so"
    if not built.exists():
        _build(torch_folder, built)
    return built


def _build(torch_folder: Path, target: Path) -> None:
    if not has_compiler():
        raise SystemExit(NO_COMPILER)
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        whole, made = Path(place) / "whole.cpp", Path(place) / "made.so"
        whole.write_text("".join(f'#include "{FOLDER / part}"\n' for part in PARTS))
        headers = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
        found = subprocess.run(
            ["g++", "-std=c++20", "-shared", "-fPIC", "-O0", *headers, str(whole), "-o", str(made),
             f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if found.returncode:
            raise SystemExit(f"the pretend GPU could not be compiled:\n{found.stderr[-4000:]}")
        made.replace(target)


class _Loader(importlib.abc.Loader):
    """Torch's own, with the library before it and the answers of ``torch.cuda`` after it."""

    def __init__(self, spec: ModuleSpec) -> None:
        assert spec.loader is not None
        assert spec.origin is not None
        self.loader, self.folder = spec.loader, Path(spec.origin).parent

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        built = library(self.folder)
        for one in (self.folder / "lib/libc10.so", self.folder / "lib/libtorch_cpu.so", built):
            ctypes.CDLL(str(one), mode=ctypes.RTLD_GLOBAL)
        self.loader.exec_module(module)
        from pretend import device

        device.install()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec)
        return spec


def wait_for_torch() -> None:
    """From now on an import of torch finds a GPU, in this process and in those that it starts."""
    if "torch" in sys.modules:
        raise SystemExit("the pretend GPU has to come before torch, which is imported already")
    os.environ["PRETEND_GPU"] = str(FOLDER.parent)
    before, site = os.environ.get("PYTHONPATH", ""), str(FOLDER / "site")
    if site not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([site, before] if before else [site])
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
