"""What does a run lose when it is killed, told to go, or given a broken checkpoint, and are its bits the same after it?

A clean run is made first; then each scenario breaks a fresh run through the command line, resumes it, and compares the
final weights, optimizer state, records and rollouts with the clean ones, byte for byte. Phases are met by watching the
run's own `status.json`, so that nothing in the product knows of this program.

    python benchmarks/faults.py                                    the embedded task, small
    python benchmarks/faults.py my/recipe.yaml run.steps=20 --kills 40 --output faults.json

Every scenario reports: seconds until the fault is noticed, seconds from the start of `oncurve resume` until the run
works again, steps done again, completions sampled again, and whether everything is bitwise equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oncurve.observe.manifest import describe_run
from oncurve.train.sealed import checkpoints_in

SMALL = [
    "data.limit=128",
    "algorithm.group_size=4",
    "rollouts.max_completion_tokens=48",
    "evaluation.data=null",
    "evaluation.num_prompts=16",
    "evaluation.every_steps=3",
    "evaluation.num_prompts_during=8",
    "run.steps=8",
    "run.prompts_per_step=6",
    "run.save_every_steps=2",
]
"""What makes the embedded task small; they come before the overrides of the command line."""
PHASES = ("sample", "grade", "train", "evaluate", "record", "save")
COMMAND = [sys.executable, "-c", "from oncurve.cli import main; main()"]


@dataclass
class Report:
    """What one scenario did."""

    scenario: str
    detect_seconds: float | None
    recover_seconds: float | None
    steps_redone: int
    completions_lost: int
    is_bitwise_equal: bool
    note: str = ""


class Bench:
    """A recipe, the folder of its runs, and the clean run that all others are compared with."""

    def __init__(self, recipe: str, overrides: list[str], folder: Path, *, seed: int) -> None:
        self.recipe, self.folder = recipe, folder
        self.overrides = [*overrides, f"run.folder={folder}", "run.rollouts_every_steps=1"]
        self.draw = random.Random(seed)
        self.clean = folder / "clean"
        started = time.perf_counter()
        finish(self.start("clean"))
        self.clean_seconds = time.perf_counter() - started
        config = json.loads(newest(self.clean).joinpath("manifest.json").read_text())["config"]
        self.completions_per_step = config["run"]["prompts_per_step"] * config["algorithm"]["group_size"]
        self.num_steps: int = config["run"]["steps"]

    def start(self, name: str, *more: str) -> subprocess.Popen[str]:
        """A new run of the recipe."""
        return launch(["train", self.recipe, *self.overrides, f"run.name={name}", *more], self.folder / f"{name}.log")

    def resume(self, run: Path, *more: str, file_limit: int | None = None) -> subprocess.Popen[str]:
        return launch(["resume", str(run), *more], self.folder / f"{run.name}.log", file_limit=file_limit)

    def broken_off(self, name: str) -> Path:
        """A copy of the clean run as if it had died after its last step but one."""
        run = Path(shutil.copytree(self.clean, self.folder / name))
        shutil.rmtree(run / "model")
        shutil.rmtree(newest(run))
        return run


def launch(words: list[str], log: Path, *, file_limit: int | None = None) -> subprocess.Popen[str]:
    """``oncurve`` with these words, one thread, its output added to a file."""

    def limit() -> None:
        if file_limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    with log.open("a", encoding="utf-8") as file:
        return subprocess.Popen(
            [*COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=limit,
        )


def finish(process: subprocess.Popen[str], *, expect: int = 0) -> None:
    if process.wait() != expect:
        raise SystemExit(f"{process.args} ended with {process.returncode}, not {expect}; read the logs")


def newest(run: Path) -> Path:
    return checkpoints_in(run / "checkpoints")[-1][1]


def status(run: Path, process: subprocess.Popen[str]) -> tuple[int, str] | None:
    """Steps done and phase, as this process of the run tells them."""
    try:
        told = json.loads((run / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return (told["step"], told["phase"]) if told["pid"] == process.pid else None


def strike(bench: Bench, process: subprocess.Popen[str], run: Path, *, number: int, when: Callable[[], bool]) -> bool:
    """Send a signal as soon as something holds; False if the run ended before."""
    while process.poll() is None:
        if when():
            time.sleep(bench.draw.random() * 0.05)
            if process.poll() is None:
                process.send_signal(number)
                return True
        time.sleep(0.0005)
    return False


def recorded_steps(run: Path) -> int:
    """The last step with a record."""
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1] if (run / "metrics.jsonl").exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def recover(bench: Bench, run: Path, *more: str) -> tuple[float, int]:
    """Resume to the end: seconds until the run trains or measures again, and the step that it went on from."""
    started = time.perf_counter()
    process = bench.resume(run, *more)
    while process.poll() is None and status(run, process) is None:
        time.sleep(0.001)
    seconds = time.perf_counter() - started
    told = status(run, process)
    finish(process)
    return seconds, told[0] if told else bench.num_steps


def is_equal(run: Path, clean: Path) -> bool:
    """Final weights, last optimizer state, records without times, and every rollout are the same bytes."""
    free = ("time/", "memory/", "speed/")

    def everything(folder: Path) -> dict[str, Any]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        files = [
            *(folder / "model").glob("*.safetensors"),
            *newest(folder).glob("*.safetensors"),
            newest(folder) / "state.json",
            *(folder / "rollouts").iterdir(),
            folder / "evaluations" / "trained.jsonl",
        ]
        bytes_of = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        return {"rows": [{k: v for k, v in row.items() if not k.startswith(free)} for row in rows], **bytes_of}

    return everything(run) == everything(clean)


def killed(bench: Bench, name: str, *, number: int, when: Callable[[Path, subprocess.Popen[str]], bool]) -> Report:
    """Start, strike, resume, compare."""
    run = bench.folder / name
    process = bench.start(name)
    if not strike(bench, process, run, number=number, when=lambda: when(run, process)):
        return Report(name, None, None, 0, 0, is_equal(run, bench.clean), "ended before it could be struck")
    struck = time.perf_counter()
    code = process.wait()
    detect = time.perf_counter() - struck
    reached = recorded_steps(run)
    recover_seconds, went_on_from = recover(bench, run)
    redone = max(reached - went_on_from, 0)
    lost = (redone + 1) * bench.completions_per_step
    note = f"exit code {code}, {reached} steps recorded"
    return Report(name, detect, recover_seconds, redone, lost, is_equal(run, bench.clean), note)


def kill_scenarios(bench: Bench, kills: int) -> Iterator[Report]:
    for phase in PHASES:
        step = bench.draw.randrange(1, bench.num_steps - 1)
        if phase == "evaluate":
            step = bench.num_steps // 2

        def is_there(run: Path, process: subprocess.Popen[str], step: int = step, phase: str = phase) -> bool:
            told = status(run, process)
            return told is not None and told[0] >= step and (told[1] == phase or told[0] > step + 2)

        yield killed(bench, f"SIGKILL in {phase}", number=signal.SIGKILL, when=is_there)
        if phase in ("sample", "train", "evaluate"):
            yield killed(bench, f"SIGTERM in {phase}", number=signal.SIGTERM, when=is_there)

    def is_writing(run: Path, process: subprocess.Popen[str]) -> bool:
        return bool(list((run / "checkpoints").glob(".step_0000*.partial-*"))) and (recorded_steps(run) > 0)

    yield killed(bench, "SIGKILL while a checkpoint is written", number=signal.SIGKILL, when=is_writing)
    for place in range(kills):
        moment = time.perf_counter() + bench.draw.uniform(0.3, 1.0) * bench.clean_seconds

        def is_time(run: Path, process: subprocess.Popen[str], moment: float = moment) -> bool:
            return time.perf_counter() > moment and status(run, process) is not None

        yield killed(bench, f"SIGKILL at random, {place + 1} of {kills}", number=signal.SIGKILL, when=is_time)


def damage_scenarios(bench: Bench) -> Iterator[Report]:
    """A broken newest checkpoint: the time until it is named, and the run that goes on from the one before."""
    for how in ("truncated", "one bit flipped", "missing"):
        run = bench.broken_off(f"weights {how}")
        path = newest(run) / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.unlink()
        if how != "missing":
            path.write_bytes(content if how == "one bit flipped" else content[:-1000])
        reached = checkpoints_in(run / "checkpoints")[-1][0]
        log = bench.folder / f"{run.name}.log"
        started = time.perf_counter()
        process = bench.resume(run)
        while process.poll() is None and not (log.exists() and "IS BROKEN" in log.read_text()):
            time.sleep(0.005)
        detect = time.perf_counter() - started
        while process.poll() is None and status(run, process) is None:
            time.sleep(0.001)
        seconds, told = time.perf_counter() - started, status(run, process)
        finish(process)
        redone = reached - (told[0] if told else reached)
        lost = redone * bench.completions_per_step
        yield Report(
            f"weights of the newest checkpoint {how}", detect, seconds, redone, lost, is_equal(run, bench.clean)
        )


def surroundings_scenarios(bench: Bench) -> Iterator[Report]:
    """A disk without room for a checkpoint, and another recipe."""
    run = bench.broken_off("no room for a checkpoint")
    started = time.perf_counter()
    process = bench.resume(run, file_limit=200_000)
    finish(process, expect=6)
    detect = time.perf_counter() - started
    seconds, _ = recover(bench, run)
    yield Report(run.name, detect, seconds, 2, 2 * bench.completions_per_step, is_equal(run, bench.clean))
    run = bench.broken_off("another group size")
    started = time.perf_counter()
    finish(bench.resume(run, "algorithm.group_size=2"), expect=2)
    detect = time.perf_counter() - started
    seconds, _ = recover(bench, run)
    yield Report("resumed with another group size: refused", detect, seconds, 0, 0, is_equal(run, bench.clean))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="word_problems")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--kills", type=int, default=4, help="kills at random moments, besides those in each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_intermixed_args()
    overrides = [*(SMALL if asked.recipe == "word_problems" else []), *asked.overrides]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(asked.recipe, overrides, Path(scratch), seed=asked.seed)
        reports: list[Report] = []
        sources = (kill_scenarios(bench, asked.kills), damage_scenarios(bench), surroundings_scenarios(bench))
        for source in sources:
            for report in source:
                reports.append(report)
                print(json.dumps(asdict(report)), flush=True)
    recovered = [report.recover_seconds for report in reports if report.recover_seconds is not None]
    found = {
        "recipe": asked.recipe,
        "overrides": overrides,
        "run": describe_run(),
        "clean_seconds": bench.clean_seconds,
        "all_bitwise_equal": all(report.is_bitwise_equal for report in reports),
        "median_recover_seconds": statistics.median(recovered) if recovered else None,
        "scenarios": [asdict(report) for report in reports],
    }
    if asked.output:
        asked.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if found["all_bitwise_equal"] else 1)


if __name__ == "__main__":
    main()
