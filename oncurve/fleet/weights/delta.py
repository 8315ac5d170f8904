"""Difference of two versions of a file of weights, exact to the bit, in as few bytes as the standard library allows.

Weights in half width change rarely: a step of an optimizer moves most of them by less than their last digit. Each
tensor is viewed as whole numbers and coded in the smallest of three ways:

    sparse   the gaps between changed numbers, and by how much each changed
    dense    by how much every number changed, byte plane by byte plane
    whole    the new bytes

Differences are taken modulo the width and zigzag-coded, so that the neighbour of a number is 1 or 2. Nothing but the
standard library and numpy is needed here, because vLLM's environment imports it too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Numbers: TypeAlias = NDArray[Any]
DELTA = ".delta"
"""End of the name of a difference, after the name of the file that it belongs to."""
FORMAT = 1
SPARSE_BELOW, DENSE_ABOVE = 0.6, 0.25
"""Share of changed numbers up to which, and from which on, an encoding is tried at all."""
_TYPES: Mapping[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MOST_BYTES = 10
"""Most bytes of a number of variable length: 64 bits, seven at a time."""


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor within its file."""

    begin: int
    end: int
    width: int
    """Bytes of a number."""


@dataclass(frozen=True, slots=True)
class Coded:
    """The difference of one file."""

    data: bytes
    changed: int
    """Numbers that differ."""
    total: int
    """Numbers that there are."""


def encode(base: Bytes, new: Bytes, regions: Iterable[Region]) -> Coded:
    """The difference that turns ``base`` into ``new``. Regions lie behind one another; the gaps count as bytes.

    Raises ValueError for files of different sizes.
    """
    if base.size != new.size:
        raise ValueError(f"a file of {base.size} bytes cannot become one of {new.size}")
    parts, streams, changed, total = [], [], 0, 0
    for region in _cover(regions, new.size):
        old, young = (_numbers(data, region) for data in (base, new))
        total += young.size
        positions = np.flatnonzero(old != young)
        if not positions.size:
            continue
        changed += positions.size
        name, coded = _smallest(old, young, positions)
        parts.append(
            [name, region.begin, region.end, region.width, int(positions.size), [len(stream) for stream in coded]]
        )
        streams += coded
    header = zlib.compress(json.dumps({"format": FORMAT, "size": new.size, "parts": parts}).encode())
    return Coded(b"".join([len(header).to_bytes(8, "little"), header, *streams]), changed, total)


