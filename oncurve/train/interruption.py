"""How does a run react when it is told to go: by Ctrl-C, a scheduler, or the notice of a spot machine?"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")
_MEANS = {"SIGUSR1": "SIGTERM"}
"""SLURM's ``--signal`` announces the end by another signal than the one that ends."""


class Interrupted(BaseException):
    """The run was told to go and leaves the step it is in. No grader may catch it, so it is no ordinary exception."""


class Interruption:
    """What signals have asked for. The first one is obeyed at the next safe place; the second leaves at once.

    Sampling, grading and measuring change nothing that is saved and are left in their middle; training is left
    between two microbatches, as long as the step has not moved the weights.
    """

    def __init__(self, *, grace_seconds: float = 25.0, say: Callable[[str], None] | None = None) -> None:
        self.grace_seconds = grace_seconds
        self.say = say
        self._number: int | None = None
        self._is_abandonable = False
        self._timer: threading.Timer | None = None

    @property
    def is_asked(self) -> bool:
        """A signal has come."""
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """128 and the number of the signal: 130 for Ctrl-C, 143 for SIGTERM; 0 if none came."""
        return 128 + self._number if self._number is not None else 0

    @contextmanager
    def listen(self) -> Iterator[None]:
        """React to signals while it lasts; outside the main thread signals are left to whoever runs it there."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [number for number in signal.Signals if number.name in _SIGNALS]
        previous = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if self._timer is not None:
                self._timer.cancel()

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """While it lasts, a signal raises Interrupted wherever it meets the program."""
        self.check()
        outer, self._is_abandonable = self._is_abandonable, True
        try:
            yield
        finally:
            self._is_abandonable = outer

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Another process of the run got a signal: as if it had come here."""
        self._number = self._number or number

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self._number is not None:
            raise Interrupted

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._number is not None:
            self._leave("left at once")
        self._number = signal.Signals[_MEANS.get(name, name)]
        self._timer = threading.Timer(self.grace_seconds, self._leave, ["the time of grace is over"])
        self._timer.daemon = True
        self._timer.start()
        if self.say is not None:
            self.say(f"{name}: leaving this step and saving, {self.grace_seconds:g} s at most; again leaves at once")
        if self._is_abandonable:
            raise Interrupted

    def _leave(self, why: str) -> None:
        """End the process here and now: the checkpoints on the disk are whole, and children die with it."""
        cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
        os.write(2, f"{cursor}oncurve: {why}\n".encode())
        os._exit(self.exit_code)
