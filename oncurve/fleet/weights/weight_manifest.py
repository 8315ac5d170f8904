"""The files of one version of the weights, and whether a copy of them is whole. No torch in here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oncurve.observe.manifest import FileSum

NAME = "manifest.json"
SIDE_BY_SIDE = 8
"""Files that one process writes, fetches or checks at a time."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of a version."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Link:
    """Sources of a version: the files of another one and their differences, its own files, or both."""

    label: str
    base: str | None
    """The version that the differences apply to; None where there are none."""
    deltas: tuple[WeightFile, ...]
    """One for each file that changed."""
    whole: tuple[WeightFile, ...]
    """All files; empty where there are differences alone."""

    @property
    def delta_bytes(self) -> int:
        """Bytes of all differences."""
        return sum(file.size for file in self.deltas)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of the weights, file by file: an ordinary checkpoint, or an adapter."""

    label: str
    """``run:version:start of the checksum``. The run is in it, so that a server that was left over from another run is
    never taken for one that is up to date."""
    version: int
    files: tuple[WeightFile, ...]
    names: tuple[str, ...]
    """Every weight in the files. Half of a checkpoint would leave fused layers in ruins."""
    folder: str
    """Folder of the files, for servers that see the same disk."""
    adapter: Mapping[str, Any] | None = None
    """Configuration of an adapter that servers add to their base; None for whole weights."""
    dither: int | None = None
    """Seed of the dither of the trainer's copies, by which servers make theirs; None for rounding to the nearest."""
    chain: tuple[Link, ...] = ()
    """The versions from which this one, the last, is made by differences. Empty where its files are whole."""

    @property
    def served_names(self) -> set[str]:
        """Names of the files that may be asked for; those of a version that is made of an older one may be missing."""
        own = [file.name for link in self.chain if link.label == self.label for file in link.deltas]
        return {*own, *(file.name for file in self.files)}

    def message(self, *, address: str | None, token: str | None) -> dict[str, Any]:
        """The message to a server: read the folder, or fetch the files from an address with a token."""
        source = {"folder": self.folder} if address is None else {"address": f"{address}/{self.label}", "token": token}
        chain = {"chain": [asdict(link) for link in self.chain]} if self.chain else {}
        return {
            "label": self.label,
            "files": [asdict(file) for file in self.files],
            "names": list(self.names),
            "adapter": self.adapter,
            "dither": self.dither,
            **source,
            **chain,
        }


def label_of(run: str, version: int, files: Sequence[WeightFile]) -> str:
    """The name of a version.

    >>> label_of("demo", 7, [])
    'demo:7:e3b0c44298fc'
    """
    digest = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
    return f"{run}:{version}:{digest[:12]}"


def describe_files(folder: Path) -> tuple[tuple[WeightFile, ...], tuple[str, ...]]:
    """The safetensors files of a folder with their checksums, and the names of all weights in them."""
    files, names = [], []
    for path in sorted(folder.glob("*.safetensors")):
        checksum = FileSum.of(path)
        files.append(WeightFile(path.name, checksum.size, checksum.sha256))
        names += names_in(path)
    return tuple(files), tuple(sorted(names))


def names_in(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file, from its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [name for name in header if name != "__metadata__"]


def check(path: Path, file: Mapping[str, Any], checksum: FileSum | None = None) -> None:
    """Raises ValueError if a file is not the one that a manifest names; ``checksum`` is what was summed up already."""
    if "sha256" not in file or "size" not in file:
        raise ValueError(f"{path.name} was announced without size and sha256: the trainer is of another oncurve")
    if checksum is None and not path.is_file():
        raise ValueError(f"{path} is not there")
    if wrong := (checksum or FileSum.of(path)).mismatch(file):
        raise ValueError(f"{path}: {wrong}")
