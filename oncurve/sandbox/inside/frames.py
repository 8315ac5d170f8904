"""Framed messages of a process in the sandbox."""

from __future__ import annotations

import json
import os
from typing import Any

LENGTH_BYTES = 4
"""Size of the big-endian length before every message."""

Frame = dict[str, Any]


def pack(frame: Frame) -> bytes:
    """A message as bytes, with its length in front."""
    body = json.dumps(frame, separators=(",", ":"), allow_nan=False).encode("ascii")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def send(fd: int, frame: Frame) -> None:
    """Writes a message; waits until it is taken."""
    view = memoryview(pack(frame))
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int) -> Frame:
    """The next message; waits for it.

    Raises EOFError when the other end is gone.
    """
    length = int.from_bytes(_exactly(fd, LENGTH_BYTES), "big")
    return json.loads(_exactly(fd, length))


def _exactly(fd: int, length: int) -> bytes:
    parts: list[bytes] = []
    while length > 0:
        part = os.read(fd, min(length, 1 << 20))
        if not part:
            raise EOFError("the other end is gone")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
