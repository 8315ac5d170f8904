"""The folder that servers get the weights of a version from: it holds the newest few, each whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncurve.constants import GB
from oncurve.core.errors import SamplerError
from oncurve.fleet.weights.shards import write_weights
from oncurve.fleet.weights.weight_manifest import Manifest, WeightFile, label_of
from oncurve.fleet.weights.weight_stream import Shipment, make_shipment
from oncurve.observe.manifest import available_bytes, flush

if TYPE_CHECKING:
    import torch

    from oncurve.core.sampler import PolicyView

ROOM = 0.5
"""Share of the free memory that the versions of a store may take; the rest is for other programs."""
Contents = tuple[Sequence[WeightFile], Sequence[str]]
"""The files of a version with their checksums, and the names of all weights in them."""


class WeightStore:
    """The newest versions of the weights, as files in a folder of this process.

    A version is written beside its place and renamed: a server that finds its name finds all of it. On a disk it is
    flushed before, which memory has no need of.
    """

    def __init__(
        self,
        root: Path,
        *,
        run: str,
        keep: int = 2,
        memory: Path | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``run`` goes into every label. With ``memory``, a folder in the machine's memory, the versions are put there
        if ``keep`` of them fit. Folders of processes that died on this machine are removed."""
        self.run, self.keep, self._memory, self._say = run, keep, memory, notify
        self.name = f"{own_prefix()}{run}"
        self.root = root.resolve() / self.name
        self.published: list[Manifest] = []
        self.dither: int | None = None
        """Seed of the dither of the weights that are published."""
        self._is_placed = False
        for path in (root, memory):
            if path is not None:
                _sweep(path)

    def shipment(self, policy: PolicyView, version: int, *, matrix_type: torch.dtype | None) -> Shipment:
        """The policy's whole weights as they are published here. Nothing is copied."""
        return make_shipment(policy, self.run, version, matrix_type=matrix_type)

    def publish_shipment(self, shipment: Shipment) -> Manifest:
        """Write a version of the whole weights.

        Raises SamplerError if the disk does not take it.
        """
        write = partial(write_weights, shipment)
        return self.publish(shipment.version, write, size=shipment.num_bytes, label=shipment.label)

    def take(self, shipment: Shipment) -> Callable[[], Manifest]:
        """Take the weights over, which may change after this. What is returned publishes them, in any thread."""
        manifest = self.publish_shipment(shipment)
        return lambda: manifest

    def renew(self, label: str) -> Manifest | None:
        """Publish the last version in another form, because a server could not make it of what it was sent; None if
        there is no other, or ``label`` is not the last."""
        return None

    def metrics(self) -> dict[str, float]:
        """The share of the last version that was sent, where that is not all of it; otherwise nothing."""
        return {}

    def publish(
        self,
        version: int,
        write: Callable[[Path], Contents],
        *,
        size: int = 0,
        adapter: Mapping[str, Any] | None = None,
        label: str | None = None,
    ) -> Manifest:
        """Write a version with ``write(folder)`` and name it; the same weights under the same version are one.
        ``size`` is what it takes, about; ``label`` the name of a version that has one already.

        Raises SamplerError if the disk does not take it.
        """
        if label is not None and self.published and self.published[-1].label == label:
            return self.published[-1]
        self._choose_folder(size)
        if label is not None:
            self._leave(self.keep - 1)
        partial = self.root / f".{version}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            private = is_memory(self.root)  # where everybody may look, and a disk may be shared on purpose
            self.root.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
            partial.mkdir()
            files, names = write(partial)
            label = label or label_of(self.run, version, files)
            if self.published and self.published[-1].label == label:
                shutil.rmtree(partial)
                return self.published[-1]
            folder = self.root / label
            manifest = Manifest(label, version, tuple(files), tuple(names), str(folder), adapter, self.dither)
            self._keep_for_good(partial, folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise SamplerError(
                f"{self.root}: the weights for the rollout servers cannot be written: {error}. Make room there, or "
                f"name a folder with more room: `rollouts.weights_folder=FOLDER`"
            ) from error
        self.published.append(manifest)
        self._leave(self.keep)
        return manifest

    def _leave(self, count: int) -> None:
        """Remove all versions but the newest. Servers may still read the one before the next, and no other."""
        while len(self.published) > count:
            shutil.rmtree(self.published.pop(0).folder, ignore_errors=True)

    def _keep_for_good(self, partial: Path, folder: Path) -> None:
        """Under its name, and on the disk where there is one."""
        is_disk = not is_memory(self.root)
        for path in (*partial.iterdir(), partial) if is_disk else ():
            flush(path)
        partial.rename(folder)
        if is_disk:
            flush(self.root)

    def _choose_folder(self, size: int) -> None:
        """Decide once where the versions are put: in memory if they fit there."""
        if self._is_placed or self._memory is None:
            return
        self._is_placed = True
        needed, free = self.keep * size, free_bytes(self._memory)
        if needed <= ROOM * free:
            self.root = self._memory.resolve() / self.name
            return
        self._say(
            f"weights for the rollout servers are written to {self.root.parent}: {self.keep} versions take "
            f"{needed / GB:.3g} GB, and {self._memory} has {free / GB:.3g} GB free, of which half is used at most. "
            f"Memory is faster than a disk"
        )

    def close(self) -> None:
        """Remove the folder: a server that still wants weights belongs to no trainer any more."""
        shutil.rmtree(self.root, ignore_errors=True)


def own_prefix() -> str:
    """The beginning of the names of this process's folders."""
    return f"weights-{socket.gethostname()}-{os.getpid()}-"


def memory_folder() -> Path | None:
    """The folder of this machine that is in its memory; None where there is none."""
    return MEMORY if is_memory(MEMORY) and os.access(MEMORY, os.W_OK) else None


def _sweep(root: Path) -> None:
    """Remove what trainers left behind that were killed on this machine."""
    host = re.escape(socket.gethostname())
    for folder in root.glob("weights-*") if root.is_dir() else ():
        match = re.fullmatch(rf"weights-{host}-(\d+)-.*", folder.name)
        if match is None:
            continue
        with contextlib.suppress(PermissionError):  # it lives, and belongs to somebody else
            try:
                os.kill(int(match[1]), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)


MEMORY = Path("/dev/shm")
_MOUNTS = Path("/proc/mounts")
_FACTS = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def is_memory(folder: Path, *, mounts: Path = _MOUNTS) -> bool:
    """A folder is on a file system in memory. False where the system does not tell."""
    path, mount = folder.resolve(), ("", "")
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    for line in lines:
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(mount[0]):
            mount = (point, kind)
    return mount[1] in ("tmpfs", "ramfs")


def free_bytes(folder: Path, *, facts: Path = _FACTS, container: Path = _CONTAINER) -> int:
    """Bytes that a folder in memory can still take: the least of its file system, the machine, and the container."""
    left = os.statvfs(folder)
    return int(min(left.f_bavail * left.f_frsize, available_bytes(facts=facts, container=container)))
