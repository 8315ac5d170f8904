"""Size and SHA-256 of files: how a manifest tells that a file is still what was written.

Nothing but the standard library is needed here, because vLLM's environment imports it too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's entry in a manifest."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path, *, flush: bool = False) -> FileSum:
        """Read a file, flushed to the disk before if asked for. Other threads work meanwhile: large pieces are read and
        summed without Python's lock. Raises OSError."""
        digest, size, buffer = hashlib.sha256(), 0, bytearray(CHUNK)
        with path.open("rb", buffering=0) as file:
            if flush:
                os.fsync(file.fileno())
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                size += count
        return cls(size, digest.hexdigest())

    def entry(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        return asdict(self)

    def mismatch(self, expected: Mapping[str, Any]) -> str | None:
        """The first difference from a manifest; None if there is none."""
        if self.size != expected["size"]:
            return f"has {self.size} bytes, {expected['size']} were written"
        if self.sha256 != expected["sha256"]:
            return "its content changed since it was written (SHA-256 differs)"
        return None


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
