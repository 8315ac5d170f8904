"""A recipe run with several seeds, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from oncurve.constants import INTERRUPTED
from oncurve.core.errors import ConfigError
from oncurve.observe.terminal import console

GPUS = Path("/proc/driver/nvidia/gpus")


def parse_seeds(text: str) -> list[int]:
    """The numbers in "0,1,2". Raises ConfigError for anything else, and for a seed that stands there twice."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) != len(parts):
        raise ConfigError(f"--seeds {text}: write different whole numbers from 0 on, such as --seeds 0,1,2")
    return [int(part) for part in parts]


def train_seeds(
    recipe: str, overrides: Sequence[str], seeds: Sequence[int], folder: Path, *, is_resumed: bool
) -> None:  # fmt: skip
    """Train with every seed into ``<name>-seed<seed>``, as many at once as there are GPUs, and compare them.

    A run that fails or is stopped ends the whole; what was done can be resumed with the same words and --resume.
    """
    if own := [override for override in overrides if override.startswith("run.seed=")]:
        raise ConfigError(f"--seeds and {own[0]}: --seeds gives every run its seed. Leave one of the two out")
    gpus = _gpus()
    left = list(seeds)
    running: dict[int, tuple[int, str | None, subprocess.Popen[bytes]]] = {}
    free: list[str | None] = [*gpus] or [None]
    out = console()
    try:
        while left or running:
            while left and free:
                seed, gpu = left.pop(0), free.pop(0)
                out.print(f"seed {seed}{f' on GPU {gpu}' if gpu else ''}:", highlight=False)
                process = _start(recipe, overrides, seed, folder, gpu, is_resumed)
                running[process.pid] = (seed, gpu, process)
            pid, status = os.wait()
            if pid in running:
                seed, gpu, process = running.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                free.append(gpu)
                if process.returncode:
                    _end(running)
                    again = "" if is_resumed else " and --resume"
                    out.print(
                        f"seed {seed} failed, see above. Afterwards continue with the same command{again}: finished "
                        "runs stay as they are.",
                        highlight=False,
                    )
                    raise typer.Exit(process.returncode)
    except KeyboardInterrupt:  # who pressed Ctrl-C in a terminal has interrupted the runs as well: they save
        for _, _, process in running.values():
            process.wait()
        out.print("continue with the same command and --resume", highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    if len(seeds) > 1:
        _compare([folder.with_name(f"{folder.name}-seed{seed}") for seed in seeds])


def _compare(runs: Sequence[Path]) -> None:
    from oncurve.report.comparing import compare_runs  # lazy
    from oncurve.report.seeds import compare_seeds, seeds_table  # lazy

    comparison = compare_seeds(compare_runs(runs))
    if comparison is not None:
        out = console()
        out.print(*seeds_table(comparison, out.width))
        out.print(f"more: oncurve compare {' '.join(map(str, runs))}", markup=False, highlight=False)


def _gpus() -> list[str]:
    """The GPUs of this machine that may be used."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()]
    return [str(number) for number in range(len(list(GPUS.iterdir())))] if GPUS.is_dir() else []


def _start(
    recipe: str, overrides: Sequence[str], seed: int, folder: Path, gpu: str | None, is_resumed: bool
) -> subprocess.Popen[bytes]:  # fmt: skip
    command = [sys.executable, "-m", "oncurve", "train", recipe, *overrides]
    command += [f"run.seed={seed}", f"run.name={folder.name}-seed{seed}", *(["--resume"] if is_resumed else [])]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else None
    return subprocess.Popen(command, env=environment)


def _end(running: dict[int, tuple[int, str | None, subprocess.Popen[bytes]]]) -> None:
    """Ask the runs to save and stop, and wait for them."""
    for _, _, process in running.values():
        process.terminate()
    for _, _, process in running.values():
        process.wait()
