"""A long run that is killed every twenty steps, its memory, and the cost of a checkpoint per step."""

from __future__ import annotations

import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import fault_tools as tools
from fault_bench import Bench, Variant, expect

TINY = [
    "data.limit=256",
    "algorithm.group_size=4",
    "rollouts.max_completion_tokens=24",
    "evaluation.data=null",
    "evaluation.num_prompts=8",
    "evaluation.every_steps=0",
    "run.prompts_per_step=2",
    "run.save_every_steps=5",
]


WIDE = ["algorithm.group_size=8", "run.prompts_per_step=16", "evaluation.every_steps=0"]
"""Steps of a second: beside those of SMALL a checkpoint would be the larger part."""


def memory_growth(run: Path) -> float:
    """Resident memory of the last third of the steps over that of the middle third, by their medians."""
    values = [row["memory/process_gib"] for row in tools.rows_of(run) if "memory/process_gib" in row]
    third = len(values) // 3
    return statistics.median(values[-third:]) / statistics.median(values[third : 2 * third]) - 1


def soak(bench: Bench, steps: int, every: float) -> dict[str, Any]:
    """A long run that is killed once in so many steps on average, beside one that is not.

    Memory is looked at in one of three times as many steps: what the allocator keeps moves by some percent.
    """
    variant, words = Variant("soak"), (f"run.steps={steps}", "run.rollouts_every_steps=50")
    clean, long = bench.folder / "soak_clean", bench.folder / "soak_long"
    for run, more in ((clean, ()), (long, (f"run.steps={3 * steps}",))):
        if not (run / "model").exists():
            _, started = bench.run(run.name.removeprefix("soak_"), variant, *words, *more)
            expect(started, 0)
    draw = random.Random(bench.seed)
    run, started = bench.run("killed", variant, *words)
    kills: list[int] = []
    began = time.perf_counter()
    while True:
        target = tools.recorded_steps(run) + 1 + int(draw.expovariate(1 / every))
        pause = draw.random() * 0.2
        while started.is_running():
            now = tools.status(run, started.main.pid)
            if now is not None and now[0] >= target:
                time.sleep(pause)
                started.main.send(signal.SIGKILL)
                break
            time.sleep(0.002)
        codes = started.wait()
        if codes == [0]:
            break
        if codes != [-signal.SIGKILL]:
            raise SystemExit(f"the soak ended with {codes}: {started.main.output[-2000:]}")
        kills.append(tools.recorded_steps(run))
        started = bench.resume(run, variant)
    found = tools.differences(run, clean)
    growth = memory_growth(long)
    left = tools.leftovers(bench.mark)
    return {
        "steps": steps,
        "kills_after_steps": kills,
        "seconds": time.perf_counter() - began,
        "is_bitwise_equal": not found,
        "otherwise": found,
        "memory_growth_fraction": growth,
        "memory_steps": 3 * steps,
        "num_left_over": len(left),
        "has_passed": not found and not left and len(kills) >= steps / every / 3 and growth <= 0.02,
    }


def overhead(bench: Bench, pairs: int, steps: int) -> dict[str, Any]:
    """Seconds a step with a checkpoint after every step over those without any, in turns."""
    ratios, seconds = [], []
    for number in range(pairs):
        pair = {}
        for every in (1, 0) if number % 2 else (0, 1):
            words = (*WIDE, f"run.steps={steps}", f"run.save_every_steps={every}")
            run, started = bench.run(f"overhead_{every}", Variant("overhead"), *words, "run.rollouts_every_steps=1000")
            expect(started, 0)
            times = [row["time/elapsed_seconds"] for row in tools.rows_of(run) if "time/elapsed_seconds" in row]
            pair[every] = (times[-1] - times[1]) / (len(times) - 2)
        ratios.append(pair[1] / pair[0])
        seconds.append(pair)
    return {
        "steps": steps,
        "pairs": [{"saving_seconds": pair[1], "not_saving_seconds": pair[0]} for pair in seconds],
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "has_passed": statistics.median(ratios) <= 1.10,
    }
