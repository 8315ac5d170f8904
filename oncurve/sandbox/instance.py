"""One sandbox: starting it, running processes in it, and ending it without a trace."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from oncurve.sandbox import startup
from oncurve.sandbox.connection import Connection
from oncurve.sandbox.failures import SandboxDied
from oncurve.sandbox.interpreter import Interpreter, as_user, interpreter_for_sandbox, sandbox_uid
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.packages import INSIDE, folder_of_links, module_names, package_paths
from oncurve.sandbox.startup import TierName

START_SECONDS = 30.0
"""A sandbox that is not ready by then counts as dead."""
ANSWER_SECONDS = 10.0
"""So long may a sandbox take to report the end of a process that it was told to kill."""
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a graded process, as the kernel says."""

    status: int
    """Exit status, or the signal that ended it as a negative number."""
    cpu_seconds: float
    """Processor time of all its threads."""


class Child:
    """One graded process."""

    def __init__(self, sandbox: Sandbox, connection: Connection, output: int | None) -> None:
        self.connection = connection
        self.output = output
        """Descriptor of its standard output, for reading without waiting; None if nobody wants it."""
        self._sandbox = sandbox
        self._ended: Ended | None = None

    def finish(self) -> Ended:
        """Ends the process if it still runs, and says how it ended; a second call says the same.

        Raises SandboxDied.
        """
        if self._ended is None:
            try:
                self._ended = self._sandbox._end_child()
            finally:
                self.connection.close()
                if self.output is not None:
                    os.close(self.output)
                    self.output = None
        return self._ended


