"""Reaction to Ctrl-C, to a scheduler's signal, and to the notice of a spot machine."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import ismethod
from types import FrameType
from typing import Any

from oncurve.observe.terminal import leave_terminals, open_terminals
from oncurve.policy.distributed import ALONE, Processes

_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
_MEANS = {"SIGUSR1": "SIGTERM"}
"""SLURM's ``--signal`` announces the end by another signal than the one that ends."""


def _end_as_any_other() -> None:
    """In a child that a reward function forked: signals end it at once and are not told to the run.

    A handler in Python would not do: it runs between two instructions, so a signal that comes just before a call
    that waits is heard after that call.
    """
    signal.set_wakeup_fd(-1)
    for name in (*_SIGNALS, "SIGUSR2"):
        handler = signal.getsignal(signal.Signals[name])
        if ismethod(handler) and isinstance(handler.__self__, Interruption):
            signal.signal(signal.Signals[name], signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_as_any_other)


class Interrupted(BaseException):
    """The run was told to go and leaves the step it is in. No grader may catch it, so it is no ordinary exception."""


class Interruption:
    """The signals that came. The first one is obeyed at the next safe place; the second leaves at once.

    Sampling, grading and measuring change nothing that is saved and are left in their middle; training is left
    between two microbatches, as long as the step has not moved the weights.

    Several processes leave together. A signal to any of them is told to all, each leaves its own share of sampling or
    grading, and where the shares are put together, and at every ``check``, they agree. In between nobody leaves, since
    the others would wait. A thread hears of the signal even while this process waits for others.
    """

    def __init__(
        self,
        *,
        grace_seconds: float = 25.0,
        notify: Callable[[str], None] | None = None,
        is_alone: bool = True,
        owns_process: bool = True,
    ) -> None:
        """``is_alone`` is false where there are other processes, known or yet to be joined.

        Where the process belongs to somebody else, as in a notebook, it is never ended from here: there is no time of
        grace, and the second signal raises KeyboardInterrupt.
        """
        self._owns_process = owns_process
        self.grace_seconds = grace_seconds
        self.notify = notify
        self._is_alone, self._processes = is_alone, ALONE
        self._number: int | None = None
        self._num_received = 0
        self._is_abandonable = False
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._terminals: list[int] = []
        """Standard input and outputs that are a terminal."""
        self._handlers: dict[signal.Signals, Any] = {}
        """The handlers of signals before this one."""
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def is_requested(self) -> bool:
        """A signal has come."""
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """128 and the number of the signal: 130 for Ctrl-C, 143 for SIGTERM; 0 if none came."""
        return 128 + self._number if self._number is not None else 0

    def join(self, processes: Processes) -> None:
        """From now on these processes leave together."""
        self._processes = processes
        processes.on_stop_request(self._hear)
        if self._number is not None:
            processes.ask_to_stop(self._number)

    @contextmanager
    def listen(self) -> Iterator[None]:
        """React to signals while it lasts; outside the main thread signals are left to whoever runs it there."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = {number: self._receive for number in signal.Signals if number.name in _SIGNALS}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            del numbers[signal.SIGHUP]
        self._terminals = open_terminals()
        if not self._is_alone:
            numbers[signal.SIGUSR2] = self._nudged
        self._handlers = numbers
        self._previous = {number: signal.signal(number, handler) for number, handler in numbers.items()}
        try:
            with self._overheard():
                yield
        finally:
            for number, handler in self._previous.items():  # a nudge that comes too late must not end the process
                signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR2 else handler)
            if self._timer is not None:
                self._timer.cancel()

    @contextmanager
    def away(self) -> Iterator[None]:
        """While it lasts, the program that asks for the steps does something of its own, and signals are its own too.

        Where the run owns the process, there is no such program.
        """
        is_elsewhere = threading.current_thread() is not threading.main_thread()
        if self._owns_process or is_elsewhere or not self._handlers:
            yield
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():  # else a collector ends the run, anywhere
                self._previous = {number: signal.signal(number, mine) for number, mine in self._handlers.items()}

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """While it lasts, a signal raises Interrupted wherever it meets the program, if that is alone."""
        self.check()
        with self.own_share() if self._is_alone else nullcontext():
            yield

    @contextmanager
    def own_share(self) -> Iterator[None]:
        """While it lasts, no other process waits for this one in between: a signal raises Interrupted anywhere."""
        outer, self._is_abandonable = self._is_abandonable, True
        try:
            if self._number is not None:
                raise Interrupted
            yield
        finally:
            self._is_abandonable = outer

    @property
    def number(self) -> int:
        """The signal that came, to this or another process; 0 if none did."""
        return self._number or 0

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Another process of the run got a signal: as if it had come here."""
        self._number = self._number or number

    def check(self) -> None:
        """Raises Interrupted if a signal has come to any of the processes, which must all call it."""
        if number := max(self._processes.all_gather(self.number)):
            self.ask(number)
            raise Interrupted

    def check_alone(self) -> None:
        """The same at a place that processes pass unequally often: only where there is one."""
        if self._is_alone:
            self.check()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGHUP":  # a closing session sends it beside others, and twice: it is never the second signal
            leave_terminals(self._terminals)
        else:
            self._num_received += 1
        if self._num_received > 1:
            if not self._owns_process:
                raise KeyboardInterrupt
            self._leave("left at once")
        self._number = self._number or signal.Signals[_MEANS.get(name, name)]
        self._start_timer()
        if self.notify is not None:
            limit = f" (up to {self.grace_seconds:g} s)" if self._owns_process else ""
            again = "Press Ctrl-C again to quit now." if name == "SIGINT" else "Another signal quits now."
            self.notify(f"{name}: stopping and saving a checkpoint{limit}. {again}")
        self._nudged(number, frame)

    def _nudged(self, number: int, frame: FrameType | None) -> None:
        if self._is_abandonable and self._number is not None:
            raise Interrupted

    @contextmanager
    def _overheard(self) -> Iterator[None]:
        """Hear of signals at once in a thread: while a process waits for others, no handler of Python's runs."""
        if self._is_alone:
            yield
            return
        hearing, telling = socket.socketpair()
        telling.setblocking(False)
        before = signal.set_wakeup_fd(telling.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._overhear, args=[hearing], name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            telling.close()
            thread.join()
            hearing.close()

    def _overhear(self, hearing: socket.socket) -> None:
        while heard := hearing.recv(1):
            name = signal.Signals(heard[0]).name
            if name in _SIGNALS:
                self.ask(signal.Signals[_MEANS.get(name, name)])
                self._start_timer()
                self._processes.ask_to_stop(self.number)

    def _hear(self, number: int) -> None:
        """Another process got a signal: leave the own share of the work, in the main thread, as if it had come here."""
        self.ask(number)
        self._start_timer()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def _start_timer(self) -> None:
        with self._lock:
            if self._timer is not None or not self._owns_process:
                return
            self._timer = threading.Timer(self.grace_seconds, self._leave, ["the time of grace is over"])
            self._timer.daemon = True
            self._timer.start()

    def _leave(self, why: str) -> None:
        """End the process here and now: the checkpoints on the disk are whole, and children die with it."""
        cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
        os.write(2, f"{cursor}oncurve: {why}\n".encode())
        os._exit(self.exit_code)
