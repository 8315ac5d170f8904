"""Lock of a run folder: who writes it, and whether that process is alive."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from oncurve.core.errors import ConfigError

NAME = ".lock"
HEARTBEAT_SECONDS = 20.0
"""Seconds between two signs of life of the owner."""
STALE_SECONDS = 120.0
"""An owner on another machine that was silent for so long counts as dead."""


class RunLock:
    """The right to write a folder: an advisory lock, and a file that names the owner's process and machine.

    The kernel gives the advisory lock back when its owner dies, so on one machine a stale lock is simply taken over.
    Shared storage may not carry such locks from one machine to another; there the heartbeat decides.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError naming the owner if the folder is in use; OSError if it cannot be written."""
        self.path = folder / NAME
        self.previous_owner: str | None = None
        """The dead owner whose lock was still there; None if there was none."""
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives the folder free; calling it twice is harmless."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # a folder that vanished needs no lock
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._refuse(f"another process is writing this run: {_describe(self._owner())}", "Wait for it to end")
        owner = self._owner()
        if owner and owner.get("host") != socket.gethostname():
            age = self._age_seconds()
            if age < STALE_SECONDS:
                self._refuse(
                    f"{_describe(owner)} was writing this run {age:.0f} s ago",
                    f"If it is dead, try again when {STALE_SECONDS:.0f} s have passed",
                )
        self.previous_owner = _describe(owner) if owner else None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def _refuse(self, problem: str, do: str) -> None:
        raise ConfigError(f"{self.path.parent}: {problem}. {do}, or choose another folder.")

    def _owner(self) -> dict[str, Any]:
        """The owner that the file names; empty where it says nothing that can be read."""
        try:
            owner = json.loads(os.pread(self._descriptor, 4096, 0).decode("utf-8", errors="replace"))
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def _age_seconds(self) -> float:
        """Seconds since the last heartbeat by the clock of the storage, so that two machines' clocks need not agree."""
        before = os.fstat(self._descriptor).st_mtime
        probe = self.path.with_name(f"{NAME}.{os.getpid()}")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return max(0.0, now - before)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # storage that is away for a moment: the next beat tells
                os.utime(self._descriptor)


def writer_lives(folder: Path) -> bool | None:
    """Whether the writer of a folder is still there, from its file alone; None if nobody has the folder locked.

    On another machine its heartbeat decides, by this machine's clock.
    """
    try:
        text = (folder / NAME).read_text(encoding="utf-8", errors="replace")
        age = time.time() - (folder / NAME).stat().st_mtime
    except OSError:
        return None
    if not text.strip():
        return None
    try:
        owner = json.loads(text)
    except ValueError:
        owner = {}
    if isinstance(owner, dict) and owner.get("host") == socket.gethostname():
        return _is_alive(owner.get("pid"))
    return age < STALE_SECONDS


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "an owner that left no name"
    return f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"


def _is_alive(pid: object) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
