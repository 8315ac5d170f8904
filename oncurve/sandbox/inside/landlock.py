"""Landlock: giving up access to all but a few files, without namespaces or privileges."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""The same numbers on every machine."""
_ASK_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file rights that each version of the interface knows; from 5 on it is 16."""
_NET_RIGHTS = 0b11  # bind and connect over TCP
_SCOPES = 0b11  # abstract sockets and signals of other domains


def version() -> int:
    """The version of the kernel's Landlock interface; 0 without Landlock."""
    return max(_system_call(CREATE_RULESET, None, 0, _ASK_VERSION), 0)


def restrict(*, readable: Sequence[str], writable_devices: Sequence[str] = ()) -> None:
    """From here on this process and its children open nothing for writing and read below ``readable`` only.

    TCP, abstract sockets and signals to other processes are refused as well where the kernel knows how. The
    existence of other files stays visible, and so does the process tree.

    Raises OSError when the kernel refuses.
    """
    abi = version()
    if abi < 1:
        raise OSError("this kernel has no Landlock, or it is switched off")
    file_rights = (1 << _FILE_RIGHTS.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", file_rights, _NET_RIGHTS if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    attributes = attributes[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _must(_system_call(CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    try:
        for path in readable:
            _allow(ruleset, path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
        for path in writable_devices:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
        _must(_system_call(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, fd)
        _must(_system_call(ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"landlock_add_rule for {path}")
    finally:
        os.close(fd)


def _system_call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    converted = [ctypes.c_long(item) if isinstance(item, int) else ctypes.c_char_p(item) for item in arguments]
    return libc.syscall(ctypes.c_long(number), *converted)


def _must(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
