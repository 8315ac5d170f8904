"""Bindings of the compiled kernels: the operations of ``ops_torch``, on contiguous CPU tensors; and which are used."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from oncurve.algorithm.precision import KERNELS, Kernel
from oncurve.model import ops_torch
from oncurve.model.ops_torch import Heads, Rotary
from oncurve.model.packing import Layout

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


_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_POINTER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "add_norm": (*[_POINTER] * 4, _REAL, _POINTER, _POINTER, _INTEGER, _INTEGER),
    "norm_backward": (*[_POINTER] * 6, _INTEGER, _INTEGER),
    "swiglu": (_POINTER, _POINTER, _INTEGER, _INTEGER),
    "swiglu_backward": (*[_POINTER] * 3, _INTEGER, _INTEGER),
    "head": (_POINTER, _POINTER, _REAL, *[_POINTER] * 3, _INTEGER, _INTEGER),
    "head_backward": (_POINTER, _POINTER, _REAL, *[_POINTER] * 4, _INTEGER, _INTEGER),
    "attention": (*[_POINTER] * 8,),
    "attention_backward": (*[_POINTER] * 9,),
    "pack": (_POINTER, _POINTER, *[_INTEGER] * 4),
    "product": (*[_POINTER] * 3, *[_INTEGER] * 3),
    "store_prompts": (*[_POINTER] * 5, _INTEGER, *[_POINTER] * 3),
    "decode": (*[_POINTER] * 6, _REAL, *[_POINTER] * 3),
    "draw": (_POINTER, _POINTER, _REAL, _POINTER, _POINTER, _INTEGER, _INTEGER),
}


class NativeOps:
    """The operations between matrix products as kernels, for one compute type (float32 or bfloat16)."""

    def __init__(self, library: ctypes.CDLL, compute_type: torch.dtype) -> None:
        name = _NAMES[compute_type]
        self.compute_type = compute_type
        for operation, signature in _SIGNATURES.items():
            single = operation in ("head", "head_backward", "draw")
            function = library[f"{operation}_{'float32' if single else name}"]
            function.argtypes, function.restype = signature, None
            setattr(self, f"_{operation}", function)
        wide = library["add_norm_wide_bfloat16" if name == "bfloat16" else "add_norm_float32"]
        wide.argtypes, wide.restype = _SIGNATURES["add_norm"], None
        self._add_norm_wide: Callable[..., None] = wide
        self._packed_size: Callable[..., int] = library.packed_size
        self._packed_size.argtypes, self._packed_size.restype = (_INTEGER, _INTEGER), _INTEGER  # type: ignore[attr-defined]
        self._decode_scratch: Callable[..., int] = library.decode_scratch
        self._decode_scratch.argtypes, self._decode_scratch.restype = (_POINTER,), _INTEGER  # type: ignore[attr-defined]

    _add_norm: Callable[..., None]
    _norm_backward: Callable[..., None]
    _swiglu: Callable[..., None]
    _swiglu_backward: Callable[..., None]
    _head: Callable[..., None]
    _head_backward: Callable[..., None]
    _attention: Callable[..., None]
    _attention_backward: Callable[..., None]
    _store_prompts: Callable[..., None]
    _pack: Callable[..., None]
    _product: Callable[..., None]
    _decode: Callable[..., None]
    _draw: Callable[..., None]

    def _narrow(self, *tensors: Tensor) -> list[int]:
        return _addresses(self.compute_type, *tensors)

    def add_norm(
        self,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        epsilon: float,
        out_type: torch.dtype,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``torch_ops.add_norm``; a ``scale`` that is given is computed again, in the same pass."""
        total = x if y is None else torch.empty_like(x)
        out, scale = torch.empty(x.shape, dtype=out_type), torch.empty(len(x))
        self.add_norm_into(x, y, total, weight, epsilon, out, scale)
        return total, out, scale

    def add_norm_into(
        self,
        x: Tensor,
        y: Tensor | None,
        total: Tensor,
        weight: Tensor,
        epsilon: float,
        out: Tensor,
        scale: Tensor | None,
    ) -> None:
        """The same into tensors that are there; ``total`` may be ``x``."""
        call = self._add_norm_wide if out.dtype == torch.float32 else self._add_norm
        call(
            *_wide(x),
            None if y is None else self._narrow(y)[0],
            *_wide(total, weight),
            epsilon,
            *_addresses(out.dtype, out),
            None if scale is None else _wide(scale)[0],
            *x.shape,
        )

    def norm_backward(
        self, g: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_x: Tensor, grad_weight: Tensor
    ) -> None:
        """See ``torch_ops.norm_backward``."""
        self._norm_backward(*self._narrow(g), *_wide(x, weight, scale, grad_x, grad_weight), *x.shape)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See ``torch_ops.swiglu``."""
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._swiglu(*self._narrow(gate_up, out), rows, width // 2)
        return out

    def swiglu_backward(self, g: Tensor, gate_up: Tensor) -> Tensor:
        """See ``torch_ops.swiglu_backward``."""
        out = torch.empty_like(g)
        self._swiglu_backward(*self._narrow(g, gate_up, out), *g.shape)
        return out

    def attention(self, qkv: Tensor, rotary: Rotary, layout: Layout, sizes: Heads) -> tuple[Tensor, Tensor]:
        """See ``torch_ops.attention``; ``qkv`` stays. Kept are the logarithms of the softmax's sums [N, heads]."""
        mixed = qkv.new_empty(len(qkv), sizes.heads * sizes.head_size)
        logs = torch.empty(len(qkv), sizes.heads)
        self._attention(
            *self._narrow(qkv),
            *_wide(rotary.cosine, rotary.sine),
            *_integers(layout.spans, layout.groups),
            *self._narrow(mixed),
            *_wide(logs),
            _runs(layout, sizes),
        )
        return mixed, logs

    def attention_backward(
        self, grad_mixed: Tensor, qkv: Tensor, saved: Tensor, rotary: Rotary, layout: Layout, sizes: Heads
    ) -> Tensor:
        """See ``torch_ops.attention_backward``."""
        grad_qkv = torch.empty(qkv.shape)
        self._attention_backward(
            *self._narrow(qkv),
            *_wide(rotary.cosine, rotary.sine),
            *_integers(layout.spans, layout.groups),
            *self._narrow(grad_mixed),
            *_wide(saved, grad_qkv),
            _runs(layout, sizes),
        )
        return grad_qkv

    def own_cache(self, slots: int, positions: int, sizes: Heads, dtype: torch.dtype) -> Tensor:
        """See ``torch_ops.own_cache``; keys lie in blocks of 16 positions [D, 16]."""
        return torch.zeros(2, slots, sizes.kv_heads, positions, sizes.head_size, dtype=dtype)

    def prompt_cache(self, slots: int, positions: int, sizes: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of prompts, packed: [slots, kv_heads, numbers of a head, positions], padded."""
        wide = [-(-sizes.head_size // block) * block for block in (32, 16)]
        keys, values = (torch.zeros(slots, sizes.kv_heads, d, positions, dtype=dtype) for d in wide)
        return keys, values

    def store_prompts(
        self, qkv: Tensor, rotary: Rotary, layout: Layout, slots: Tensor, caches: tuple[Tensor, Tensor], sizes: Heads
    ) -> None:
        """See ``torch_ops.store_prompts``."""
        heads = [sizes.heads, sizes.kv_heads, sizes.head_size, 0, caches[0].shape[-1]]
        self._store_prompts(
            *self._narrow(qkv),
            *_wide(rotary.cosine, rotary.sine),
            *_integers(layout.spans, slots),
            len(slots),
            *self._narrow(*caches),
            _array(heads),
        )

    def head_matrix(self, weight: Tensor, dtype: torch.dtype, key: int | None = None) -> Tensor:
        """See ``torch_ops.head_matrix``; packed where many rows are multiplied faster by this kernel: in bfloat16."""
        return self.pack([weight], [key]) if self.compute_type == torch.bfloat16 else weight.to(dtype)

    def logits(self, hidden: Tensor, matrix: Tensor, vocabulary: int, out: Tensor | None = None) -> Tensor:
        """See ``torch_ops.logits``.

        What a row gives does not depend on the rows beside it where the matrix is packed. In bfloat16 both are rounded
        to it, and their products are summed in float32.
        """
        if matrix.ndim == 2:
            return torch.mm(hidden, matrix.T, out=out)
        out = torch.empty(len(hidden), vocabulary) if out is None else out
        self._product(*_wide(hidden), *self._narrow(matrix), *_wide(out), *hidden.shape, vocabulary)
        return out

    def head(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """See ``torch_ops.head``."""
        logprobs, entropy, normalizer = torch.empty(3, len(logits))
        self._head(
            *_wide(logits),
            *_integers(targets),
            1 / temperature,
            *_wide(logprobs, entropy, normalizer),
            *logits.shape,
        )
        return logprobs, entropy, normalizer

    def head_backward(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
    ) -> Tensor:
        """See ``torch_ops.head_backward``."""
        self._head_backward(*_wide(logits), *_integers(targets), 1 / temperature, *_wide(*saved, *grads), *logits.shape)
        return logits

    def pack(self, matrices: Sequence[Tensor], keys: Sequence[int | None] | None = None) -> Tensor:
        """Matrices [outputs, inputs] with the same inputs, below one another, as ``decode`` reads them.

        In bfloat16 those with a key are rounded by its thresholds, the others to the nearest.
        """
        inputs, outputs = matrices[0].shape[1], sum(len(matrix) for matrix in matrices)
        packed = torch.zeros(self._packed_size(outputs, inputs), dtype=self.compute_type)
        first = 0
        for matrix, key in zip(matrices, keys or [None] * len(matrices), strict=True):
            wide = matrix.detach().float().contiguous()
            self._pack(*_wide(wide), *self._narrow(packed), first, *matrix.shape, -1 if key is None else key)
            first += len(matrix)
        return packed

    def decode_scratch(self, sizes: Sequence[int]) -> Tensor:
        """The scratch memory that ``decode`` needs in calls of these sizes or of fewer rows."""
        return torch.zeros(self._decode_scratch(_array(sizes)), dtype=self.compute_type)

    def decode(
        self,
        layers: Tensor,
        residual: Tensor,
        rotary: Rotary,
        addresses: Tensor,
        last_norm: tuple[Tensor, float],
        scratch: Tensor,
        sizes: Sequence[int],
    ) -> Tensor:
        """All layers for one token per row: residual [R, H], which is overwritten, to the normed output [R, H].

        ``layers`` holds the addresses of weights and caches; ``backbone.native_decoding`` makes it.
        """
        weight, epsilon = last_norm
        out = torch.empty_like(residual)
        self._decode(
            *_integers(layers),
            *_wide(residual, rotary.cosine, rotary.sine),
            *_integers(addresses),
            *_wide(weight),
            epsilon,
            *self._narrow(scratch),
            *_wide(out),
            _array(sizes),
        )
        return out

    def draw(self, logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of unrestricted sampling, as ``sample.draw`` computes them."""
        tokens, logprobs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
        drawn = (*_integers(tokens), *_wide(logprobs))
        self._draw(*_wide(logits), *_addresses(torch.float64, uniform), temperature, *drawn, *logits.shape)
        return tokens, logprobs


def dither_kernel() -> Kernel | None:
    """The compiled arithmetic of ``algorithm.precision``; None where there are no kernels."""
    built = library()
    if built is None:
        return None
    function = built.dither_bfloat16
    function.argtypes, function.restype = (_POINTER, _POINTER, *[_INTEGER] * 3), None

    def dither(numbers: Tensor, key: int, first: int) -> Tensor:
        out = torch.empty(numbers.shape, dtype=torch.bfloat16)
        function(*_wide(numbers), *_addresses(torch.bfloat16, out), key, first, len(numbers))
        return out

    return dither


KERNELS["cpu"] = cache(dither_kernel)


def _addresses(dtype: torch.dtype, *tensors: Tensor) -> list[int]:
    """Addresses of tensors. A kernel knows neither strides nor types: one that differs would make it write elsewhere.

    Raises ValueError for a tensor that is not contiguous or of another type.
    """
    for tensor in tensors:
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"a kernel needs contiguous tensors of {dtype}, got {tensor.dtype} {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )
    return [tensor.data_ptr() for tensor in tensors]


def _wide(*tensors: Tensor) -> list[int]:
    return _addresses(torch.float32, *tensors)


def _integers(*tensors: Tensor) -> list[int]:
    return _addresses(torch.int64, *tensors)


def _runs(layout: Layout, sizes: Heads) -> ctypes.Array[ctypes.c_int64]:
    return _array([sizes.heads, sizes.kv_heads, sizes.head_size, len(layout.groups) - 1, layout.num_prompts])


def _array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


Ops = NativeOps | ModuleType


@cache
def operations(compute_type: torch.dtype, device: str = "cpu") -> Ops:
    """The operations for a compute type on a type of device."""
    built = library() if device == "cpu" and compute_type in (torch.float32, torch.bfloat16) else None
    return ops_torch if built is None else NativeOps(built, compute_type)
