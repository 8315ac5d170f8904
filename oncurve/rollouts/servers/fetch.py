"""The way of files to a server: from a folder that it sees, or from the trainer over HTTP.

Nothing but the standard library is needed here, because vLLM's environment imports it too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oncurve.observe.checksums import CHUNK, FileSum
from oncurve.rollouts.servers.weight_manifest import SIDE_BY_SIDE, check

FETCH_SECONDS = 60.0
"""A trainer that sends nothing for so long while a file is fetched is lost."""


@contextmanager
def fetched(message: Mapping[str, Any]) -> Iterator[list[Path]]:
    """The announced files, whole: the trainer's own, or copies that last as long as this.

    Raises ValueError if they cannot be had, or if one is not what the trainer wrote.
    """
    files, copies = message.get("files"), None
    if not files:
        raise ValueError("the update names no files")
    if message.get("folder"):
        folder = Path(message["folder"])
    else:
        folder = copies = Path(tempfile.mkdtemp(prefix="oncurve-fetched-"))
    try:
        with ThreadPoolExecutor(min(SIDE_BY_SIDE, os.cpu_count() or 1), thread_name_prefix="reads-weights") as threads:
            paths = list(threads.map(lambda file: _have(message, folder, file), files))
        yield paths
    finally:
        if copies is not None:
            shutil.rmtree(copies, ignore_errors=True)


def _have(message: Mapping[str, Any], folder: Path, file: Mapping[str, Any]) -> Path:
    """One file in the folder, whole."""
    path = folder / Path(file["name"]).name
    if message.get("folder"):
        check(path, file)
    else:
        check(path, file, _fetch(f"{message['address']}/{path.name}", message.get("token"), path))
    return path


def _fetch(address: str, token: str | None, place: Path) -> FileSum:
    """Bring a file here; its size and its checksum, which are of what came."""
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    digest, size, buffer = hashlib.sha256(), 0, bytearray(CHUNK)
    try:
        with urllib.request.urlopen(request, timeout=FETCH_SECONDS) as answer, place.open("wb") as file:
            while count := answer.readinto(buffer):
                piece = memoryview(buffer)[:count]
                digest.update(piece)
                file.write(piece)
                size += count
    except (urllib.error.URLError, OSError) as error:
        raise ValueError(f"{address} cannot be fetched: {error}") from None
    return FileSum(size, digest.hexdigest())
