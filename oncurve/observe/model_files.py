"""Weight files of a model's folder: which are read, what is in them, and what lies beside them.

Names, types and shapes are in the headers of safetensors files and in the index of torch's; no weight is loaded. The
files that are read are those that transformers reads.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from oncurve.constants import ADAPTER_CONFIG
from oncurve.observe.run_model import read_object
from oncurve.run_errors import CheckpointError
from oncurve.wording import counted

WHOLE = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files with which the weights of a whole model begin, in the order in which transformers looks for them."""
ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
"""The same of an adapter, in peft's order."""
GGUF_ACCOUNT = "gguf.json"
"""File of a folder that was made of a GGUF file: where that is, a sentence on it, its tensors by type and shape."""
QUANTIZATION = ("quantization_config", "compression_config")
"""Keys of a config.json that say how weights of few bits are to be read."""
PROBED = 512
"""Numbers at the beginning, in the middle and at the end of a tensor by which two of one name are compared."""
NEAR = 2.0**-7
"""Difference of two numbers that rounding to bfloat16 explains, as a part of the larger."""
STATES = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "reference", "trained")
"""Beginnings of the names of files that hold the state of a training run beside its model."""
BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
        "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # fmt: skip
"""Bits of a number by its type in a safetensors file; 8 of all others."""
STORAGES = {"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
            "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
            "ByteStorage": "U8", "BoolStorage": "BOOL"}  # fmt: skip
"""The same types by the names of torch's storages."""


PACKED = ("I8", "U8", "I16", "U16", "I32", "U32")
"""Types of integers in which weights of few bits are stored."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: str
    dtype: str
    """As in safetensors: F32, BF16, F8_E4M3, I8."""
    shape: tuple[int, ...]
    record: str
    """Record of a torch file in which its numbers are; empty in a safetensors file."""
    start: int
    """Place of its first byte in the file, or in the record."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return prod(self.shape) * BITS.get(self.dtype, 8) // 8

    @property
    def has_few_bits(self) -> bool:
        """A matrix of integers of 32 bits and less, or floating numbers of eight: no weight until something scales it.

        Masks begin with a size of 1, and tables of indices have 64 bits.
        """
        is_matrix = len(self.shape) > 1 and self.shape[0] > 1
        return self.dtype.startswith(("F8", "F4", "F6")) or (is_matrix and self.dtype in PACKED)


@dataclass(frozen=True)
class ModelFiles:
    """The tensors in the weight files of a folder."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    """The tensors that are read, by their names in the files; empty where they can't be listed."""
    unread: tuple[str, ...] = ()
    """Weight files that lie beside those that are read, and hold nothing else under the same names."""
    remarks: tuple[str, ...] = field(default=())
    """Oddities that change no number."""
    made_of: Mapping[str, Any] = field(default_factory=dict)
    """The account of the GGUF file that the folder was made of; empty for any other."""

    @property
    def files(self) -> list[str]:
        """The files that are read."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes of the tensors by their type."""
        counts = Counter[str]()
        for tensor in self.tensors.values():
            counts[tensor.dtype] += tensor.num_bytes
        return dict(counts)


