"""Building the compiled kernels at first use, where there is a C++ compiler."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch  # before the library: the kernels run in the threads of torch's own OpenMP

NATIVE = Path(__file__).resolve().parent / "native"
SOURCES = ("elementwise.cpp", "attention.cpp", "decode.cpp")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS += ("-mprefer-vector-width=512",)
BUILD_SECONDS = 180
SWITCH = "ONCURVE_KERNELS"
"""Environment variable; 0 switches the kernels off."""

log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they are switched off, cannot be built, or were built for another OpenMP."""
    if os.environ.get(SWITCH) == "0":
        return None
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or platform.system() != "Linux":
        log.info("no C++ compiler for Linux: sampling and training on the CPU use torch alone and are slower")
        return None
    try:
        built = _build(compiler)
        return ctypes.CDLL(str(built))
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.decode(errors="replace").split()[:60])
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    log.warning("the CPU kernels cannot be built, torch alone is used and is slower: %s", reason)
    return None


def _build(compiler: str) -> Path:
    """The library's path; compiled only if these sources were not compiled here before."""
    target = cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        for name in SOURCES:
            objects.append(f"{scratch}/{name}.o")
            _run([compiler, *FLAGS, "-c", str(NATIVE / name), "-o", objects[-1]])
        # Without -fopenmp here, so that the calls into OpenMP are answered by the runtime that torch has loaded.
        partial = f"{scratch}/kernels.so"
        _run([compiler, "-shared", "-o", partial, *objects])
        os.replace(partial, target)
    return target


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)


def cache_folder() -> Path:
    """The folder in which compiled kernels are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "oncurve"


def _fingerprint(compiler: str) -> str:
    """Changes with the sources, the compiler, its flags, torch and the processor that -march=native speaks of."""
    digest = hashlib.sha256(" ".join((*FLAGS, torch.__version__)).encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.read_bytes())
    digest.update(subprocess.run([compiler, "--version"], capture_output=True, timeout=10).stdout)
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        lines = cpu.read_text(encoding="utf-8", errors="replace").splitlines()
        digest.update("".join(sorted({line for line in lines if line.startswith(("flags", "Features"))})).encode())
    return digest.hexdigest()[:16]
