"""Scenarios of the fault suite, and the undisturbed runs that they are compared with."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_tools as tools
from fault_tools import Started, start

from oncurve.run.checkpoint_manifest import read_manifest

SMALL = [
    "data.limit=64",
    "algorithm.group_size=4",
    "rollouts.max_completion_tokens=64",
    "evaluation.data=null",
    "evaluation.num_prompts=8",
    "evaluation.every_steps=3",
    "evaluation.num_prompts_during=4",
    "run.steps=6",
    "run.prompts_per_step=4",
    "run.save_every_steps=2",
    "run.keep_checkpoints=3",
]
"""What makes the embedded task small; they come before the overrides of the command line."""
LORA = ["policy.lora={rank: 4, alpha: 8.0, dropout: 0.1}"]
BUSY = [
    "run.completions_per_update=8",
    "run.refill_rounds=2",
    "data.retire_above=0.9",
    "algorithm.kl_coef=0.05",
]
"""Two updates for each batch, dynamic sampling, a curriculum, a reference."""


@dataclass(frozen=True)
class Variant:
    """One way to train, which must survive."""

    name: str
    overrides: tuple[str, ...] = ()
    processes: int = 1


VARIANTS = (
    Variant("one process"),
    Variant("one process, LoRA", (*LORA,)),
    Variant("one process, refill, several updates", (*BUSY,)),
    Variant("one process, LoRA, refill, several updates", (*LORA, *BUSY)),
    Variant("two processes, ddp", ("policy.parallel=ddp",), 2),
    Variant("two processes, ddp, LoRA", ("policy.parallel=ddp", *LORA), 2),
    Variant("two processes, fsdp, refill, several updates", ("policy.parallel=fsdp", *BUSY), 2),
    Variant("two processes, fsdp, LoRA, refill, several updates", ("policy.parallel=fsdp", *LORA, *BUSY), 2),
)


@dataclass
class Report:
    """What one scenario did."""

    scenario: str
    variant: str
    struck: str = ""
    """What was going on when it was struck."""
    detect_seconds: float | None = None
    recover_seconds: float | None = None
    steps_redone: int = 0
    completions_lost: int = 0
    is_bitwise_equal: bool | None = None
    """None where the scenario has nothing to compare."""
    num_left_over: int = 0
    """Processes that should be gone."""
    has_passed: bool = False
    note: str = ""


class Bench:
    """A recipe, the folder of its runs, and the clean runs that all others are compared with."""

    def __init__(self, recipe: str, overrides: list[str], folder: Path, *, seed: int) -> None:
        self.recipe, self.folder, self.seed = recipe, folder, seed
        self.overrides = [*overrides, f"run.folder={folder}", "run.rollouts_every_steps=1"]
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        os.environ[tools.MARK] = self.mark
        self._calls: dict[str, dict[str, tuple[int, float]]] = {}

    def run(self, name: str, variant: Variant, *more: str, **options: Any) -> tuple[Path, Started]:
        """A new run of a variant."""
        place = re.sub(r"\W+", "_", f"{variant.name}_{name}")
        shutil.rmtree(self.folder / place, ignore_errors=True)
        log = self.folder / f"{place}.log"
        log.unlink(missing_ok=True)
        words = ["train", self.recipe, *self.overrides, *variant.overrides, f"run.name={place}", *more]
        return self.folder / place, start(words, log, processes=variant.processes, **options)

    def resume(self, run: Path, variant: Variant, *more: str, **options: Any) -> Started:
        return start(["resume", str(run), *more], run.with_suffix(".log"), processes=variant.processes, **options)

    def clean(self, variant: Variant) -> Path:
        """The run of a variant that nobody disturbs, made when it is first asked for."""
        counts = self.folder / (re.sub(r"\W+", "_", variant.name) + ".counts.json")
        run = self.folder / (re.sub(r"\W+", "_", f"{variant.name}_clean"))
        if not counts.exists():
            run, started = self.run("clean", variant, counts=counts)
            expect(started, 0)
        self._calls[variant.name] = json.loads(counts.read_text())
        return run

    def calls(self, variant: Variant) -> dict[str, tuple[int, float]]:
        """How often and how long a clean run is in each place."""
        self.clean(variant)
        return self._calls[variant.name]

    def completions_per_step(self, variant: Variant) -> int:
        config = read_manifest(tools.newest(self.clean(variant)))["config"]
        return config["run"]["prompts_per_step"] * config["algorithm"]["group_size"]

    def num_steps(self, variant: Variant) -> int:
        return read_manifest(tools.newest(self.clean(variant)))["config"]["run"]["steps"]

    def broken_off(self, name: str) -> Path:
        """A copy of the clean run of one process as if it had died after its last step but one."""
        run = self.folder / re.sub(r"\W+", "_", name)
        shutil.rmtree(run, ignore_errors=True)
        run.with_suffix(".log").unlink(missing_ok=True)
        return tools.copy_broken_off(self.clean(VARIANTS[0]), run)


def expect(started: Started, code: int) -> None:
    codes = started.wait()
    if set(codes) != {code}:
        said = "\n".join(child.output[-2000:] for child in started.children)
        raise SystemExit(f"ended with {codes}, not {code}:\n{said}")


def recover(bench: Bench, run: Path, variant: Variant, *more: str) -> tuple[float, int]:
    """Resume to the end: seconds until the run works again, and the step that it went on from."""
    started = bench.resume(run, variant, *more)
    told = None
    while started.is_running() and (told := tools.status(run, started.main.pid)) is None:
        time.sleep(0.001)
    seconds = time.perf_counter() - started.began
    expect(started, 0)
    return seconds, told[0] if told else bench.num_steps(variant)


def after(bench: Bench, report: Report, run: Path, variant: Variant, *, reached: int | None = None) -> Report:
    """Resume a run that was struck and fill in what came of it."""
    report.num_left_over = len(tools.leftovers(bench.mark))
    reached = tools.recorded_steps(run) if reached is None else reached
    report.recover_seconds, went_on_from = recover(bench, run, variant)
    report.steps_redone = max(reached - went_on_from, 0)
    report.completions_lost = (report.steps_redone + 1) * bench.completions_per_step(variant)
    found = tools.differences(run, bench.clean(variant))
    report.is_bitwise_equal = not found
    report.note = " ".join(filter(None, (report.note, f"otherwise: {', '.join(found)}" if found else "")))
    report.has_passed = not found and not report.num_left_over
    shutil.rmtree(run, ignore_errors=True) if report.has_passed else None
    return report


Scenario = tuple[str, Callable[[], Report]]
