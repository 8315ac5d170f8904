"""The folder of weights for servers that are brought up to date by differences.

A version is published as what changed since the one before, and whole every so often, or where a difference would not
be smaller. The trainer keeps the files of the last version in memory, bytes that servers have, to compare with.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from oncurve.core.errors import SamplerError
from oncurve.fleet.weights.delta import DELTA, Bytes, Coded, Region, encode
from oncurve.fleet.weights.shards import at_once, cut_into_files, file_pieces
from oncurve.fleet.weights.store import Contents, WeightStore
from oncurve.fleet.weights.weight_manifest import Link, Manifest, WeightFile, label_of
from oncurve.fleet.weights.weight_stream import Shipment, half_shipment

if TYPE_CHECKING:
    import torch

    from oncurve.core.sampler import PolicyView

PAYS = 0.7
"""A version whose differences are more than this share of its files is published whole."""

File = tuple[Bytes, list[Region]]
"""The bytes of a file, and where its tensors are."""


@dataclass(frozen=True, slots=True)
class Published:
    """The outcome of publishing one version."""

    bytes: int
    """That a server fetches which has the version before."""
    whole_bytes: int
    changed_fraction: float
    """Share of all numbers that changed; 1 where there was nothing to compare with."""
    seconds: float
    """Until it could be fetched; ``coding_seconds`` of it, in several threads, for the differences."""
    coding_seconds: float


class DeltaStore(WeightStore):
    """Versions as differences, and whole ones between them."""

    def __init__(
        self,
        root: Path,
        *,
        run: str,
        anchor_every: int = 20,
        keep: int = 2,
        memory: Path | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``anchor_every``: a version is written whole at least so often."""
        super().__init__(root, run=run, keep=keep, memory=memory, notify=notify)
        self.anchor_every = anchor_every
        self.last: Published | None = None
        self._view: dict[str, Bytes] = {}
        """The files of the last version."""
        self._links: list[Link] = []
        self._since_anchor = 0
        self._lock = threading.RLock()

    def shipment(self, policy: PolicyView, version: int, *, matrix_type: torch.dtype | None) -> Shipment:
        """Matrices in bfloat16 whatever the servers' type: wider ones change nearly everywhere."""
        return half_shipment(policy, version)

    def take(self, shipment: Shipment) -> Callable[[], Manifest]:
        """Copy the weights as servers get them. What is returned publishes them, in any thread."""
        parts = cut_into_files(shipment)
        copied = dict(zip(parts, at_once(lambda _, weights: _assemble(shipment, weights), parts.items()), strict=True))
        return lambda: self.publish_shipment(shipment, copied)

    def publish_shipment(self, shipment: Shipment, copied: dict[str, File] | None = None) -> Manifest:
        """Write a version; ``copied`` are its files where the weights may have changed since, and is emptied.

        Raises SamplerError if the disk does not take it.
        """
        begin = time.perf_counter()
        with self._lock:
            coding: list[float] = []
            changes: list[Coded | None] = []

            def write(folder: Path) -> Contents:
                return self._write(shipment, copied, folder, coding, changes)

            try:
                manifest = self.publish(shipment.version, write, size=shipment.num_bytes)
            except SamplerError:
                self._view, self._links = {}, []  # what servers can get is not what is here
                raise
            if not manifest.chain:
                manifest = self.published[-1] = replace(manifest, chain=tuple(self._links))
            link, known = self._links[-1], [change for change in changes if change is not None]
            whole = sum(file.size for file in manifest.files)
            self.last = Published(
                bytes=link.delta_bytes if link.base is not None else whole,
                whole_bytes=whole,
                changed_fraction=sum(change.changed for change in known) / max(1, sum(change.total for change in known))
                if len(known) == len(changes)
                else 1.0,
                seconds=time.perf_counter() - begin,
                coding_seconds=sum(coding),
            )
            return manifest

    def renew(self, label: str) -> Manifest | None:
        """Write the last version whole, because a server could not make it of others; None if it is not the last.

        Raises SamplerError if the disk does not take it.
        """
        with self._lock:
            if not self._view or not self.published or self.published[-1].label != label:
                return None
            manifest, link = self.published[-1], self._links[-1]
            folder = Path(manifest.folder)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for name, data in self._view.items():
                    data.tofile(folder / f".{name}")
                    (folder / f".{name}").replace(folder / name)
            except OSError as error:
                raise SamplerError(f"{folder}: weights for the rollout servers cannot be written: {error}") from error
            self._links[-1] = replace(link, whole=manifest.files)
            self.published[-1] = replace(manifest, chain=tuple(self._links))
            return self.published[-1]

    def metrics(self) -> dict[str, float]:
        """The share of the last version that was sent, and the seconds it took to find it."""
        last = self.last
        return (
            {}
            if last is None
            else {
                "weights/changed_fraction": last.changed_fraction,
                "weights/sent_fraction": last.bytes / max(1, last.whole_bytes),
                "weights/sent_mb": last.bytes / 1e6,
                "weights/publish_seconds": last.seconds,
                "weights/coding_seconds": last.coding_seconds,
            }
        )

    def _write(
        self,
        shipment: Shipment,
        copied: dict[str, File] | None,
        folder: Path,
        coding: list[float],
        changes: list[Coded | None],
    ) -> Contents:
        parts = cut_into_files(shipment)
        if parts.keys() != self._view.keys():
            self._view = {}
        had = bool(self._view)

        def write_file(name: str, weights: list[str]) -> tuple[WeightFile, Coded | None]:
            new, regions = _assemble(shipment, weights) if copied is None else copied.pop(name)
            written, old = WeightFile(name, new.size, hashlib.sha256(new.data).hexdigest()), self._view.get(name)
            begin = time.perf_counter()
            coded = encode(old, new, regions) if old is not None and old.size == new.size else None
            coding.append(time.perf_counter() - begin)
            self._view[name] = new
            if coded is not None and coded.changed:
                (folder / (name + DELTA)).write_bytes(coded.data)
            return written, coded

        done = at_once(write_file, parts.items())
        files = tuple(file for file, _ in done)
        changes += [coded for _, coded in done]
        base = self.published[-1].label if had and self.published and all(changes) else None
        self._link(label_of(self.run, shipment.version, files), base, files, changes, folder)
        return files, tuple(sorted(shipment.weights))

    def _link(
        self, label: str, base: str | None, files: tuple[WeightFile, ...], changes: list[Coded | None], folder: Path
    ) -> None:
        """Decide in which form the version is published, and note it."""
        if self.published and self.published[-1].label == label:  # the same weights once more
            return
        for again in [
            manifest for manifest in self.published if manifest.label == label
        ]:  # the trainer went back to it
            shutil.rmtree(again.folder, ignore_errors=True)
            self.published.remove(again)
            known = [link.label for link in self._links]
            self._links = self._links[known.index(label) + 1 :] if label in known else self._links
        deltas: tuple[WeightFile, ...] = ()
        if base is not None:
            deltas = tuple(
                WeightFile(file.name + DELTA, len(coded.data), hashlib.sha256(coded.data).hexdigest())
                for file, coded in zip(files, changes, strict=True)
                if coded is not None and coded.changed
            )
        size = sum(file.size for file in files)
        is_small = base is not None and sum(file.size for file in deltas) <= PAYS * size
        if not is_small:
            base, deltas = None, ()
            for path in folder.glob(f"*{DELTA}"):
                path.unlink()
        self._since_anchor += 1
        waiting = sum(link.delta_bytes for link in self._after_anchor(self._links)) + sum(file.size for file in deltas)
        has_anchor = any(link.whole for link in self._links)
        is_whole = not (is_small and has_anchor) or self._since_anchor >= self.anchor_every or waiting > size
        if is_whole:
            self._since_anchor = 0
            for name, data in self._view.items():
                data.tofile(folder / name)
        self._links.append(Link(label, base, deltas, files if is_whole else ()))
        self._shorten(size)

    @staticmethod
    def _after_anchor(links: list[Link]) -> list[Link]:
        last = max((index for index, link in enumerate(links) if link.whole), default=-1)
        return links[last + 1 :]

    def _shorten(self, size: int) -> None:
        """Forget what no server would fetch: older versions than the last whole one, once following their differences
        takes more than it does."""
        first = max((index for index, link in enumerate(self._links) if link.whole), default=0)
        total = sum(link.delta_bytes for link in self._links[first:])
        while first > 0 and self._links[first].base == self._links[first - 1].label:
            total += self._links[first - 1].delta_bytes
            if total > size:
                break
            first -= 1
        self._links = self._links[first:]

    def _leave(self, count: int) -> None:
        """Remove what the chain does not need, and older whole versions but the one before the last."""
        needed = {link.label for link in self._links} | {manifest.label for manifest in self.published[-count:]}
        for manifest in [old for old in self.published if old.label not in needed]:
            shutil.rmtree(manifest.folder, ignore_errors=True)
            self.published.remove(manifest)
        wholes = [index for index, link in enumerate(self._links) if link.whole]
        for index in wholes[:-count]:
            link = self._links[index]
            for file in link.whole:
                (self.root / link.label / file.name).unlink(missing_ok=True)
            self._links[index] = replace(link, whole=())


def _assemble(shipment: Shipment, weights: list[str]) -> File:
    """A file of these weights, as they are now."""
    pieces = [piece for piece in file_pieces(shipment, weights) if len(piece)]
    data = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
    start, regions = len(pieces[0]), []
    for name, facts in json.loads(bytes(pieces[0][8:])).items():
        if name in shipment.weights:
            begin, end = facts["data_offsets"]
            regions.append(Region(start + begin, start + end, shipment.type_of(shipment.weights[name]).itemsize))
    return data, regions
