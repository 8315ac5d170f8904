"""Heartbeats between the processes of a run, and short messages with them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from os import _exit  # this one ends the process, also while os._exit is refused to a reward
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from oncurve.core.errors import TrainingError
from oncurve.policy.environment import RankInfo
from oncurve.run_errors import LostProcess

T = TypeVar("T")
BEAT_SECONDS = 1.0
"""Seconds between two signs of life of a process."""


class Heartbeat:
    """A thread that says every second that this process lives, and ends it when another one fell silent.

    Owns a connection of its own to the store of the run: the one that torch uses may be waiting for something.
    """

    def __init__(self, rank_info: RankInfo, silent_seconds: float) -> None:
        self.rank, self.count, self.silent_seconds = rank_info.rank, rank_info.count, silent_seconds
        self.react: Callable[[int], None] | None = None
        """Called with the number of a signal that another process got, once, in this thread."""
        timeout = timedelta(seconds=silent_seconds)
        store = TCPStore(rank_info.address, rank_info.port, timeout=timeout, wait_for_workers=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # its store outlives the processes
        self._store = PrefixStore(f"oncurve/{attempt}", store)
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._beat(0)
        self._thread = threading.Thread(target=self._live, name="pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take leave, so that silence means nothing."""
        self._stopping.set()
        self._thread.join()
        with self._lock:
            self._try(lambda: self._store.set(f"left/{self.rank}", "1"))

    def notify(self, what: str) -> None:
        """Leave a last word."""
        with self._lock:
            self._try(lambda: self._store.set(f"word/{self.rank}", what))

    def ask_to_stop(self, number: int) -> None:
        """Tell the others that this process got a signal."""
        with self._lock:
            self._try(lambda: self._store.set("stop", str(number)))

    def lost(self) -> tuple[str, type[TrainingError]] | None:
        """Which other process failed or is silent, after waiting long enough to tell; None if all of them live.

        Starting again may help against silence. An error that was told would most likely come again.
        """
        deadline = time.monotonic() + min(self.silent_seconds, 5 * BEAT_SECONDS)
        while time.monotonic() < deadline:
            for rank in self._others():
                if word := self._read(f"word/{rank}"):
                    return f"process {rank} failed ({word.decode(errors='replace')})", TrainingError
            time.sleep(BEAT_SECONDS / 4)
            self._look()
            silent = {rank: time.monotonic() - since for rank, (_, since) in self._seen.items()}
            quiet = [rank for rank, seconds in silent.items() if seconds > 3 * BEAT_SECONDS]
            if quiet:
                return f"process {quiet[0]} is gone (silent for {silent[quiet[0]]:.0f} s)", LostProcess
        return None

    def _others(self) -> list[int]:
        return [rank for rank in range(self.count) if rank != self.rank]

    def _live(self) -> None:
        number = 0
        while not self._stopping.wait(BEAT_SECONDS):
            number += 1
            self._beat(number)
            self._listen()
            self._look()
            for rank, (_, since) in list(self._seen.items()):
                silence = time.monotonic() - since
                if silence > self.silent_seconds and not self._read(f"left/{rank}"):
                    sys.stderr.write(
                        f"oncurve: process {rank} of {self.count} is silent for {silence:.0f} s; "
                        f"process {self.rank} ends. Start again with `oncurve resume`\n"
                    )
                    sys.stderr.flush()
                    _exit(LostProcess.exit_code)  # the main thread may be waiting for the silent one

    def _listen(self) -> None:
        """Hear, once, that the run was told to go."""
        if self.react is not None and (signal := self._read("stop")):
            react, self.react = self.react, None
            react(int(signal))

    def _beat(self, number: int) -> None:
        with self._lock:
            self._try(lambda: self._store.set(f"beat/{self.rank}", str(number)))

    def _look(self) -> None:
        """Note when each of the others was last heard of."""
        for rank in self._others():
            beat = self._read(f"beat/{rank}") or b""
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, time.monotonic())

    def _read(self, key: str) -> bytes | None:
        with self._lock:
            return self._try(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _try(self, call: Callable[[], T]) -> T | None:
        """The result of asking the store; None if it is gone with the process that kept it."""
        try:
            return call()
        except (RuntimeError, dist.DistError):
            return None
