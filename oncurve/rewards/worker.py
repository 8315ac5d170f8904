"""What runs inside a grading process: one handler, one item at a time, under a memory limit.

Started by `oncurve.rewards.worker_pool`; imports neither torch nor the caller's main module.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from oncurve.errors import Failure, attempt

HEADER = struct.Struct("!I")
"""Length of a frame in bytes, before the frame."""
MAX_FRAME_BYTES = 64 * 2**20
"""A longer frame is refused by either side."""
_PR_SET_PDEATHSIG = 1


def encode(message: object) -> bytes:
    """A frame: JSON, because what comes back from a worker must never be able to run code here."""
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


def serve(connection: socket.socket, handler: Callable[[Any], object]) -> None:
    """Answers every payload until the other side closes: ``{"result": ...}`` or ``{"error": kind, "detail": ...}``."""
    connection.sendall(encode({"ready": True}))
    while True:
        header = _receive(connection, HEADER.size)
        body = _receive(connection, HEADER.unpack(header)[0]) if header else b""
        if not body:
            return
        connection.sendall(encode(_answer(handler, json.loads(body))))


def _answer(handler: Callable[[Any], object], payload: Any) -> dict[str, object]:
    outcome = attempt(lambda: _run(handler, payload), log=False)
    if isinstance(outcome, Failure):
        return {"error": outcome.error, "detail": outcome.detail}
    return outcome


def _run(handler: Callable[[Any], object], payload: Any) -> dict[str, object]:
    try:
        answer: dict[str, object] = {"result": handler(payload)}
        json.dumps(answer)
        return answer
    except MemoryError:
        return {"error": "memory", "detail": "the memory limit of the grading process"}


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes; nothing if the other side has closed."""
    chunks, missing = [], num_bytes
    while missing:
        chunk = connection.recv(min(missing, 2**20))
        if not chunk:
            return b""
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def _limit(memory_bytes: int, parent: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes its pool
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main(handler: str, descriptor: int, memory_bytes: int, parent: int) -> None:
    """Serves the handler ``module:function`` on an inherited socket."""
    _limit(memory_bytes, parent)
    connection = socket.socket(fileno=descriptor)
    module, _, function = handler.partition(":")
    loaded = attempt(lambda: getattr(importlib.import_module(module), function), log=False)
    if isinstance(loaded, Failure):
        connection.sendall(encode({"ready": False, "detail": loaded.detail}))
        return
    serve(connection, loaded)
