"""Fork server inside the sandbox: a fresh process for every test.

The harness never runs a graded program and never sees one: the process it forks reads its job from a socket of its
own, whose other end is outside. So nothing of one job is left in the memory that the next one starts with.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from . import confine, jobs, landlock

PRELOADED = (
    "abc argparse array ast asyncio base64 bisect calendar cmath collections collections.abc contextlib copy "
    "dataclasses datetime decimal difflib enum fractions functools hashlib heapq io itertools json keyword math "
    "numbers operator pprint pathlib queue random re statistics string struct textwrap threading time traceback "
    "types typing unittest uuid _sitebuiltins _strptime"
)
"""Imported once and shared by all programs, since most of them use some."""
MAX_MESSAGE_BYTES = 4096
DATA_FD = 3
"""File descriptor of a graded process's socket to the outside."""
FIRST_SPARE_FD = 100


def main(control_fd: int, settings: Mapping[str, Any]) -> None:
    """Serves one child after the other until the other end of the control socket is closed.

    Consumes requests ``{"limits": ...}`` with two or three descriptors: the child's socket, its standard output and,
    optionally, its standard input. Answers ``{"status", "cpu_seconds", "is_dirty"}`` when the child is gone.
    """
    control = socket.socket(fileno=control_fd)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    confine.hide()
    if settings["packages"]:
        sys.path.append(settings["packages"])
    for name in (*PRELOADED.split(), *settings["modules"]):
        importlib.import_module(name)
    sys.set_int_max_str_digits(0)  # long integers are part of some tasks; the limit of processor time holds them
    if settings["landlock"]:
        landlock.restrict(readable=settings["readable"], writable_devices=[os.devnull])
    scratch = Scratch(settings["scratch"])
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": os.getpid()}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        if len(fds) >= 2:  # an order to kill a child that is gone already comes without
            report = _run_child(control, json.loads(message), fds, settings)
            control.send(json.dumps({**report, "is_dirty": not scratch.clean()}).encode())


class Scratch:
    """The one folder that a program may write to, if there is one."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._mode = os.stat(path).st_mode if path else 0

    def clean(self) -> bool:
        """Removes what the last program left; False if that is more than a few plain files."""
        if self._path is None:
            return True
        try:
            for entry in os.listdir(self._path)[:100]:
                os.unlink(os.path.join(self._path, entry))
            return not os.listdir(self._path) and os.stat(self._path).st_mode == self._mode
        except OSError:
            return False


def _run_child(
    control: socket.socket, request: dict[str, Any], fds: list[int], settings: Mapping[str, Any]
) -> dict[str, Any]:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become_child(parent, request, fds, settings)
        finally:
            os._exit(70)
    for fd in fds:
        os.close(fd)
    _wait(control, pid)
    _, status, usage = os.wait4(pid, 0)
    return {"status": os.waitstatus_to_exitcode(status), "cpu_seconds": usage.ru_utime + usage.ru_stime}


def _wait(control: socket.socket, pid: int) -> None:
    """Returns when the child has ended, kills it when told so, and ends with it when nobody is left outside."""
    handle = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(control, select.POLLIN)
    try:
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if handle in ready:
                return
            order = control.recv(MAX_MESSAGE_BYTES)
            os.kill(pid, signal.SIGKILL)
            if not order:
                os.waitpid(pid, 0)
                os._exit(0)
    finally:
        os.close(handle)


def _become_child(parent: int, request: dict[str, Any], fds: list[int], settings: Mapping[str, Any]) -> None:
    os.setsid()
    confine.die_with(parent)
    moved = [os.dup2(fd, FIRST_SPARE_FD + offset) for offset, fd in enumerate(fds)]
    os.dup2(moved[1], 1)
    if len(moved) > 2:
        os.dup2(moved[2], 0)
    os.dup2(moved[0], DATA_FD)
    os.closerange(DATA_FD + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir(settings["scratch"] or "/")
    confine.limit(request["limits"])
    confine.filter_system_calls(os.uname().machine, may_change_files=settings["scratch"] is not None)
    jobs.run(DATA_FD)
    os._exit(0)
