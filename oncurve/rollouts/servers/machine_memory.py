"""Folders in the machine's memory, and how much can still be put there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MEMORY = Path("/dev/shm")
_MOUNTS = Path("/proc/mounts")
_FACTS = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def is_memory(folder: Path, *, mounts: Path = _MOUNTS) -> bool:
    """A folder is on a file system in memory. False where the system does not tell."""
    place, found = folder.resolve(), ("", "")
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    for line in lines:
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if place.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1] in ("tmpfs", "ramfs")


def free_bytes(folder: Path, *, facts: Path = _FACTS, container: Path = _CONTAINER) -> int:
    """What can still be put into a folder in memory: what its file system has left, the machine, and the container."""
    left = os.statvfs(folder)
    rooms = [left.f_bavail * left.f_frsize]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in facts.read_text().splitlines() if line.startswith("MemAvailable:"))
        rooms.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max", and another version of cgroups: no limit is known
        rooms.append(int((container / "memory.max").read_text()) - int((container / "memory.current").read_text()))
    return max(0, min(rooms))
