"""The files of a version: its weights in safetensors files of some dozens of megabytes, written and summed in threads.

A checksum is a chain, so that one large file is summed by one thread; several files are by several. What leaves a GPU
goes to the file in one pass: copied to the machine's memory, added to the checksum, written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from oncurve.algorithm.precision import SAFETENSORS_TYPES
from oncurve.constants import FILE_BYTES
from oncurve.fleet.weights.weight_manifest import SIDE_BY_SIDE, WeightFile
from oncurve.fleet.weights.weight_stream import Shipment

MOST_FILES = 256
Result = TypeVar("Result")


def write_weights(shipment: Shipment, folder: Path) -> tuple[tuple[WeightFile, ...], tuple[str, ...]]:
    """Write all weights of a version into a folder; its files with their checksums, and the names of all weights.

    Raises ValueError for a type that files cannot hold, OSError for a disk that does not take them.
    """
    files = tuple(
        at_once(lambda name, part: _write_file(folder / name, shipment, part), cut_into_files(shipment).items())
    )
    return files, tuple(sorted(shipment.weights))


def at_once(work: Callable[[str, list[str]], Result], parts: Iterable[tuple[str, list[str]]]) -> list[Result]:
    """The results of some work for each file, done in several threads."""
    with ThreadPoolExecutor(min(SIDE_BY_SIDE, os.cpu_count() or 1), thread_name_prefix="writes-weights") as threads:
        return [task.result() for task in [threads.submit(work, name, part) for name, part in parts]]


def cut_into_files(shipment: Shipment) -> dict[str, list[str]]:
    """The names of files with those of their weights, the same for every version of a model."""
    parts = _cut(shipment)
    names = [f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors" for index in range(len(parts))]
    return dict(zip(names if len(parts) > 1 else ["model.safetensors"], parts, strict=True))


def _cut(shipment: Shipment) -> list[list[str]]:
    """The names of the weights of each file, the largest files first: who begins them last would be waited for."""
    limit = max(FILE_BYTES, shipment.num_bytes // MOST_FILES)
    parts: list[list[str]] = [[]]
    sizes = [0]
    for name in shipment.weights:
        size = shipment.bytes_of(name)
        if parts[-1] and sizes[-1] + size > limit:
            parts.append([])
            sizes.append(0)
        parts[-1].append(name)
        sizes[-1] += size
    order = sorted(range(len(parts)), key=lambda index: -sizes[index])
    return [parts[index] for index in order]


def _write_file(path: Path, shipment: Shipment, names: Sequence[str]) -> WeightFile:
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for piece in file_pieces(shipment, names):
            digest.update(piece)
            write_all(file, piece)
            size += len(piece)
    return WeightFile(path.name, size, digest.hexdigest())


def file_pieces(shipment: Shipment, names: Sequence[str]) -> Iterator[memoryview]:
    """The bytes of a file: the length of its header, the header, the weights. Wide types stand before narrow ones, so
    that each begins at a multiple of its own width."""
    ordered = sorted(names, key=lambda name: -shipment.type_of(shipment.weights[name]).itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        weight = shipment.weights[name]
        begin, end = end, end + shipment.bytes_of(name)
        shape, dtype = list(weight.shape), _type_name(name, shipment.type_of(weight))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    yield memoryview(len(header_bytes).to_bytes(8, "little") + header_bytes)
    for name in ordered:
        yield in_host_memory(shipment.copy(name))


def in_host_memory(weight: Tensor) -> memoryview:
    """The bytes of a weight in this machine's memory."""
    there = weight.detach().to("cpu").contiguous()
    return there.reshape(-1).view(torch.uint8).numpy().data


def write_all(file: io.FileIO, piece: memoryview) -> None:
    """Write every byte: the system takes two gigabytes at a time."""
    while len(piece):
        piece = piece[file.write(piece) :]


def _type_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in SAFETENSORS_TYPES:
        raise ValueError(f"{name} is of the type {dtype}, which files of weights do not hold")
    return SAFETENSORS_TYPES[dtype]
