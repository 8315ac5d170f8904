"""Self-confinement of a process, before it runs an untrusted program."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Mapping

from .seccomp import child_filter

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_MIB = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    """``struct sock_fprog`` of the kernel."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _prctl(option: int, *arguments: int | ctypes.Structure) -> None:
    converted = [
        ctypes.byref(item) if isinstance(item, ctypes.Structure) else ctypes.c_ulong(item) for item in arguments
    ]
    converted += [ctypes.c_ulong(0)] * (4 - len(converted))
    if _libc.prctl(ctypes.c_int(option), *converted) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with(parent_pid: int) -> None:
    """This process is killed when its parent ends; it ends at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def hide() -> None:
    """No process of the same user may trace this one or read its memory, and it gains no privilege any more."""
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def limit(limits: Mapping[str, int]) -> None:
    """Sets the limits of this process for good: soft and hard ones alike, so that they cannot be raised again.

    Only for processor time is the hard limit a second later: the soft one ends the process with a signal of its own,
    which tells it from one that was killed for its memory.
    """
    _lower(resource.RLIMIT_CPU, limits["cpu_seconds"], margin=1)
    for name, key, unit in (
        (resource.RLIMIT_AS, "memory_mib", _MIB),
        (resource.RLIMIT_FSIZE, "file_mib", _MIB),
        (resource.RLIMIT_NOFILE, "open_files", 1),
        (resource.RLIMIT_NPROC, "num_tasks", 1),
    ):
        _lower(name, limits[key] * unit)
    _lower(resource.RLIMIT_STACK, 64 * _MIB)
    for name in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        _lower(name, 0)


def _lower(name: int, value: int, margin: int = 0) -> None:
    hard = resource.getrlimit(name)[1]
    if hard != resource.RLIM_INFINITY:
        value, margin = min(value, hard), min(margin, hard - min(value, hard))
    resource.setrlimit(name, (value, value + margin))


def filter_system_calls(machine: str, *, may_change_files: bool) -> None:
    """Installs the filter; from here on the process can start nothing and reach nobody."""
    program = child_filter(machine, os.getpid(), may_change_files=may_change_files)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _FilterProgram(len(program) // 8, program))
