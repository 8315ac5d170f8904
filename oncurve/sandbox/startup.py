"""Command line, environment and script with which a sandbox starts."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from oncurve.sandbox.interpreter import Interpreter
from oncurve.sandbox.packages import INSIDE, package_paths

TierName = Literal["bubblewrap", "landlock"]
"""A way to isolate a program; the second is weaker."""

ENVIRONMENT = {
    "HOME": "/tmp",
    "LC_ALL": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/nowhere",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "TZ": "UTC",
}
"""All that a program finds in its environment: nothing of ours, and nothing that differs between runs."""

SCRATCH = "/tmp"
_INSIDE_PYTHON = "/python"
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_DATA_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_MODULES = (
    "codec frames caught syscalls seccomp landlock confine remote assertions pytest_stand_in judge program jobs harness"
)
"""Modules that are sent into the sandbox, each after those that it imports."""

_LOADER = """
import sys
from types import ModuleType
package = sys.modules["inside"] = ModuleType("inside")
package.__path__ = []
for name, source in MODULES:
    module = sys.modules["inside." + name] = ModuleType("inside." + name)
    module.__package__ = "inside"
    setattr(package, name, module)
    exec(compile(source, "<inside/" + name + ">", "exec", dont_inherit=True), module.__dict__)
sys.modules["inside.harness"].main(CONTROL, SETTINGS)
"""


@functools.cache
def _inside_sources() -> tuple[tuple[str, str], ...]:
    folder = Path(__file__).parent / "inside"
    return tuple((name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES.split())


def script(control_fd: int, settings: dict[str, Any]) -> str:
    """The code that the interpreter in the sandbox reads from its standard input: all that it needs."""
    return f"MODULES = {_inside_sources()!r}\nCONTROL = {control_fd}\nSETTINGS = {settings!r}\n{_LOADER}"


def environment(python: Interpreter, tier: TierName) -> dict[str, str]:
    """The environment of the interpreter in the sandbox."""
    folders = python.libraries
    if tier == "bubblewrap" and python.prefix != "/usr":
        folders = tuple(f"{_INSIDE_PYTHON}/{Path(folder).name}" for folder in folders)
    return {**ENVIRONMENT, "LD_LIBRARY_PATH": ":".join(folders)} if python.prefix != "/usr" else dict(ENVIRONMENT)


def readable_paths(python: Interpreter) -> list[str]:
    """Everything that a program may read when there is no mount namespace."""
    paths = (*_SYSTEM_LIBRARIES, *_DATA_FILES, *_DEVICES, *python.libraries)
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def interpreter_command(executable: str) -> list[str]:
    """Runs the script on standard input, without site packages, user packages or the working folder."""
    return [executable, "-s", "-S", "-P", "-"]


def bubblewrap_command(
    python: Interpreter, *, scratch_mib: int, info_fd: int, packages: Sequence[str] = ()
) -> list[str]:
    """The interpreter in namespaces of its own: a read-only root with little in it, no network, one small /tmp.

    Raises FileNotFoundError without bubblewrap.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError("the command bwrap is not on the PATH")
    inside = python.executable
    command = [bwrap, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"]
    command += ["--unshare-cgroup-try", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    command += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--as-pid-1", "--info-fd", str(info_fd)]
    command += _library_mounts()
    if python.prefix == "/usr":
        command += ["--ro-bind", inside, inside]
    else:
        inside = f"{_INSIDE_PYTHON}/bin/{Path(python.executable).name}"
        command += ["--ro-bind", python.executable, inside]
        for folder in python.libraries:
            command += ["--ro-bind", folder, f"{_INSIDE_PYTHON}/{Path(folder).name}"]
    for path in package_paths(packages):
        command += ["--ro-bind", str(path.resolve()), f"{INSIDE}/{path.name}"]
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--size", str(scratch_mib << 20), "--tmpfs", SCRATCH, "--remount-ro", "/", "--chdir", SCRATCH, "--"]
    return command + interpreter_command(inside)


def _library_mounts() -> Iterator[str]:
    for path in (*_SYSTEM_LIBRARIES, *_DATA_FILES):
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.exists(path):
            yield from ("--ro-bind", path, path)
