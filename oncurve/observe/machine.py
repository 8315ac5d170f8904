"""Processes of this user that hold GPU memory, and ending one of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oncurve.core.errors import OncurveError

_QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_GPUS = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_PATIENCE_SECONDS = 20
LEAST_DRIVER = {"12": "525", "13": "580"}
"""Driver that a major version of CUDA needs at least."""


class MachineError(OncurveError, RuntimeError):
    """The driver does not answer, or torch cannot use what it drives."""


def unseen_gpu(torch_version: str, cuda: str | None) -> str | None:
    """The fault where the driver has a GPU and a torch of this version and CUDA sees none; None if there is none.

    GPUs that ``CUDA_VISIBLE_DEVICES`` hides are not meant.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or shutil.which(_GPUS[0]) is None:
        return None
    done = subprocess.run(_GPUS, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
    if done.returncode or not done.stdout.strip():
        return None
    name, _, driver = done.stdout.splitlines()[0].rpartition(",")
    if cuda is None:
        cure = "is a build for CPUs. Install one for CUDA, as https://pytorch.org says"
    else:
        least = LEAST_DRIVER.get(cuda.partition(".")[0], "a newer one")
        cure = f"needs CUDA {cuda}. Install driver {least} or newer, or a torch for an older CUDA"
    fault = f"nvidia-smi lists {name.strip()} with driver {driver.strip()}, and torch does not see it"
    return f"{fault}: {torch_version} {cure}"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process of this user with memory on a GPU."""

    pid: int
    used_mib: str
    """As the driver tells it; "[N/A]" where it does not."""
    command: str
    is_orphan: bool
    """Its parent is gone: usually what a run that crashed left behind."""


def gpu_processes(proc: Path = Path("/proc")) -> list[GpuProcess] | None:
    """This user's processes that the driver lists, without this one; None on a machine without ``nvidia-smi``.

    Raises MachineError if the driver does not answer.
    """
    if shutil.which(_QUERY[0]) is None:
        return None
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineError(f"nvidia-smi does not answer: {error}. Look at the driver first.") from None
    processes: dict[int, GpuProcess] = {}
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 2 and cells[0].isdigit() and (process := _mine(int(cells[0]), cells[1], proc)):
            processes[process.pid] = process
    return [processes[pid] for pid in sorted(processes)]


def _mine(pid: int, used_mib: str, proc: Path) -> GpuProcess | None:
    """The process, if it is there, belongs to this user and is not this one."""
    try:
        if pid == os.getpid() or (proc / str(pid)).stat().st_uid != os.getuid():
            return None
        command = (proc / str(pid) / "cmdline").read_bytes().decode("utf-8", errors="replace").split("\0")
        parent = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        return None
    return GpuProcess(pid, used_mib, " ".join(command).strip()[:200], parent == "1")


def end_process(process: GpuProcess) -> bool:
    """Ask one process to end, by its number and nothing else; False if it is gone or became another one."""
    again = _mine(process.pid, process.used_mib, Path("/proc"))
    if again is None or again.command != process.command:
        return False
    os.kill(process.pid, signal.SIGTERM)
    return True


def offer_to_end(show: Callable[[str], None], confirm: Callable[[str], bool]) -> int:
    """List the processes and ask of each whether to end it; how many were asked to end."""
    processes = gpu_processes()
    if processes is None:
        show("there is no nvidia-smi here, so nothing is known of GPU memory and nothing was touched")
        return 0
    if not processes:
        show("no process of yours holds GPU memory")
    ended = 0
    for process in processes:
        orphan = ", its parent is gone" if process.is_orphan else ""
        show(f"process {process.pid} holds {process.used_mib} MiB{orphan}: {process.command}")
        if confirm(f"end process {process.pid}?"):
            is_sent = end_process(process)
            ended += is_sent
            show(f"process {process.pid} was asked to end" if is_sent else f"process {process.pid} is gone already")
    return ended
