"""Local launcher: starts the processes of a run, watches them, ends them together, and restarts them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from oncurve.constants import PR_SET_PDEATHSIG
from oncurve.observe.terminal import leave_terminals, open_terminals
from oncurve.run_errors import LostProcess

COMMAND = (sys.executable, "-m", "oncurve")
GRACE_SECONDS = 20.0
"""Time that the others have to notice that one of them failed, and to report it."""
CRASHED = 1
"""Exit code of an error that nobody expected: another try may pass."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def run_processes(
    first: Sequence[str],
    again: Sequence[str],
    *,
    processes: int,
    restarts: int = 0,
    stop_seconds: float = 60.0,
    notify: Callable[[str], None],
) -> int:
    """Run ``oncurve`` with some words in several processes, and with ``again`` after failures that may pass.

    Such are a process that was killed or lost, and an error that nobody expected; a message about the recipe or the
    data is not. A signal to this process goes to all of them and ends the trying; ``stop_seconds`` later whoever is
    left is killed.

    Returns the exit code of a process, the one that says most.
    """
    arguments, code = first, CRASHED
    for left in range(restarts, -1, -1):
        code, is_requested = ProcessSupervisor(arguments, processes, stop_seconds=stop_seconds, notify=notify).run()
        if is_requested or code not in (LostProcess.exit_code, CRASHED):
            return code
        if not left:
            break
        notify(
            f"starting the processes again from the last checkpoint, for the {restarts - left + 1}. time of {restarts}"
        )
        arguments = again
    return code


class ProcessSupervisor:
    """The processes of one attempt."""

    def __init__(
        self, arguments: Sequence[str], count: int, *, stop_seconds: float, notify: Callable[[str], None]
    ) -> None:
        self.count, self.notify, self.stop_seconds = count, notify, stop_seconds
        self._members: list[subprocess.Popen[bytes]] = []
        self._failed: list[tuple[int, int]] = []
        """Rank and code, in the order of their ends."""
        self._deadline: float | None = None
        self._is_requested = False
        self._arguments = arguments

    def run(self) -> tuple[int, bool]:
        """Exit code of the attempt, and whether a signal ended it."""
        with self._forwarding():
            port = free_port()
            for rank in range(self.count):
                self._members.append(self._start(rank, port))
            left = set(range(self.count))
            while left:
                left -= {rank for rank in left if self._has_ended(rank)}
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self._kill(left)
                time.sleep(0.02)
        return self._code(), self._is_requested

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        parent = os.getpid()

        def die_with_parent() -> None:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(CRASHED)

        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.count,
            "LOCAL_WORLD_SIZE": self.count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        threads = {} if self.count == 1 else {"OMP_NUM_THREADS": str(max(1, cores // self.count))}
        environment = threads | os.environ | {name: str(value) for name, value in variables.items()}
        # A session of its own: Ctrl-C in a terminal comes here, and is forwarded once.
        return subprocess.Popen(
            [*COMMAND, *self._arguments], env=environment, start_new_session=True, preexec_fn=die_with_parent
        )

    def _has_ended(self, rank: int) -> bool:
        code = self._members[rank].poll()
        if code is None:
            return False
        if code:
            self._failed.append((rank, code))
            if code < 0 and not self._is_requested and self.count > 1:
                self.notify(f"process {rank} of {self.count} was killed by {signal.Signals(-code).name}")
            self._deadline = self._deadline or time.monotonic() + GRACE_SECONDS
        return True

    def _code(self) -> int:
        """The exit code of the attempt: the first that is more than the loss of another process."""
        if not self._failed:
            return 0
        codes = [code for _, code in self._failed if code > 0 and code != LostProcess.exit_code]
        return codes[0] if codes else LostProcess.exit_code

    def _kill(self, ranks: set[int]) -> None:
        self._deadline = None
        for rank in ranks:
            self.notify(f"process {rank} of {self.count} does not end by itself and is killed")
            self._members[rank].kill()

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        terminals = open_terminals()

        def forward(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGHUP:
                leave_terminals(terminals)
            self._is_requested = True
            self._deadline = self._deadline or time.monotonic() + self.stop_seconds
            for member in self._members:
                if member.poll() is None:
                    member.send_signal(number)

        heard = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]  # as of nohup
        previous = {number: signal.signal(number, forward) for number in heard}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def supervise(
    first: list[str],
    again: list[str],
    *,
    processes: int,
    restarts: int,
    grace_seconds: float,
    notify: Callable[[str], None],
) -> int:
    """The exit code of a command that saves within ``grace_seconds`` when it is told to end."""
    stop_seconds = grace_seconds + GRACE_SECONDS
    return run_processes(first, again, processes=processes, restarts=restarts, stop_seconds=stop_seconds, notify=notify)
