"""Heartbeats between the processes of a run: each says that it lives and moves on, and where it is."""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from os import _exit  # this one ends the process, also while os._exit is refused to a reward
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from oncurve.core.errors import TrainingError
from oncurve.policy.environment import RankInfo
from oncurve.run_errors import LostProcess

T = TypeVar("T")
BEAT_SECONDS = 1.0
"""Seconds between two signs of life of a process."""
NOTICE_SECONDS = 30.0
"""Seconds that a process waits for another one until it says so; then after twice as many, and so on."""
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


class Sign(NamedTuple):
    """The content of a heartbeat."""

    beats: int = 0
    moves: int = 0
    """Heartbeats at which the process had moved on since the one before."""
    waits: bool = False
    """It is inside torch.distributed, as those are that wait for others."""
    location: str = "its start"
    """File, line and function of its main thread, outside of libraries."""


class Motion:
    """Whether the work of this process moves on: its main thread, and the threads that its end would wait for.

    A thread moves if it is elsewhere than at the last look or, on Linux, slept and woke up meanwhile. A single call
    that does neither is no motion, unless an alarm is set, which ends a reward function at its own limit.
    """

    def __init__(self) -> None:
        self._before: object = None

    def look(self) -> tuple[bool, bool, str]:
        """Has it moved since the last call, is the main thread inside torch.distributed, and where is it?"""
        threads = [thread for thread in threading.enumerate() if not thread.daemon]
        stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        now = [(_instructions(stacks.get(thread.ident or 0)), _wakings(thread.native_id)) for thread in threads]
        moved = now != self._before or signal.getitimer(signal.ITIMER_REAL)[0] > 0
        self._before = now
        frames = list(_frames(stacks.get(threading.main_thread().ident or 0)))
        own = [frame for frame in frames if _is_own(frame)] or frames
        waits = any("/torch/distributed/" in frame.f_code.co_filename for frame in frames)
        code = own[0].f_code
        return moved, waits, f"{Path(code.co_filename).name}:{own[0].f_lineno} in {code.co_name}"


def _frames(frame: FrameType | None) -> Iterable[FrameType]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _instructions(frame: FrameType | None) -> list[tuple[int, int]]:
    return [(id(frame.f_code), frame.f_lasti) for frame in _frames(frame)]


def _wakings(thread: int | None) -> str:
    """How often a thread gave its processor back by itself, as at every sleep or wait; "" where no system says so."""
    try:
        return Path(f"/proc/self/task/{thread}/status").read_text().partition("\nvoluntary_ctxt")[2].partition("\n")[0]
    except OSError:
        return ""