def apply(data: bytes, base: Bytes) -> Bytes:
    """The new bytes; ``base`` stays as it is. That it was the right one, a checksum of the result must tell.

    Raises ValueError for a difference that is damaged, or of a file of another size.
    """
    try:
        return _apply(data, base)
    except (zlib.error, IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(f"the difference is damaged: {error or type(error).__name__}") from None


def _apply(data: bytes, base: Bytes) -> Bytes:
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(zlib.decompress(data[8:begin]))
    if header["format"] != FORMAT or header["size"] != base.size:
        raise ValueError(f"it is for a file of {header['size']} bytes in format {header['format']}, not {base.size}")
    new = base.copy()
    for name, first, last, width, count, sizes in header["parts"]:
        if not (0 <= first <= last <= new.size) or (last - first) % width or not 0 <= count <= (last - first) // width:
            raise ValueError("the difference names places that the file does not have")
        streams = []
        for size in sizes:
            streams.append(data[begin : begin + size])
            begin += size
        _DECODERS[name](_numbers(new, Region(first, last, width)), count, streams)
    return new


def _cover(regions: Iterable[Region], size: int) -> Iterable[Region]:
    """The regions and what lies between them. A region whose size is no multiple of its width counts as bytes."""
    at = 0
    for region in [*regions, Region(size, size, 1)]:
        if at < region.begin:
            yield Region(at, region.begin, 1)
        width = region.width if region.width in _TYPES and (region.end - region.begin) % region.width == 0 else 1
        if region.begin < region.end:
            yield Region(region.begin, region.end, width)
        at = region.end


def _numbers(data: Bytes, region: Region) -> Numbers:
    return data[region.begin : region.end].view(_TYPES[region.width])


def _smallest(old: Numbers, young: Numbers, positions: NDArray[np.intp]) -> tuple[str, list[bytes]]:
    share = positions.size / young.size
    codings = []
    if share <= SPARSE_BELOW:
        gaps = np.diff(positions, prepend=-1) - 1
        codings.append(("sparse", [_pack(_vary(gaps)), _pack(_vary(_zigzag(young[positions] - old[positions])))]))
    if share >= DENSE_ABOVE:
        planes = _zigzag(young - old).view(np.uint8).reshape(young.size, young.itemsize)
        codings.append(("dense", [_pack(planes[:, byte], zlib.Z_RLE) for byte in range(young.itemsize)]))
        codings.append(("whole", [young.tobytes()]))
    return min(codings, key=lambda coding: sum(map(len, coding[1])))


def _sparse(new: Numbers, count: int, streams: Sequence[bytes]) -> None:
    gaps, steps = (_read(_unpack(stream, count * _MOST_BYTES), count) for stream in streams)
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and not (0 <= int(gaps.max()) < new.size and int(positions.min()) >= 0 and int(positions[-1]) < new.size):
        raise ValueError("the difference names places that the tensor does not have")
    new[positions] += _unzigzag(steps.astype(new.dtype))


def _dense(new: Numbers, count: int, streams: Sequence[bytes]) -> None:
    planes = np.empty((new.size, new.itemsize), np.uint8)
    for byte in range(new.itemsize):
        planes[:, byte] = np.frombuffer(_unpack(streams[byte], new.size, exactly=True), np.uint8)
    new += _unzigzag(planes.reshape(-1).view(new.dtype))


def _whole(new: Numbers, count: int, streams: Sequence[bytes]) -> None:
    if len(streams[0]) != new.nbytes:
        raise ValueError("the difference is cut off")
    new[:] = np.frombuffer(streams[0], new.dtype)


_DECODERS = {"sparse": _sparse, "dense": _dense, "whole": _whole}


def _zigzag(steps: Numbers) -> Numbers:
    """0, -1, 1, -2, 2, ... as 0, 1, 2, 3, 4, ...; minus one is the largest number of the width."""
    bits = 8 * steps.itemsize
    return (steps << 1) ^ (np.zeros_like(steps) - (steps >> (bits - 1)))


def _unzigzag(coded: Numbers) -> Numbers:
    return (coded >> 1) ^ (np.zeros_like(coded) - (coded & 1))


def _vary(values: NDArray[Any]) -> Bytes:
    """Numbers of variable length: seven bits in a byte, the lowest first; the highest bit says that more follow."""
    if not values.size or int(values.max()) < 128:
        return values.astype(np.uint8)
    wide = values.astype(np.uint64)
    lengths = np.ones(wide.size, np.int64)
    for bits in range(7, 64, 7):
        lengths += wide >> np.uint64(bits) != 0
    ends = np.cumsum(lengths)
    coded, starts = np.empty(int(ends[-1]), np.uint8), ends - lengths
    for byte in range(int(lengths.max())):
        rest = np.flatnonzero(lengths > byte)
        low = (wide[rest] >> np.uint64(7 * byte)).astype(np.uint8) & 127
        coded[starts[rest] + byte] = low | ((lengths[rest] > byte + 1).astype(np.uint8) << 7)
    return coded


def _read(data: bytes, count: int) -> NDArray[np.uint64]:
    """``count`` numbers of variable length. Raises ValueError if there are more or fewer."""
    coded = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(coded < 128)
    if ends.size != count or (coded.size and (not count or ends[-1] + 1 != coded.size)):
        raise ValueError(f"the difference has {ends.size} numbers where {count} were announced")
    if coded.size == count:
        return coded.astype(np.uint64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if int(lengths.max()) > _MOST_BYTES:
        raise ValueError("the difference has a number that is too long")
    numbers = np.zeros(count, np.uint64)
    for byte in range(int(lengths.max())):
        rest = np.flatnonzero(lengths > byte)
        numbers[rest] |= (coded[starts[rest] + byte] & 127).astype(np.uint64) << np.uint64(7 * byte)
    return numbers


def _pack(data: Bytes, strategy: int = zlib.Z_HUFFMAN_ONLY) -> bytes:
    """Compressed without a search for repetitions, which here are chance: half the time, and fewer bytes."""
    writer = zlib.compressobj(1, zlib.DEFLATED, 15, 9, strategy)
    return writer.compress(np.ascontiguousarray(data).data) + writer.flush()


def _unpack(data: bytes, limit: int, *, exactly: bool = False) -> bytes:
    """Raises ValueError for more bytes than the limit, or fewer where it must be exact."""
    reader = zlib.decompressobj()
    unpacked = reader.decompress(data, limit + 1)
    if len(unpacked) > limit or not (reader.eof or len(unpacked) == limit) or (exactly and len(unpacked) != limit):
        raise ValueError("the difference is cut off, or longer than it may be")
    return unpacked
