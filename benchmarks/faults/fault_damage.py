"""Damaged checkpoints, which must be found before a weight of them is used."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fault_tools as tools
from fault_bench import VARIANTS, Bench, Report, Scenario, expect

from oncurve.run.checkpoint_manifest import checkpoints_in


def damaged(bench: Bench, name: str, change: Callable[[Path], None]) -> Report:
    """Scenario 3: the time until a broken checkpoint is named, and the run that goes on from the one before."""
    run, variant = bench.broken_off(name), VARIANTS[0]
    reached = checkpoints_in(run / "checkpoints")[-1][0]
    change(tools.newest(run))
    strict = bench.resume(run, variant, "--strict")
    strict_code = strict.wait()[0]
    started = bench.resume(run, variant)
    log = started.main.log
    while started.is_running() and "IS BROKEN" not in log.read_text():
        time.sleep(0.005)
    detect = time.perf_counter() - started.began
    now = None
    while started.is_running() and (now := tools.status(run, started.main.pid)) is None:
        time.sleep(0.001)
    seconds = time.perf_counter() - started.began
    expect(started, 0)
    redone = reached - (now[0] if now else reached)
    found = tools.differences(run, bench.clean(variant))
    return Report(
        name,
        variant.name,
        detect_seconds=detect,
        recover_seconds=seconds,
        steps_redone=redone,
        completions_lost=redone * bench.completions_per_step(variant),
        is_bitwise_equal=not found,
        has_passed=not found and strict_code == 6 and redone > 0,
        note=f"--strict ends with {strict_code}" + (f", otherwise: {found}" if found else ""),
    )


def damage_scenarios(bench: Bench) -> Iterator[Scenario]:
    def weights(folder: Path) -> Path:
        return folder / "model.safetensors"

    def flip(folder: Path) -> None:
        content = bytearray(weights(folder).read_bytes())
        content[len(content) // 2] ^= 1
        weights(folder).write_bytes(content)

    def empty(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()

    ways: dict[str, Callable[[Path], object]] = {
        "weights truncated": lambda folder: os.truncate(weights(folder), 1000),
        "one bit of the weights flipped": flip,
        "weights missing": lambda folder: weights(folder).unlink(),
        "wrong manifest": lambda folder: (folder / "manifest.json").write_text("{}"),
        "empty folder": empty,
    }
    for how, change in ways.items():
        name = f"newest checkpoint: {how}"
        yield name, lambda name=name, change=change: damaged(bench, name, change)

    def none_left() -> Report:
        run = bench.broken_off("no good checkpoint")
        for _, folder in checkpoints_in(run / "checkpoints"):
            empty(folder)
        started = bench.resume(run, VARIANTS[0])
        codes = started.wait()
        passed = codes == [6] and "never starts from scratch" in started.main.output
        return Report("no good checkpoint", VARIANTS[0].name, has_passed=passed, note=f"exit codes {codes}")

    yield "no good checkpoint", none_left