def _is_own(frame: FrameType) -> bool:
    """The frame is in oncurve or in the user's code, in no library."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith("oncurve.") or not frame.f_code.co_filename.startswith(("<", *_LIBRARIES))


class Heartbeat:
    """A thread that says every second that this process lives, and ends it when the run cannot go on.

    That is when another process is silent for ``silent_seconds``, or when none moved on for ``timeout_seconds``: one is
    stuck and the others wait for it. While one moves on, the others wait for it as long as it takes.

    Owns a connection of its own to the store of the run: the one that torch uses may be waiting for something.
    """

    def __init__(self, rank_info: RankInfo, silent_seconds: float, timeout_seconds: float) -> None:
        self.rank, self.count = rank_info.rank, rank_info.count
        self.silent_seconds, self.timeout_seconds = silent_seconds, timeout_seconds
        self.react: Callable[[int], None] | None = None
        """Called with the number of a signal that another process got, once, in this thread."""
        timeout = timedelta(seconds=silent_seconds)
        store = TCPStore(rank_info.address, rank_info.port, timeout=timeout, wait_for_workers=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # its store outlives the processes
        self._store = PrefixStore(f"oncurve/{attempt}", store)
        begun = time.monotonic()
        self._signs = [Sign()] * self.count
        self._beaten, self._moved = [begun] * self.count, [begun] * self.count
        """When a process gave its last sign, and when it last moved, by the clock of this one."""
        self._motion, self._notice_after = Motion(), NOTICE_SECONDS
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._beat()
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
            silent = {rank: time.monotonic() - self._beaten[rank] for rank in self._others()}
            quiet = [rank for rank, seconds in silent.items() if seconds > 3 * BEAT_SECONDS]
            if quiet:
                return f"process {quiet[0]} is gone (silent for {silent[quiet[0]]:.0f} s)", LostProcess
        return None

    def _others(self) -> list[int]:
        return [rank for rank in range(self.count) if rank != self.rank]

    def _live(self) -> None:
        while not self._stopping.wait(BEAT_SECONDS):
            self._beat()
            self._listen()
            self._look()
            for rank in self._others():
                silence = time.monotonic() - self._beaten[rank]
                if silence > self.silent_seconds and not self._read(f"left/{rank}"):
                    self._end(
                        f"process {rank} of {self.count} is silent for {silence:.0f} s (policy.silent_seconds is "
                        f"{self.silent_seconds:g}): it was stopped, or its machine, or one call holds up all of its "
                        f"threads; process {self.rank} ends. Start again with `oncurve resume`"
                    )
            self._wait_or_end()

    def _wait_or_end(self) -> None:
        """Say for whom this process waits and how long it has; end it where nobody moves on any more."""
        now = time.monotonic()
        still = [now - moved for moved in self._moved]
        if still[self.rank] < NOTICE_SECONDS:
            self._notice_after = NOTICE_SECONDS
        waiting = [rank for rank, sign in enumerate(self._signs) if sign.waits]
        busy = [rank for rank in range(self.count) if rank not in waiting] or waiting
        where = ", ".join(f"process {rank} at {self._signs[rank].location}" for rank in busy[:4])
        where += f" and {len(busy) - 4} more" if len(busy) > 4 else ""
        speaks = self.rank == min(waiting, default=0)
        # Those that are waited for stay a little longer, so that the others can say so before a connection ends.
        patience = self.timeout_seconds + (0 if self.rank in waiting else 3 * BEAT_SECONDS)
        if min(still) > patience and sum(not self._read(f"left/{rank}") for rank in range(self.count)) > 1:
            self._end(
                f"no process has moved on for {min(still):.0f} s (policy.timeout_seconds is {self.timeout_seconds:g}): "
                f"{where}. See what hangs there, or raise policy.timeout_seconds if it takes so long; then start again "
                "with `oncurve resume`"
                if speaks
                else ""
            )
        elif speaks and busy != waiting and self.rank in waiting and still[self.rank] > self._notice_after:
            self._notice_after *= 2
            self._say(f"process {self.rank} has waited {still[self.rank]:.0f} s for {where}")

    def _end(self, why: str) -> None:
        """End this process from beside its main thread, which may be waiting for a lost one."""
        if why:
            self._say(why)
        _exit(LostProcess.exit_code)

    def _say(self, what: str) -> None:
        sys.stderr.write(f"oncurve: {what}\n")
        sys.stderr.flush()

    def _listen(self) -> None:
        """Hear, once, that the run was told to go."""
        if self.react is not None and (signal := self._read("stop")):
            react, self.react = self.react, None
            react(int(signal))

    def _beat(self) -> None:
        moved, waits, location = self._motion.look()
        last = self._signs[self.rank]
        self._hear(self.rank, Sign(last.beats + 1, last.moves + moved, waits, location))
        text = json.dumps(self._signs[self.rank])
        with self._lock:
            self._try(lambda: self._store.set(f"beat/{self.rank}", text))

    def _look(self) -> None:
        """Hear the others."""
        for rank in self._others():
            if sign := self._read(f"beat/{rank}"):
                self._hear(rank, Sign(*json.loads(sign)))

    def _hear(self, rank: int, sign: Sign) -> None:
        """Note when a process last gave a sign, and when it last moved."""
        before, self._signs[rank] = self._signs[rank], sign
        if sign.beats != before.beats:
            self._beaten[rank] = time.monotonic()
        if sign.moves != before.moves:
            self._moved[rank] = time.monotonic()

    def _read(self, key: str) -> bytes | None:
        with self._lock:
            return self._try(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _try(self, call: Callable[[], T]) -> T | None:
        """The result of asking the store; None if it is gone with the process that kept it."""
        try:
            return call()
        except (RuntimeError, dist.DistError):
            return None
