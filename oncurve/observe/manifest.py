"""The start of a run on record: machine, code version and command, without tokens and keys; and the sums of its files.

Nothing but the standard library is needed here, because vLLM's environment imports it too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import oncurve

HIDDEN = "[hidden]"
_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{16,}"  # the hub
    r"|sk-[A-Za-z0-9_-]{16,}"  # endpoints for chat
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|xox[abpr]-[A-Za-z0-9-]{10,}"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{12,}=*"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"  # user:password@host
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_NAMES = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SHORTEST = 8
"""Shorter values of such variables are words like "true", and would be hidden everywhere."""


def secret_values(environment: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment variables whose names say that they are secret, longest first."""
    variables = os.environ if environment is None else environment
    values = {value for name, value in variables.items() if _NAMES.search(name) and len(value) >= _SHORTEST}
    return sorted((value for value in values if not os.path.exists(value)), key=lambda value: (-len(value), value))


def redact(text: str, *, environment: Mapping[str, str] | None = None) -> str:
    """A text without what looks like a key and without the secret values of the environment.

    >>> redact("hub_token: hf_abcdefghijklmnopqrstuvwx", environment={})
    'hub_token: [hidden]'
    """
    return _redacted(text, secret_values(environment))


def _redacted(text: str, secrets: Sequence[str]) -> str:
    for value in secrets:
        text = text.replace(value, HIDDEN)
    return _SHAPES.sub(HIDDEN, text)


def redact_tree(value: Any, *, environment: Mapping[str, str] | None = None) -> Any:
    """The same for every text inside mappings and lists."""
    return _redacted_tree(value, secret_values(environment))


def _redacted_tree(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _redacted(value, secrets)
    if isinstance(value, Mapping):
        return {key: _redacted_tree(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted_tree(item, secrets) for item in value]
    return value


CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's entry in a manifest."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path, *, flush: bool = False) -> FileSum:
        """Read a file, flushed to the disk before if asked for. Other threads work meanwhile: large pieces are read and
        summed without Python's lock. Raises OSError."""
        digest, size, buffer = hashlib.sha256(), 0, bytearray(CHUNK)
        with path.open("rb", buffering=0) as file:
            if flush:
                os.fsync(file.fileno())
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                size += count
        return cls(size, digest.hexdigest())

    def entry(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        return asdict(self)

    def mismatch(self, expected: Mapping[str, Any]) -> str | None:
        """The first difference from a manifest; None if there is none."""
        if self.size != expected["size"]:
            return f"has {self.size} bytes, {expected['size']} were written"
        if self.sha256 != expected["sha256"]:
            return "its content changed since it was written (SHA-256 differs)"
        return None


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "sympy", "trl", "vllm")
_PATIENCE_SECONDS = 10


def describe_run(command: Sequence[str] | None = None, **extra: Any) -> dict[str, Any]:
    """The manifest of a run that starts now: code, versions, hardware, command and time.

    Versions come from the installed distributions, so that nothing heavy is imported. What cannot be found out is
    None, never an error. ``command`` is that of this process if not given; ``extra`` entries are added as they are.
    """
    return {
        "oncurve": oncurve.__version__,
        "code": _own_code(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "platform": platform.platform(),
        "hardware": {
            "cpu": _cpu_name(),
            "cpu_cores": _usable_cores(),
            "memory_gib": memory_gib(),
            "gpus": _gpus(),
        },
        "command": shlex.join(sys.argv if command is None else command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **extra,
    }


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that a run depends on."""
    return {name: version for name in _PACKAGES if (version := _version(name)) is not None}


def commit_text(manifest: Mapping[str, Any]) -> str:
    """The commit of a run in short, and whether the code was changed; empty where it is not known."""
    code = manifest.get("code") or {}
    commit = str(code.get("commit") or "")[:12]
    return f"{commit} with changes" if commit and code.get("dirty") else commit


def gpu_names(manifest: Mapping[str, Any]) -> list[str]:
    """The GPUs of a run."""
    return [str(gpu.get("name", "GPU")) for gpu in (manifest.get("hardware") or {}).get("gpus") or []]


def processor_text(manifest: Mapping[str, Any]) -> str:
    """The processor of a run and its cores."""
    hardware = manifest.get("hardware") or {}
    return f"{hardware.get('cpu_cores', '?')} cores of {hardware.get('cpu') or 'a CPU'}"


@cache
def _own_code() -> Mapping[str, Any]:
    """Commit of this package, read once for a process, which goes on with the code that it imported."""
    return describe_code(Path(oncurve.__file__).parent)


def describe_code(folder: Path) -> Mapping[str, Any]:
    """Git commit of a folder of code, and whether the code differs from it.

    Both are None when the folder is not under version control, for instance when it is an installed copy inside
    somebody else's repository.
    """
    if _run("git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "dirty": None}
    commit = _run("git", "-C", str(folder), "rev-parse", "HEAD")
    changes = _run("git", "-C", str(folder), "status", "--porcelain", "--", ".")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _run(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, env=environment, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def _usable_cores() -> int | None:
    if sys.platform == "linux":  # a container may be given fewer cores than there are
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def memory_gib() -> float | None:
    """The memory of this machine; None where the system does not tell."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def available_bytes(*, facts: Path = Path("/proc/meminfo"), container: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that processes can still take of the machine's and the container's memory; infinity where neither says."""
    least = math.inf
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in facts.read_text().splitlines() if line.startswith("MemAvailable:"))
        least = 1024 * float(line.split()[1])
    with suppress(OSError, ValueError):  # "max", and another version of cgroups: no limit is known
        limit, used = (float((container / f"memory.{name}").read_text()) for name in ("max", "current"))
        least = min(least, limit - used)
    return max(least, 0.0)


def _gpus() -> list[dict[str, str]]:
    listing = _run("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in (listing or "").splitlines() if line.strip()]
    return [dict(zip(("name", "memory", "driver"), row, strict=True)) for row in rows if len(row) == 3]
