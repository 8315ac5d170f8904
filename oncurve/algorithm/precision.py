"""Matrix products of 16-bit inputs that are accumulated and returned in float32."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that the safetensors format has for types."""
HALF = (torch.bfloat16, torch.float16)
_GIVES_SUMS = "dtype" in torch.ops.aten.mm.overloads()
"""This torch gives the float32 sums of half-width products as they are (2.8 and later)."""


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b in float32 or better [N, M], of a [N, K] and b [K, M] of one type; written into ``out`` if it is given.

    A GPU sums half-width products in float32 and gives them so; a CPU rounds them first.
    """
    if a.dtype not in HALF:
        return torch.mm(a, b, out=out)
    if a.is_cuda and _GIVES_SUMS:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float() if out is None else out.copy_(a @ b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their type [N, M], of a [N, K] and b [K, M]; see ``linear``."""
    return (a.float() @ b.float()).to(a.dtype) if is_slow(a) else a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in the type of x [N, M].

    A processor without instructions for bfloat16 takes such products in float32 and rounds what they give: the sums are
    the same, and torch's own products of that type are six times slower there.
    """
    if not is_slow(x):
        return nn.functional.linear(x, weight, bias)
    wide = None if bias is None else bias.float()
    return nn.functional.linear(x.float(), weight.float(), wide).to(x.dtype)


def is_slow(x: Tensor) -> bool:
    """Products of this type are slow on this processor, and better taken in float32."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not multiplies_bfloat16()


@cache
def multiplies_bfloat16() -> bool:
    """This processor has instructions with which torch multiplies bfloat16."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def head_type(device: torch.device, compute_type: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """In which type the head is multiplied, in training and in sampling.

    A GPU is ten times slower in float32, so it takes bfloat16 where everything else does. The gradients of logits
    would leave the range of float16.
    """
    return torch.bfloat16 if device.type == "cuda" and compute_type == torch.bfloat16 else wide


def arithmetic_type(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """The type of matrix products here and now: that of autocast where it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else otherwise


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """While it lasts, linear layers with half-width matrices multiply in the type of what they are given."""
    halved = [part for part in model.modules() if type(part) is nn.Linear and part.weight.dtype in HALF]
    for part in halved:
        part.forward = _Widened(part)
    try:
        yield
    finally:
        for part in halved:
            del part.forward


class _Widened:
    """The pass through a linear layer, its matrix in the type of the input for as long as it takes."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, input: Tensor) -> Tensor:
        bias = None if self.layer.bias is None else self.layer.bias.to(input.dtype)
        return nn.functional.linear(input, self.layer.weight.to(input.dtype), bias)


Kernel = Callable[[Tensor, int, int], Tensor]
"""From contiguous float32 numbers, the key and the flat index of the first of them to their bfloat16 copies."""
KERNELS: dict[str, Callable[[], Kernel | None]] = {}
"""By the type of device, what gives a compiled version of the arithmetic below, with the same bits, if there is one."""
_CHUNK = {"cpu": 2**18, "cuda": 2**22}
"""Numbers that are computed at a time, so that what lies between them stays in a cache or takes little memory."""
_KEYS: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
"""By module the keys of its own parameters."""
_SEEDS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The seeds of whole models."""


