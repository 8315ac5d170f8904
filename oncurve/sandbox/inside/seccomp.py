"""The seccomp filter of a graded program.

A list of what is allowed, written as classic BPF. Everything else fails with EPERM, calls newer than the list with
ENOSYS so that the C library falls back to an older one. No new process, no exec, no socket but a stream pair, no
signal to anybody else, no memory that RLIMIT_AS does not count (memfd, System V), no namespaces, ptrace, keys or BPF.
"""

from __future__ import annotations

import struct

from .syscalls import CHECKED, FILE_CHANGES, FILES, MEMORY_AND_THREADS, PROCESS, WAITING, numbers

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's number for the machine that a call was made for; another one means a 32-bit call, which is killed."""

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050001, 0x00050026
FIRST_NEW_CALL = 424
"""From here on the numbers are the same on all machines, and the C library knows what to do without them."""

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE_OR_EQUAL, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16

_CLONE_THREAD = 0x00010000
_NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEW*: user, pid, network, ipc, uts, cgroup, mount, time
_COMMANDS_AGAINST_OTHERS = (8, 10, 15, 1024)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals by way of a file; F_SETLEASE
_ACCESS_AND_TRUNCATE = 0x203  # O_ACCMODE | O_TRUNC
_TRUNCATING_WITHOUT_WRITING = (0x200, 0x203)  # which Landlock lets pass before its third version
_TERMINAL_AND_FILE_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_NAMING_PRCTLS = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
_AF_UNIX, _SOCK_STREAM, _SOCKET_TYPE_MASK = 1, 1, 0xF

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, constant."""


def child_filter(machine: str, own_pid: int, *, may_change_files: bool) -> bytes:
    """The filter of one graded process, ready for the kernel; ``own_pid`` is the only process it may signal.

    ``may_change_files`` is for processes that see no files but read-only ones and their own.

    Raises KeyError for a machine without a table.
    """
    checked = numbers(CHECKED, machine)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [(_JUMP_ABOVE_OR_EQUAL, 0, 1, 0x40000000), (_RETURN, 0, 0, KILL)]
    free = numbers(FILES + WAITING + MEMORY_AND_THREADS + PROCESS + FILE_CHANGES * may_change_files, machine)
    for first, last in _ranges(sorted(free.values())):
        program += [(_JUMP_ABOVE_OR_EQUAL, 0, 2, first), (_JUMP_ABOVE_OR_EQUAL, 1, 0, last + 1), (_RETURN, 0, 0, ALLOW)]
    for name, rule in _rules(own_pid).items():
        if name in checked:
            program += [(_JUMP_EQUAL, 0, len(rule), checked[name]), *rule]
    program += [(_JUMP_ABOVE_OR_EQUAL, 0, 1, FIRST_NEW_CALL), (_RETURN, 0, 0, ENOSYS), (_RETURN, 0, 0, EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _rules(own_pid: int) -> dict[str, list[Instruction]]:
    """For every checked call, instructions that end in a verdict."""
    return {
        "clone": [
            *_load(0),
            (_JUMP_ANY_BIT, 2, 0, _NAMESPACE_FLAGS),
            (_JUMP_ANY_BIT, 0, 1, _CLONE_THREAD),
            (_RETURN, 0, 0, ALLOW),
            (_RETURN, 0, 0, EPERM),
        ],
        "fcntl": _unless_among(1, _COMMANDS_AGAINST_OTHERS),
        "ioctl": _only_if_among(1, _TERMINAL_AND_FILE_IOCTLS),
        "kill": _only_if_among(0, (own_pid,)),
        "tgkill": _only_if_among(0, (own_pid,)),
        "open": _unless_truncating(1),
        "openat": _unless_truncating(2),
        "prctl": _only_if_among(0, _NAMING_PRCTLS),
        "prlimit64": _only_if_among(0, (0, own_pid)),
        "sendto": [  # without an address: with one, a datagram pair could reach any socket of the machine
            *_load(4),
            (_JUMP_EQUAL, 0, 3, 0),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * 4 + 4),
            (_JUMP_EQUAL, 0, 1, 0),
            (_RETURN, 0, 0, ALLOW),
            (_RETURN, 0, 0, EPERM),
        ],
        "socketpair": [
            *_load(0),
            (_JUMP_EQUAL, 0, 4, _AF_UNIX),
            *_load(1),
            (_AND, 0, 0, _SOCKET_TYPE_MASK),
            (_JUMP_EQUAL, 0, 1, _SOCK_STREAM),
            (_RETURN, 0, 0, ALLOW),
            (_RETURN, 0, 0, EPERM),
        ],
    }


def _unless_truncating(argument: int) -> list[Instruction]:
    load, *rest = _unless_among(argument, _TRUNCATING_WITHOUT_WRITING)
    return [load, (_AND, 0, 0, _ACCESS_AND_TRUNCATE), *rest]


def _load(argument: int) -> list[Instruction]:
    """Loads the lower half of an argument; both machines are little-endian."""
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]


def _only_if_among(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    jumps = [(_JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*_load(argument), *jumps, (_RETURN, 0, 0, EPERM), (_RETURN, 0, 0, ALLOW)]


def _unless_among(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    jumps = [(_JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*_load(argument), *jumps, (_RETURN, 0, 0, ALLOW), (_RETURN, 0, 0, EPERM)]


def _ranges(values: list[int]) -> list[tuple[int, int]]:
    """Neighbouring numbers joined: (first, last) of each run."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] == value - 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return runs