def read_model_files(folder: str | Path) -> ModelFiles:
    """The weight files of a folder with a model or an adapter.

    Raises CheckpointError where nobody can say which weights are meant: two sets of them, an index that does not fit
    its files, weights of few bits and nothing that says how they are to be read, a file that is cut off.
    """
    folder = Path(folder)
    names = sorted(os.listdir(folder))
    config = _known(folder / "config.json")
    heads = _whole_heads(config, names)
    is_adapter = ADAPTER_CONFIG in names
    if is_adapter and heads:
        base = _known(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        raise CheckpointError(
            f"{folder} holds two models: whole weights in {heads[0]}, and the adapter of {ADAPTER_CONFIG}, whose base "
            f"is {base!r}. Merging an adapter and saving into its folder leaves that. Move {ADAPTER_CONFIG} away to "
            f"train the whole weights, or {heads[0]} to train the adapter over its base"
        )
    heads = [name for name in ADAPTER if name in names] if is_adapter else heads
    if not heads:
        _refuse_without_weights(folder, names, is_adapter=is_adapter)
    tensors, remarks = _read_set(folder, heads[0])
    if not any(config.get(key) for key in QUANTIZATION):
        _refuse_few_bits(folder, tensors)
    unread = _compare_others(folder, names, tensors, is_adapter=is_adapter)
    made_of = _known(folder / GGUF_ACCOUNT)
    return ModelFiles(folder, tensors, unread, (*remarks, *([made_of["sentence"]] if made_of else [])), made_of)


def has_all_weights(folder: Path) -> bool:
    """No file of the weights is missing, as in a download that was not begun or was interrupted."""
    names = os.listdir(folder)
    heads = _whole_heads(_known(folder / "config.json"), names) or [name for name in ADAPTER if name in names]
    if not heads or heads[0] not in names:
        return False
    parts = _known(folder / heads[0]).get("weight_map", {}).values() if heads[0].endswith(".json") else ()
    return {*names}.issuperset(parts)


def _whole_heads(config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The file with which whole weights begin: the one that config.json names, or those with the usual names."""
    first = config.get("transformers_weights")
    return [first] if isinstance(first, str) else [name for name in WHOLE if name in names]


def _known(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    return read_object(path) if os.path.isfile(path) else {}


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors in a safetensors file, or in one of torch's; empty for torch's format before 1.6.

    Raises CheckpointError for a file that is cut off or damaged.
    """
    try:
        if path.suffix != ".safetensors":
            return _read_torch_file(path)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size == int.from_bytes(b"version ", "little"):
                raise CheckpointError(
                    f"{path} is a pointer of Git LFS, not the weights. Run `git lfs pull` in its folder"
                )
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(
                path.name, about["dtype"], tuple(about["shape"]), "", 8 + size + about["data_offsets"][0]
            )
            for name, about in header.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, EOFError) as error:
        raise CheckpointError(f"{path}: the file is damaged ({error}). Download or save it again") from None
    except (zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: the file is damaged ({error}). Download or save it again") from None
    end = max((tensor.start + tensor.num_bytes for tensor in tensors.values()), default=0)
    if end > path.stat().st_size:
        raise CheckpointError(
            f"{path} is cut off: it has {path.stat().st_size:,} bytes of {end:,}. Download or save it again"
        )
    return tensors


class _Listed(NamedTuple):
    """The stand-in of a tensor while its file is listed."""

    storage: tuple[str, str]
    offset: int
    shape: tuple[int, ...]


class _Lister(pickle.Unpickler):
    """Reads names, types and shapes from the pickle of a torch file; no code that it names is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if name == "_rebuild_tensor_v2":
            return lambda storage, offset, shape, *others: _Listed(storage, offset, tuple(shape))
        if name == "_rebuild_parameter":
            return lambda tensor, *others: tensor
        return name if module == "torch" and name in STORAGES else lambda *others: None

    def persistent_load(self, known: Any) -> Any:
        return str(known[1]), str(known[2])


def _read_torch_file(path: Path) -> dict[str, StoredTensor]:
    if not zipfile.is_zipfile(path):
        return {}
    with zipfile.ZipFile(path) as archive:
        [index] = [name for name in archive.namelist() if name.endswith("data.pkl")]
        listed = _Lister(archive.open(index)).load()
    root, tensors = index.removesuffix("data.pkl"), dict[str, StoredTensor]()
    for name, tensor in listed.items() if isinstance(listed, dict) else ():
        if isinstance(tensor, _Listed):
            dtype = STORAGES.get(tensor.storage[0], tensor.storage[0])
            start = tensor.offset * BITS.get(dtype, 8) // 8
            tensors[name] = StoredTensor(path.name, dtype, tensor.shape, f"{root}data/{tensor.storage[1]}", start)
    return tensors


def _read_set(folder: Path, head: str) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of one file, or of all that an index names, and what is odd about the index."""
    if not head.endswith(".index.json"):
        return read_tensors(folder / head), []
    sources = _known(folder / head).get("weight_map")
    if not isinstance(sources, dict) or not sources or not all(isinstance(file, str) for file in sources.values()):
        raise CheckpointError(f"{folder / head} has no weight_map. Download or save it again")
    files = sorted(set(sources.values()))
    if absent := [file for file in files if not os.path.isfile(folder / file)]:
        raise CheckpointError(
            f"{folder / head} names {counted(len(files), 'file')}, and {len(absent)} of them are not there, such as "
            f"{absent[0]}. Download or save the model again"
        )
    tensors, twice = dict[str, StoredTensor](), list[str]()
    for file in files:
        stored = read_tensors(folder / file)
        twice += [name for name in stored if name in tensors]
        tensors |= stored
    if twice:
        raise CheckpointError(
            f"{folder / head}: two of the files that it names hold the same {counted(len(twice), 'tensor')}, such as "
            f"{twice[0]}: they are parts of two models. Download or save the model again"
        )
    unlisted, absent = sorted(tensors.keys() - sources.keys()), sorted(sources.keys() - tensors.keys())
    remarks = []
    if tensors and absent:
        remarks.append(f"{head} names {counted(len(absent), 'tensor')} that no file has, such as {absent[0]}")
    if unlisted:
        remarks.append(
            f"{head} does not name {counted(len(unlisted), 'tensor')} of its files, such as {unlisted[0]}; what is in "
            f"the files is read"
        )
    return tensors, remarks


def _refuse_without_weights(folder: Path, names: list[str], *, is_adapter: bool) -> None:
    others = [name for name in names if name.endswith((".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt"))]
    what = f"the weights of the adapter, {ADAPTER[0]}" if is_adapter else "no weights, such as model.safetensors"
    lacks = f"{folder}: {what} are not there" if is_adapter else f"{folder}: the folder has {what}"
    beside = f" What it has, {', '.join(others[:3])}, is read by other programs." if others else ""
    raise CheckpointError(f"{lacks}.{beside} Download or save it again")


def _refuse_few_bits(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    few = {name: tensor for name, tensor in tensors.items() if tensor.has_few_bits}
    if not few:
        return
    name, kinds = next(iter(few)), ", ".join(sorted({tensor.dtype for tensor in few.values()}))
    raise CheckpointError(
        f"{folder}: {len(few)} of {counted(len(tensors), 'tensor')} are of the type {kinds}, such as {name}, and "
        f"config.json has no quantization_config that says how they are to be read: taken as they are they are noise. "
        f"Put the published config.json there, or a copy of the model in bfloat16"
    )


def _compare_others(
    folder: Path, names: list[str], tensors: Mapping[str, StoredTensor], *, is_adapter: bool
) -> tuple[str, ...]:
    """The weight files that are not read. Raises CheckpointError for one with other numbers under the same names."""
    used = {tensor.file for tensor in tensors.values()}
    others = [name for name in names if name.endswith((".safetensors", ".bin", ".gguf", ".pt", ".pth"))]
    others = [name for name in others if name not in used and name.startswith("adapter_") is is_adapter]
    others = [name for name in others if not name.startswith(STATES)]
    for other in others if tensors else ():
        if not other.endswith((".safetensors", ".bin")):
            continue
        stored = read_tensors(folder / other)
        differ = [
            name for name, tensor in stored.items() if name in tensors and not _are_same(folder, tensors[name], tensor)
        ]
        if differ:
            known = tensors[differ[0]]
            raise CheckpointError(
                f"{folder} holds two sets of weights: {len(differ)} of {counted(len(stored), 'tensor')} in {other} are "
                f"others than those of the same names in {known.file}, such as {differ[0]}. Which are meant? Move the "
                f"others away"
            )
    return tuple(others)


def _are_same(folder: Path, known: StoredTensor, other: StoredTensor) -> bool:
    """Two tensors of a name have one shape, and the same numbers where they are probed, but for their rounding."""
    if known.shape != other.shape:
        return False
    if known.dtype == other.dtype:
        return _probe(folder, known) == _probe(folder, other)
    numbers = [_numbers(_probe(folder, tensor), tensor.dtype) for tensor in (known, other)]
    return all(abs(a - b) <= max(NEAR * max(abs(a), abs(b)), 1e-7) for a, b in zip(*numbers, strict=False))


def _probe(folder: Path, tensor: StoredTensor) -> bytes:
    """Some of a tensor's numbers."""
    count, width = prod(tensor.shape), BITS.get(tensor.dtype, 8)
    path, probed = folder / tensor.file, b""
    with zipfile.ZipFile(path).open(tensor.record) if tensor.record else path.open("rb") as file:
        for first in (0, count // 2, max(0, count - PROBED)):
            file.seek(tensor.start + first * width // 8)
            probed += file.read(min(PROBED, count - first) * width // 8)
    return probed


def _numbers(data: bytes, dtype: str) -> Sequence[float]:
    """Numbers of a floating type; none of any other."""
    if dtype == "BF16":
        data = b"".join(b"\0\0" + data[start : start + 2] for start in range(0, len(data), 2))
    code = {"BF16": "f", "F32": "f", "F16": "e", "F64": "d"}.get(dtype)
    return () if code is None else struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
