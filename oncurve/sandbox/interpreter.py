"""The Python interpreter of the sandbox, for a user who may read almost nothing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oncurve.sandbox.failures import SandboxUnavailable

SANDBOX_UID = 64900
"""First of the user ids that sandboxes take when they are started by root; no account should have it."""

_TRY = "import ctypes, decimal, json, random, unittest"
_LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "config-*")

DROP_TO_UID = (
    "import os, sys\n"
    "uid = int(sys.argv[1])\n"
    "try:\n"
    "    open('/proc/self/oom_score_adj', 'w').write('1000')\n"
    "except OSError:\n"
    "    pass\n"
    "if uid:\n"
    "    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
"""Gives up root, offers itself to the kernel first when memory is short, and becomes another program."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python and the folders that it needs."""

    executable: str
    """Path of the binary itself, no link."""
    libraries: tuple[str, ...]
    """Folders with the standard library and with shared libraries of this Python's own."""

    @property
    def prefix(self) -> str:
        """The folder above ``bin``."""
        return str(Path(self.executable).parent.parent)


def sandbox_uid(slot: int) -> int:
    """The user that a sandbox of ours takes when it is started by root; 0 if it stays the user it is.

    Within a user namespace without room for another user, root is an ordinary user of the machine already.
    """
    if os.geteuid() != 0:
        return 0
    uid = SANDBOX_UID + slot
    ranges = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return uid if any(first <= uid < first + count for first, _, count in ranges) else 0


def as_user(uid: int, command: list[str]) -> list[str]:
    """A command line that runs a command as another user; as the same one if ``uid`` is 0."""
    return [sys.executable, "-I", "-S", "-c", DROP_TO_UID, str(uid), *command]


@functools.cache
def interpreter_for_sandbox(uid: int) -> Interpreter:
    """This Python if the sandbox's user can run it, else a copy of it that everybody can read.

    A copy is needed when Python is installed below a home folder that is closed to others, such as /root. It is made
    once per Python and kept in the folder for temporary files.

    Raises SandboxUnavailable.
    """
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    prefix = Path(executable).parent.parent
    own = Interpreter(executable, tuple(str(prefix / name) for name in ("lib", "lib64") if (prefix / name).is_dir()))
    problem = _problem_with(own, uid)
    if problem is None:
        return own
    for folder in _shared_folders():
        for _ in range(2):
            copy = _copy(own, folder)
            if copy is None:
                break
            if _problem_with(copy, uid) is None:
                return copy
            shutil.rmtree(copy.prefix, ignore_errors=True)  # an old copy of which something was cleaned away
    raise SandboxUnavailable(
        f"the sandbox cannot run Python as another user: {executable}: {problem}. "
        f"Install Python outside of a home folder, for example with the system's package manager."
    )


def _problem_with(python: Interpreter, uid: int) -> str | None:
    command = [python.executable, "-s", "-S", "-P", "-c", _TRY]
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "LD_LIBRARY_PATH": ":".join(python.libraries)}
    ended = subprocess.run(
        as_user(uid, command), env=environment, cwd="/", capture_output=True, text=True, errors="replace", check=False
    )
    return None if ended.returncode == 0 else " ".join(ended.stderr.split())[-300:]


def _shared_folders() -> Iterator[Path]:
    for name in dict.fromkeys(("/var/tmp", tempfile.gettempdir(), "/tmp")):
        if os.path.isdir(name) and os.access(name, os.W_OK):
            yield Path(name)


def _copy(python: Interpreter, folder: Path) -> Interpreter | None:
    """A copy of the binary, its shared library and the standard library; None if there is no room for it."""
    version = sys.version.split()[0]
    stamp = os.stat(python.executable).st_mtime_ns & 0xFFFFFFFF
    target = folder / f"oncurve-python-{version}-{stamp:08x}"
    stdlib = Path(sysconfig.get_path("stdlib"))
    inner = target / stdlib.parent.name / stdlib.name
    copied = Interpreter(str(target / "bin" / Path(python.executable).name), (str(target / stdlib.parent.name),))
    if _is_ours(target):
        return copied
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=folder))
    try:
        partial = scratch / target.name
        (partial / "bin").mkdir(parents=True)
        shutil.copy2(python.executable, partial / "bin")
        shutil.copytree(stdlib, partial / inner.relative_to(target), ignore=shutil.ignore_patterns(*_LEFT_OUT))
        for library in stdlib.parent.glob("libpython*.so*"):
            shutil.copy2(library, partial / stdlib.parent.name)
        _open_to_all(partial)
        partial.rename(target)
    except OSError:
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return copied if _is_ours(target) else None


def _open_to_all(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _is_ours(folder: Path) -> bool:
    """Whether the folder was made by this user and nobody else can write to it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return folder.is_dir() and not folder.is_symlink() and status.st_uid == os.geteuid() and not status.st_mode & 0o022
