"""Memory of a whole training step, in oncurve and in TRL.

Every system and setting runs in a fresh process, which loads its libraries (its baseline), loads the model, resets the
kernel's record of its largest resident size, and takes whole steps: sampling, grading, training. The figure is that
largest size minus the baseline; it holds the weights, the gradients, the optimizer state and everything in between.

    python benchmarks/bench.py memory --model S --case full
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ours import (
    Ours,
    Work,
    add_common_arguments,
    add_work_arguments,
    kernels_of,
    our_config,
    prepare,
    work_of,
)
from record import ROOT, Record

from oncurve.core.errors import OncurveError
from oncurve.observe.terminal import LIBRARY_OPTIONS

TRL_SETTINGS = (
    "fp32:8",
    "fp32:32",
    "fp32:64",
    "fp32:8+checkpointing",
    "fp32:32+checkpointing",
    "fp32:64+checkpointing",
    "bf16weights:8",
    "bf16weights:32",
    "bf16weights:8+checkpointing",
    "autocast:32",
)
OUR_SETTINGS = (
    "float32:8192",
    "float32:2048",
    "float32:1024",
    "bfloat16:8192",
    "bfloat16:2048",
    "bfloat16:1024",
    "bfloat16:512",
    "bfloat16:2048+checkpointing",
    "bfloat16:512+checkpointing",
    "bfloat16:256+checkpointing",
)
"""Type of the arithmetic and tokens per microbatch."""
MIB = 2**20


def resident(key: str) -> int:
    """A figure of this process's memory in bytes: VmRSS, what is resident now, or VmHWM, the most since the reset."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}; this benchmark needs Linux")


def settle() -> None:
    """Give back what is free, so that only what is held counts."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Start the kernel's record of the largest resident size anew."""
    settle()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def measure_ours(folder: Path, work: Work, setting: str, *, steps: int) -> dict[str, Any]:
    """Peak of some whole steps of oncurve."""
    compute, _, rest = setting.partition(":")
    tokens, _, checkpointing = rest.partition("+")
    if work.training == "lora":
        import peft  # noqa: F401  # part of the baseline, as it is of TRL's
    settle()
    baseline = resident("VmRSS")
    config = our_config(
        folder,
        work,
        compute_type=compute,
        tokens_per_microbatch=int(tokens),
        gradient_checkpointing=checkpointing == "checkpointing",
    )
    ours = Ours(config, work)
    reset_peak()
    loaded = resident("VmRSS")
    seconds = [ours.step(number)["step"] for number in range(steps)]
    return {"baseline": baseline, "loaded": loaded, "peak": resident("VmHWM"), "step_seconds": seconds}


def measure_trl(folder: Path, work: Work, setting: str, *, steps: int) -> dict[str, Any]:
    """Peak of some whole steps of TRL."""
    import peft  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401
    from models import make_prompts
    from transformers import AutoTokenizer
    from trl_side import Clock, TrlSetting, make_trainer

    settle()
    baseline = resident("VmRSS")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = make_prompts(tokenizer, count=work.prompts, num_tokens=work.prompt_tokens)
    clock = Clock(work.updates)
    trainer = make_trainer(work, TrlSetting.parse(setting), folder, prompts, steps=steps, callback=clock)
    clock.watch(trainer)
    reset_peak()
    loaded = resident("VmRSS")
    trainer.train()
    seconds = [step["step"] for step in clock.steps]
    return {"baseline": baseline, "loaded": loaded, "peak": resident("VmHWM"), "step_seconds": seconds}


def measure_here(arguments: argparse.Namespace) -> None:
    """The child: measures one system in this process and prints it as the last line."""
    prepare(arguments)
    work = work_of(arguments)
    system, setting = arguments.child.split(" ")
    measure = measure_ours if system == "oncurve" else measure_trl
    measured = measure(arguments.folder, work, setting, steps=arguments.warmup + arguments.steps)
    measured["step_above_baseline"] = measured["peak"] - measured["baseline"]
    print(json.dumps(measured))


def in_a_fresh_process(arguments: argparse.Namespace, folder: Path, system: str, setting: str) -> dict[str, Any]:
    """What a new process measures of one system at one setting."""
    options = [
        (name, getattr(arguments, name.replace("-", "_")))
        for name in (
            "model", "case", "prompt-tokens", "new-tokens", "training", "kl", "updates", "steps", "warmup", "kernels",
        )
    ]  # fmt: skip
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "bench.py"),
        "memory",
        "--child",
        f"{system} {setting}",
        "--folder",
        str(folder),
    ]
    for name, value in options:
        command += [f"--{name}", str(value)]
    environment = {**LIBRARY_OPTIONS, **os.environ} if system == "oncurve" else None  # as our commands set it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{system} at {setting} failed:\n{done.stderr[-3000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = min(measured["step_seconds"])
    print(f"{system:8s} {setting:30s} {measured['step_above_baseline'] / MIB:8.0f} MiB above its imports of "
          f"{measured['baseline'] / MIB:.0f} MiB, {seconds:.2f} s per step")  # fmt: skip
    return measured


def options(parser: argparse.ArgumentParser) -> None:
    add_work_arguments(parser)
    parser.add_argument("--kl", type=float, default=0.0)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--trl", nargs="*", default=list(TRL_SETTINGS))
    parser.add_argument("--ours", nargs="*", default=list(OUR_SETTINGS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    add_common_arguments(parser, steps=2)


def name_of(asked: argparse.Namespace) -> str:
    work = work_of(asked)
    return f"memory-{work.name}-{work.variant}-{kernels_of(asked)}"


def bench(asked: argparse.Namespace, record: Record) -> None:
    if asked.child:
        try:
            measure_here(asked)
        except OncurveError as error:
            raise SystemExit(str(error)) from None
        return
    work, sides = work_of(asked), {"oncurve": asked.ours, "trl": asked.trl}
    record.facts["measured"] = measured = {"oncurve": {}, "trl": {}}
    record.total = len(asked.ours) + len(asked.trl)
    with tempfile.TemporaryDirectory() as scratch:
        folder = work.build(Path(scratch) / "model")
        for system, settings in sides.items():
            for setting in settings:
                measured[system][setting] = found = in_a_fresh_process(asked, folder, system, setting)
                record.add({"system": system, "setting": setting, **found})