def key_of(seed: int, name: str) -> int:
    """The part of a weight's thresholds that its index has no part in: 32 bits of a checksum of seed and name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=4).digest(), "little")


def dithered(weight: Tensor, dtype: torch.dtype, key: int, first: int = 0) -> Tensor:
    """The copy of a float32 tensor in bfloat16 or float16, rounded by the thresholds of its numbers.

    ``first`` is the flat index of its first number, for a part of a tensor: whole rows, one after the other.
    Not-a-number and infinity stay what they are.
    """
    flat = weight.detach().contiguous().view(-1)
    if dtype == torch.bfloat16 and (kernel := KERNELS.get(weight.device.type, _no_kernel)()) is not None:
        return kernel(flat, key, first).view(weight.shape)
    return dithered_by_torch(flat, dtype, key, first).view(weight.shape)


def dithered_by_torch(flat: Tensor, dtype: torch.dtype, key: int, first: int) -> Tensor:
    """The same of numbers in one row, without a kernel."""
    out = torch.empty(flat.shape, dtype=dtype, device=flat.device)
    size = _CHUNK.get(flat.device.type, 2**20)
    for start in range(0, len(flat), size):
        part = flat[start : start + size]
        indices = torch.arange(len(part), dtype=torch.int32, device=part.device)
        indices += _signed((first + start) % 2**32)
        out[start : start + size] = _dithered(part, dtype, _thresholds(indices, key))
    return out


def _no_kernel() -> None:
    """A device without one."""


def _thresholds(indices: Tensor, key: int) -> Tensor:
    """The thresholds of numbers with these flat indices: the low half of murmur3's finalizer, in 32 bits."""
    h = indices.to(torch.int32).mul(_signed(0x9E3779B1)).add_(_signed(key))  # the low 32 bits of an index
    h = h.bitwise_xor_(_shifted(h, 16)).mul_(_signed(0x85EBCA6B))
    h = h.bitwise_xor_(_shifted(h, 13)).mul_(_signed(0xC2B2AE35))
    return h.bitwise_xor_(_shifted(h, 16)).bitwise_and_(0xFFFF)


