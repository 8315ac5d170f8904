"""The files of an announced version on a server's machine, whatever is sent for them.

Nothing but the standard library and numpy is needed here, because vLLM's environment imports it too.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oncurve.fleet.weights.delta_copy import DeltaCopy
from oncurve.fleet.weights.file_download import download, side_by_side
from oncurve.fleet.weights.weight_manifest import check


class Fetcher:
    """The files of one version after another."""

    def __init__(self, *, group: str | None = None) -> None:
        """Processes of this machine with the same ``group`` share the copy that differences are applied to."""
        self._group = group
        self._copy: DeltaCopy | None = None

    @contextmanager
    def fetch(self, message: Mapping[str, Any]) -> Iterator[list[Path]]:
        """The announced files, whole; they may be gone or replaced after this.

        Raises ValueError if they cannot be had, or if one is not what the trainer wrote.
        """
        if not message.get("chain"):
            with _whole(message) as paths:
                yield paths
            return
        self._copy = self._copy or DeltaCopy(group=self._group)
        with self._copy.updated(message) as paths:
            yield paths


@contextmanager
def _whole(message: Mapping[str, Any]) -> Iterator[list[Path]]:
    """The trainer's own files, or downloads that last as long as this."""
    files, downloads = message.get("files"), None
    if not files:
        raise ValueError("the update names no files")
    if message.get("folder"):
        folder = Path(message["folder"])
    else:
        folder = downloads = Path(tempfile.mkdtemp(prefix="oncurve-fetched-"))
    try:
        yield side_by_side(lambda file: _file(message, folder, file), files)
    finally:
        if downloads is not None:
            shutil.rmtree(downloads, ignore_errors=True)


def _file(message: Mapping[str, Any], folder: Path, file: Mapping[str, Any]) -> Path:
    path = folder / Path(file["name"]).name
    if message.get("folder"):
        check(path, file)
    else:
        download(f"{message['address']}/{path.name}", message.get("token"), path, file)
    return path