class Sandbox:
    """One isolated place with a warm interpreter that forks a fresh process for every test.

    Owned by one thread at a time. It starts when it is first needed and again after it died or was left dirty.
    """

    def __init__(self, *, tier: TierName, limits: Limits, slot: int = 0, packages: tuple[str, ...] = ()) -> None:
        self._tier: TierName = tier
        self._limits = limits
        self._packages = packages
        self._uid = sandbox_uid(slot)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._inner: int | None = None
        """Handle of the first process inside; None without a process namespace."""
        self._null = -1
        self._num_tasks = 0
        self.num_starts = 0
        """Number of starts."""

    def child(self, *, limits: Limits, stdin: bytes | None = None, wants_output: bool = False) -> Child:
        """Forks a process that waits for its job.

        Raises SandboxDied.
        """
        if self._process is None:
            self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe2(os.O_CLOEXEC) if wants_output else (None, os.dup(self._null))
        passed = [theirs.fileno(), writing]
        if stdin is not None:
            passed.append(_sealed_file(stdin))
        try:
            socket.send_fds(self._control, [self._request(limits)], passed)
        except OSError as error:
            ours.close()
            if reading is not None:
                os.close(reading)
            self.close()
            raise SandboxDied(f"the sandbox ended by itself ({error})") from error
        finally:
            theirs.close()
            for fd in passed[1:]:
                os.close(fd)
        if reading is not None:
            os.set_blocking(reading, False)
        return Child(self, Connection(ours), reading)

    def start(self) -> None:
        """Starts the interpreter in its isolation and waits until it is ready.

        Raises SandboxDied with what it said last, SandboxUnavailable if no Python can be run inside.
        """
        python = interpreter_for_sandbox(self._uid)
        self._num_tasks = self._limits.num_threads + (32 if self._uid else _num_own_tasks())
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.num_starts += 1
        errors = os.memfd_create("errors")
        info_read, info_write = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = self._launch(python, theirs.fileno(), info_write, errors)
            os.close(info_write)
            info_write = -1
            theirs.close()
            self._wait_until_ready(errors)
            self._inner = _handle_of_first_process(info_read) if self._tier == "bubblewrap" else None
        except OSError as error:
            self.close()
            raise SandboxDied(f"the sandbox could not be started: {error}") from error
        finally:
            theirs.close()
            for fd in (errors, info_read, info_write):
                if fd >= 0:
                    os.close(fd)

    def close(self) -> None:
        """Ends every process of the sandbox and waits until they are gone; calling it twice is harmless."""
        if self._control is not None:
            self._control.close()  # the harness sees the end of its orders, ends its child and itself
            self._control = None
        if self._process is not None:
            self._await_end(self._process)
            self._process = None
        for fd in (self._inner, self._null):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._inner, self._null = None, -1

    def _launch(self, python: Interpreter, control_fd: int, info_fd: int, errors: int) -> subprocess.Popen[bytes]:
        is_wrapped = self._tier == "bubblewrap"
        settings: dict[str, Any] = {
            "landlock": not is_wrapped,
            "readable": startup.readable_paths(python),
            "scratch": startup.SCRATCH if is_wrapped else None,
            "modules": module_names(self._packages),
            "packages": "",
        }
        if self._packages and not is_wrapped:
            folder = folder_of_links(self._packages)
            targets = [str(path.resolve()) for path in package_paths(self._packages)]
            settings |= {"packages": folder, "readable": [*settings["readable"], folder, *targets]}
        elif self._packages:
            settings["packages"] = INSIDE
        command = startup.interpreter_command(python.executable)
        if is_wrapped:
            command = startup.bubblewrap_command(
                python, scratch_mib=self._limits.scratch_mib, info_fd=info_fd, packages=self._packages
            )
        text = _sealed_file(startup.script(control_fd, settings).encode())
        try:
            return subprocess.Popen(
                as_user(self._uid, command),
                stdin=text,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=startup.environment(python, self._tier),
                cwd="/",
                pass_fds=(control_fd, info_fd) if is_wrapped else (control_fd,),
                start_new_session=True,
            )
        finally:
            os.close(text)

    def _wait_until_ready(self, errors: int) -> None:
        assert self._control is not None
        self._control.settimeout(START_SECONDS)
        try:
            message = self._control.recv(4096)
        except TimeoutError:
            message = b""
        self._control.settimeout(ANSWER_SECONDS)
        if not message:
            output = os.pread(errors, 4096, 0).decode(errors="replace")
            self.close()
            raise SandboxDied(f"the sandbox did not start: {' '.join(output.split())[-500:] or 'it said nothing'}")

    def _request(self, limits: Limits) -> bytes:
        numbers = {
            "memory_mib": limits.memory_mib,
            "file_mib": limits.file_mib,
            "cpu_seconds": limits.cpu_seconds,
            "open_files": limits.open_files,
            "num_tasks": self._num_tasks,
        }
        return json.dumps({"limits": numbers}).encode()

    def _end_child(self) -> Ended:
        if self._control is None:
            raise SandboxDied("the sandbox ended before its process did")
        try:
            self._control.send(b"kill")
            report = self._control.recv(4096)
        except OSError as error:
            self.close()
            raise SandboxDied(f"the sandbox does not answer ({error or type(error).__name__})") from error
        if not report:
            self.close()
            raise SandboxDied("the sandbox ended before its process did")
        ended: dict[str, Any] = json.loads(report)
        if ended["is_dirty"]:
            self.close()
        return Ended(ended["status"], ended["cpu_seconds"])

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
            return
        if self._inner is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inner, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
                return
        process.kill()
        process.wait()


def _sealed_file(content: bytes) -> int:
    """A file in memory that can be read and nothing else."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(fd, 1033, _SEALS)  # F_ADD_SEALS
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _handle_of_first_process(info_fd: int) -> int | None:
    """A handle of the process that bubblewrap started, which no other process can inherit."""
    poll = select.poll()
    poll.register(info_fd, select.POLLIN)
    if not poll.poll(1000):
        return None
    text = b""
    deadline = time.monotonic() + 1.0
    while not text.rstrip().endswith(b"}") and time.monotonic() < deadline:
        part = os.read(info_fd, 4096)
        if not part:
            break
        text += part
    try:
        return os.pidfd_open(json.loads(text)["child-pid"])
    except (ValueError, KeyError, OSError):
        return None


def _num_own_tasks() -> int:
    """Threads that this user runs already: the kernel counts them against the limit of every process of the user."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count + 256
