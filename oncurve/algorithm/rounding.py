"""Copies of float32 weights in 16 bits that are right on average: a fixed dither.

A published model lies on bfloat16's grid. With float32 master weights and copies that are rounded to the nearest, an
update of less than half a step of the grid does not exist for the policy that samples, nor for its gradient, until
many of them have added up. Here each weight has one threshold t, uniform on 0 .. 65535 and fixed for the whole run:

    copy(w) = (bits(w) + t) >> 16, read as bfloat16        t = hash(seed, name of the weight, flat index in it)

The expected copy is the weight. A weight moves to its neighbour on the grid once, when it has gone the share of the way
that its threshold asks for, and a weight on the grid stays on it. There is no state: whoever has weights, names and the
seed makes the same copy, be it a resumed run, a part of a divided matrix, or a server.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from oncurve.algorithm.precision import HALF

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
