"""How does a test get many real processes of the command line without paying for the imports each time?

One process imports everything and then forks a child for every command. A child is a process of its own: it can be
killed, signalled and waited for like any other, and it runs the command as a user types it. Where a child starts
Python itself, as the launcher of several processes does, it starts a small program that has a fork do its work.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROCESS = Path(__file__).with_name("nursery_process.py")
ROOT = Path(__file__).resolve().parents[1]
ROOM = "-" * 8000
"""A word that makes room for the command lines of children, which are written over it."""
NEEDED_BY_OTHERS: list[subprocess.Popen[bytes]] = []
"""Processes that go on when who began them is done; an object that is given up before its process is a warning."""
STARTED = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg"}
"""What the process that forks has read from its environment when it imported, and its children have."""


@dataclass
class Child:
    """One command in one process."""

    pid: int
    log: Path
    errors: Path
    """The log as well, unless they were asked for apart."""
    address: str
    """Of who forked it."""
    status: int | None = None

    def kill(self, number: int = 9) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit status; minus the number of the signal that ended it."""
        if self.status is None:
            self.status = ask(self.address, {"wait": self.pid})
        assert self.status is not None
        return self.status

    def is_running(self) -> bool:
        if self.status is None:
            self.status = ask(self.address, {"poll": self.pid})
        return self.status is None

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


class Nursery:
    """The process that forks."""

    def __init__(
        self,
        folder: Path,
        *,
        python: str = sys.executable,
        module: str = "nursery_oncurve",
        variables: Mapping[str, str] | None = None,
        shared: Path | None = None,
    ) -> None:
        """``module`` is imported by ``python`` before the first fork, with more ``variables`` in its environment.

        Processes that name the same ``shared`` file have one that forks for all of them; it ends with the last.
        """
        self.folder = folder
        self.variables = STARTED | dict(variables or {})
        self.count = 0
        self.process: subprocess.Popen[bytes] | None = None
        with (shared or folder / "nursery").open("a+", encoding="utf-8") as note:
            fcntl.flock(note, fcntl.LOCK_EX)
            note.seek(0)
            try:
                self._use(note.read() or "/nowhere")
            except OSError:  # there is none, or none any more
                place = tempfile.mkdtemp(prefix="nursery")  # the name of a socket must be short
                self.process = self._begin(place, [python, str(PROCESS), f"{place}/at", ROOM, module])
                self._use(place)
                note.truncate(0)
                note.write(place)

    def _begin(self, place: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Its input is at its end when everybody has let go of it."""
        os.mkfifo(f"{place}/held")
        held = os.open(f"{place}/held", os.O_RDONLY | os.O_NONBLOCK)
        environment = os.environ | self.variables | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdin=held, stdout=subprocess.PIPE, env=environment, cwd=self.folder)
        os.close(held)
        return process

    def _use(self, place: str) -> None:
        self.held = os.open(f"{place}/held", os.O_WRONLY | os.O_NONBLOCK)
        self.address = f"{place}/at"
        if self.process is not None:
            assert self.process.stdout is not None
            assert self.process.stdout.readline() == b"ready\n"

    def start(self, *words: object, **limits: Any) -> Child:
        """``oncurve`` with these words; the limits are those of ``python``."""
        return self.python("-m", "oncurve", *words, **limits)

    def python(
        self,
        *words: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        apart: bool = False,
        file_limit: int | None = None,
        user: int | None = None,
        die_in: tuple[str, str, int] | None = None,
    ) -> Child:
        """Python with these words: a module, code or a program, in a folder and with more variables.

        ``apart`` keeps what it says as an error from the rest. ``file_limit`` is the largest file in bytes that it may
        write; ``die_in`` names a module, a function in it and the number of the call at which it is killed before the
        function does anything.
        """
        self.count += 1
        log = self.folder / f"output_{self.count}.txt"
        errors = self.folder / f"errors_{self.count}.txt" if apart else log
        limits = {"file_limit": file_limit, "user": user, "die_in": die_in}
        message = {"start": [*map(str, words)], "cwd": str(cwd or Path.cwd()), "env": self.environment(env), **limits}
        with open(os.devnull, "rb") as nothing, log.open("ab") as said, errors.open("ab") as wrong:
            pid = ask(self.address, message, [nothing.fileno(), said.fileno(), wrong.fileno()])
        assert pid is not None
        return Child(pid, log, errors, self.address)

    def run(self, *words: object, **limits: Any) -> tuple[int, str]:
        """Exit status of ``oncurve`` and everything that was said."""
        child = self.start(*words, **limits)
        return child.wait(), child.output

    def run_python(self, *words: object, **limits: Any) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run`` gives of a Python with these words."""
        child = self.python(*words, **limits, apart=True)
        status = child.wait()
        errors = child.errors.read_text(encoding="utf-8", errors="replace")
        return subprocess.CompletedProcess([sys.executable, *map(str, words)], status, child.output, errors)

    def stand_in(self, path: Path, *words: str) -> Path:
        """A program for scripts that call one: it begins with these words of Python, and its work is done by a fork."""
        return Path(write_stand_in(path, sys.executable, self.address, *words, variables=self.variables))

    def close(self) -> None:
        """End it and whoever it forked, unless others still need it: it ends, and removes its folder, with the last."""
        os.close(self.held)
        if self.process is not None:
            assert self.process.stdout is not None
            self.process.stdout.close()
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                NEEDED_BY_OTHERS.append(self.process)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """That of this process, with what the forking one has read already."""
        return dict(os.environ) | self.variables | dict(more or {})


def ask(address: str, message: Mapping[str, Any], streams: Sequence[int] = ()) -> int | None:
    """Each question has a connection of its own, so that one that is given up leaves nothing for the next."""
    with connected(address, message, streams) as asking, asking.makefile("rb") as answer:
        return json.loads(answer.read())


def connected(address: str, message: Mapping[str, Any], streams: Sequence[int]) -> socket.socket:
    """A connection on which a question was asked."""
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(address)
    text = json.dumps(message).encode()
    socket.send_fds(asking, [len(text).to_bytes(8, "big")], list(streams))
    asking.sendall(text)
    return asking


def write_stand_in(
    path: Path, python: str, address: str, *words: str, variables: Mapping[str, str] | None = None
) -> str:
    """A program in the place of Python, which it is for all but a module, code or a file."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (variables or {}).items())
    command = [python, "-S", "-E", str(Path(__file__).resolve()), address, *words]
    path.write_text(f'#!/bin/sh\n{exports}exec {shlex.join(command)} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def be_done_by_a_fork(address: str, words: Sequence[str]) -> int:
    """Have a fork do the work of this process with its streams, pass signals on, and end as it ends.

    It ends as this process does, too: by the connection, which is closed however this process goes.
    """
    after = words[1:] if words[:1] == ["-u"] else words
    if not after or (after[0].startswith("-") and after[0] not in ("-m", "-c", "-")):
        os.execv(sys.executable, [sys.executable, *words])
    limits = dict.fromkeys(("file_limit", "user", "die_in"))
    message = {"start": list(words), "cwd": os.getcwd(), "env": dict(os.environ), "is_tied": True, **limits}
    with connected(address, message, [0, 1, 2]) as asking, asking.makefile("rb") as answer:
        pid = int(answer.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        status = int(answer.readline())
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(be_done_by_a_fork(sys.argv[1], sys.argv[2:]))
