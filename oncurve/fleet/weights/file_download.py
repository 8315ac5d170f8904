"""Downloads of single files, which continue where they were cut off and are checked at their end.

Nothing but the standard library is needed here, because vLLM's environment imports it too.
"""

from __future__ import annotations

import hashlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from oncurve.fleet.weights.weight_manifest import SIDE_BY_SIDE, check
from oncurve.observe.manifest import CHUNK, FileSum

FETCH_SECONDS = 60.0
"""A trainer that sends nothing for so long while a file is fetched is lost."""
ATTEMPTS = 4
"""Times in a row that a download without progress is continued where it was cut off."""
PART = ".part"
"""End of the name of a file that is not whole yet."""
PARTIAL, RANGE_ENDS, NOT_YET = 206, 416, 503
"""HTTP status: what was asked for of a file; nothing is there after the place that was asked for; a server that is
fetching the file itself does not have it yet."""
SOON_SECONDS = 10.0
"""Least wait for such an answer; a sooner one counts as an attempt."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The results of some work for each of several files, in their order."""
    with ThreadPoolExecutor(min(SIDE_BY_SIDE, os.cpu_count() or 1), thread_name_prefix="reads-weights") as threads:
        return list(threads.map(work, items))


def download(address: str, token: str | None, path: Path, file: Mapping[str, Any]) -> None:
    """Bring a file here; what came before the connection was cut is not sent again.

    Raises ValueError if it does not come, or is not the file that was announced.
    """
    part = _Part(path.with_name(path.name + PART))
    tries = ATTEMPTS
    while tries:
        before, began = part.size, time.monotonic()
        try:
            part.go_on(address, token)
            break
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == RANGE_ENDS and before == file.get("size"):
                break
            if error.code == NOT_YET and tries > 1:
                tries -= time.monotonic() - began < SOON_SECONDS
                time.sleep(1.0)
                continue
            part.path.unlink(missing_ok=True)
            raise ValueError(f"{address} cannot be fetched: {error}") from None
        except (OSError, HTTPException) as error:
            tries = ATTEMPTS if part.size > before else tries - 1
            if not tries or not part.size:
                raise ValueError(f"{address} cannot be fetched: {error}") from None
    try:
        check(part.path, file, FileSum(part.size, part.digest.hexdigest()))
    except ValueError:
        part.path.unlink(missing_ok=True)
        raise
    part.path.replace(path)


class _Part:
    """The beginning of a file, with its checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self.digest = 0, hashlib.sha256()
        if path.exists():
            with path.open("rb") as file:
                while piece := file.read(CHUNK):
                    self._count(piece)

    def _count(self, piece: bytes | memoryview) -> None:
        self.digest.update(piece)
        self.size += len(piece)

    def go_on(self, address: str, token: str | None) -> None:
        """Add what is missing; from the beginning, if the other side cannot begin in the middle."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if self.size:
            headers["Range"] = f"bytes={self.size}-"
        buffer = bytearray(CHUNK)
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=FETCH_SECONDS) as answer:
            if answer.status != PARTIAL:
                self.size, self.digest = 0, hashlib.sha256()
            end = None if answer.length is None else self.size + answer.length
            with self.path.open("ab" if self.size else "wb") as file:
                while count := answer.readinto(buffer):
                    piece = memoryview(buffer)[:count]
                    file.write(piece)
                    self._count(piece)
            if end is not None and self.size < end:
                raise HTTPException(f"the connection ended {end - self.size} bytes too early")
