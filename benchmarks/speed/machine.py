"""The machine of a benchmark, the rounds and arguments that all share, and the files of their results.

Import this module before transformers and TRL: it switches off their network access and telemetry.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from oncurve.observe.manifest import describe_run

RESULTS = Path(__file__).resolve().parents[1] / "results"
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
"""What of a processor decides how fast its matrix products are."""
PACKAGES = ("accelerate", "peft", "trl", "transformers", "torch")


def describe_machine() -> dict[str, Any]:
    """Code, versions, processor, its flags for matrix products, threads, and the load by others at this moment."""
    return describe_run(
        bare(sys.argv),
        flags=[flag for flag in FLAGS if flag in cpu_flags()],
        threads=torch.get_num_threads(),
        load_average=round(os.getloadavg()[0], 2),
        libraries={name: found for name in PACKAGES if (found := _version(name))},
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        kernels=os.environ.get("ONCURVE_KERNELS", "1") != "0",
    )


def bare(value: Any) -> Any:
    """Words and settings without the folders of this machine: of an absolute path the last part stays."""
    if isinstance(value, (str, Path)):
        return re.sub(r"(?<![\w./:])/(?:[^\s/,=]+/)*([^\s/,=]*)", r"\1", str(value))
    return [bare(item) for item in value] if isinstance(value, list) else value


def cpu_flags() -> frozenset[str]:
    """The processor's flags as Linux lists them; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def round_robin(systems: dict[str, Callable[[int], dict[str, float]]], *, steps: int) -> dict[str, list[Any]]:
    """One step of each system after the other, ``steps`` times over: what else the machine does falls on all alike."""
    raw: dict[str, list[Any]] = {name: [] for name in systems}
    for number in range(steps):
        for name, step in systems.items():
            gc.collect()
            raw[name].append(step(number))
    return raw


def median_of(rows: Sequence[dict[str, float]], key: str, *, warmup: int) -> float:
    """The median of one figure over the steps after the warm-up."""
    return statistics.median(row[key] for row in rows[warmup:])


def add_common_arguments(parser: argparse.ArgumentParser, *, steps: int, warmup: int = 1) -> None:
    """What every benchmark is asked: steps, warm-up, threads, kernels, where to."""
    parser.add_argument("--steps", type=int, default=steps, help="measured steps, after the warm-up")
    parser.add_argument("--warmup", type=int, default=warmup, help="steps before them that are left out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="the same for every system")
    parser.add_argument("--kernels", choices=["on", "off"], default="on", help="oncurve's compiled kernels")
    parser.add_argument("--output", type=Path, default=RESULTS)


def prepare(arguments: argparse.Namespace) -> None:
    """Threads and kernels as asked. Call it before anything of oncurve is built."""
    torch.set_num_threads(arguments.threads)
    os.environ["ONCURVE_KERNELS"] = "1" if arguments.kernels == "on" else "0"
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*checkpointing.*")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def write_result(arguments: argparse.Namespace, name: str, content: dict[str, Any]) -> Path:
    """Write a benchmark's record with its arguments and its machine, and say where."""
    chosen = {key: bare(value) for key, value in vars(arguments).items()}
    chosen.pop("output")
    record = {"arguments": chosen, **content, "run": describe_machine()}
    record["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path: Path = arguments.output / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return path