def _shifted(h: Tensor, bits: int) -> Tensor:
    """h >> bits, with zeros from the left."""
    return (h >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(number: int) -> int:
    """The same 32 bits with a sign."""
    return number - 2**32 if number >= 2**31 else number


def _dithered(part: Tensor, dtype: torch.dtype, thresholds: Tensor) -> Tensor:
    dropped = 16 if dtype == torch.bfloat16 else 13  # bits of a float32's mantissa that the type does not have
    bits = part.view(torch.int32)
    moved = thresholds.bitwise_right_shift_(16 - dropped).add_(bits).bitwise_and_(-(1 << dropped)).view(torch.float32)
    return torch.where(part.isfinite(), moved, part, out=moved).to(dtype)


def narrow(weight: Tensor, dtype: torch.dtype, key: int | None, first: int = 0) -> Tensor:
    """The copy of a weight in a type: dithered if it has a key and loses digits, to the nearest otherwise."""
    if key is None or dtype not in HALF or weight.dtype != torch.float32:
        return weight.to(dtype)
    return dithered(weight, dtype, key, first)


def thresholds_at(indices: Tensor, key: int | None) -> Tensor | None:
    """The thresholds of some numbers of a weight, which have these flat indices in it; None without a key."""
    return None if key is None else _thresholds(indices, key)


def narrow_by(numbers: Tensor, dtype: torch.dtype, thresholds: Tensor | None) -> Tensor:
    """The copies of float32 numbers by their thresholds, or to the nearest without."""
    return numbers.to(dtype) if thresholds is None else _dithered(numbers, dtype, thresholds.clone())


def saved_name(name: str) -> str:
    """The name of a parameter in a checkpoint, with an adapter's wrappers around it or without."""
    for wrapper in (".base_layer.", ".default.", ".modules_to_save."):
        name = name.replace(wrapper, ".")
    return name


def use_dither(model: nn.Module, seed: int) -> None:
    """From here on copies of the model's weights are dithered. Tied weights have the first of their names."""
    _SEEDS[model] = seed
    keys = {id(weight): key_of(seed, saved_name(name)) for name, weight in model.named_parameters()}
    for module in model.modules():
        own = {name: keys[id(weight)] for name, weight in module._parameters.items() if weight is not None}
        if own:
            _KEYS[module] = own


def use_key(module: nn.Module, key: int | None) -> None:
    """The same of one module's weight with a key that is known; None rounds it to the nearest."""
    if key is None:
        _KEYS.pop(module, None)
    else:
        _KEYS[module] = {"weight": key}


def seed_of(model: nn.Module) -> int | None:
    """The seed of a model's dither; None where its copies are rounded to the nearest."""
    return _SEEDS.get(model)


def set_dither(model: nn.Module, seed: int | None) -> None:
    """Copies of the model's weights are dithered by this seed, or to the nearest if it is None."""
    if seed is not None:
        return use_dither(model, seed)
    _SEEDS.pop(model, None)
    for module in model.modules():
        _KEYS.pop(module, None)


def weight_key(module: nn.Module | None, name: str = "weight") -> int | None:
    """The key of a module's parameter; None where copies are rounded to the nearest."""
    return None if module is None else _KEYS.get(module, {}).get(name)


def parameter_keys(model: nn.Module) -> dict[str, int]:
    """The keys of a model's parameters, by all of their names in it."""
    return {
        f"{prefix}.{name}" if prefix else name: key
        for prefix, module in model.named_modules()
        for name, key in _KEYS.get(module, {}).items()
    }


def like(model: nn.Module, other: nn.Module) -> None:
    """Let a copy of a model be dithered as the model is."""
    if model in _SEEDS:
        _SEEDS[other] = _SEEDS[model]
    modules = dict(other.named_modules())
    for name, module in model.named_modules():
        if module in _KEYS and name in modules:
            _KEYS[modules[name]] = dict(_KEYS[module])


def keyed_parameters(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """The parameters with thresholds and their keys, as the modules hold them at the moment, each once.

    Those that are in parts at the moment are left out: they have no place in memory of their own.
    """
    seen: set[int] = set()
    for module in model.modules():
        for name, key in _KEYS.get(module, {}).items():
            weight = module._parameters.get(name)
            if weight is not None and id(weight) not in seen and not isinstance(weight, DTensor):
                seen.add(id(weight))
                yield weight, key


class PlacedCopies:
    """Copies of tensors that lie in the memory of a model's weights: the weights themselves, and views of them."""

    def __init__(self, weights: Iterable[tuple[Tensor, int]]) -> None:
        ranges = sorted(
            (weight.data_ptr(), weight.numel(), key) for weight, key in weights if weight.dtype == torch.float32
        )
        self._starts = [start for start, _, _ in ranges]
        self._ranges = ranges

    def copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The copy of a tensor with its strides; None for one that is no part of these weights."""
        where = bisect_right(self._starts, tensor.data_ptr()) - 1
        if where < 0 or not tensor.numel():
            return None
        start, count, key = self._ranges[where]
        first = (tensor.data_ptr() - start) // 4
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if first + extent > count:
            return None
        flat = tensor.detach().as_strided((extent,), (1,))
        return dithered(flat, dtype, key, first).as_strided(tensor.shape, tensor.stride())


class SavedCopies:
    """Copies of a model's weights under the names of a checkpoint.

    What lies in the model's memory, also under another name or cut into pieces, is copied as the model itself does it.
    Weights that were made for the checkpoint, such as those with an adapter added, have thresholds by their names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seed = _SEEDS.get(model)
        self._copies = PlacedCopies(keyed_parameters(model))

    def copy(self, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy in a type; to the nearest for a model that is not dithered."""
        if self._seed is None or dtype not in HALF or weight.dtype != torch.float32:
            return weight.detach().to(dtype)
        copy = self._copies.copy(weight, dtype)
        return dithered(weight, dtype, key_of(self._seed, name)) if copy is None else copy


class _Casts(TorchDispatchMode):
    """Where a weight is cast to 16 bits, by autocast or by a module, its dithered copy takes the place of the cast.

    The cast's gradient is that of any cast: it passes straight through.
    """

    def __init__(self, copies: PlacedCopies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in HALF:
            [weight] = args
            if weight.dtype == torch.float32 and kwargs.get("device") in (None, weight.device):
                copy = self._copies.copy(weight, kwargs["dtype"])
                if copy is not None:
                    return copy
        return func(*args, **kwargs)


def dithered_casts(model: nn.Module) -> AbstractContextManager[object]:
    """While it lasts, whoever casts weights of the model to 16 bits gets dithered copies.

    For passes through the model's own modules under autocast; it costs a few microseconds for every operation.
    """
    weights = list(keyed_parameters(model))
    return _Casts(PlacedCopies(weights)) if weights else nullcontext()
