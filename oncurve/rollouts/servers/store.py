"""Where do servers get the weights of a version from? A folder that holds the newest few, each whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oncurve.errors import SamplerError
from oncurve.rollouts.servers.manifest import Manifest, describe_files, label_of, write_manifest


class WeightStore:
    """The newest versions of the weights, as checkpoints in a folder of this process.

    A version is written beside its place, flushed, and renamed: a server that finds its name finds all of it.
    """

    def __init__(self, root: Path, *, run: str, keep: int = 2) -> None:
        """``run`` goes into every label. Folders of processes that died on this machine are removed."""
        self.run, self.keep = run, keep
        self.root = root.resolve() / f"weights-{socket.gethostname()}-{os.getpid()}-{run}"
        self.published: list[Manifest] = []
        _sweep(root)

    def publish(
        self,
        version: int,
        write: Callable[[Path], object],
        *,
        adapter: Mapping[str, Any] | None = None,
        label: str | None = None,
    ) -> Manifest:
        """Write a version with ``write(folder)`` and name it; the same weights under the same version are one.
        ``label`` is the name of a version that has one already.

        Raises SamplerError if the disk does not take it.
        """
        partial = self.root / f".{version}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            files, names = describe_files(partial)
            label = label or label_of(self.run, version, files)
            if self.published and self.published[-1].label == label:
                shutil.rmtree(partial)
                return self.published[-1]
            folder = self.root / label
            manifest = Manifest(label, version, files, names, str(folder), adapter)
            write_manifest(manifest, partial)
            for path in (*partial.iterdir(), partial):
                _flush(path)
            partial.rename(folder)
            _flush(self.root)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise SamplerError(
                f"{self.root}: the weights for the rollout servers cannot be written: {error}. "
                f"Make room, or set rollouts.weights_folder to a place with more"
            ) from error
        self.published.append(manifest)
        while len(self.published) > self.keep:
            shutil.rmtree(self.published.pop(0).folder, ignore_errors=True)
        return manifest

    def close(self) -> None:
        """Remove the folder: a server that still wants weights belongs to no trainer any more."""
        shutil.rmtree(self.root, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
