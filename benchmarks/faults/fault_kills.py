"""Runs that are killed or stopped, which must end with the bits of one that was not."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator

import fault_tools as tools
from fault_bench import VARIANTS, Bench, Report, Scenario, Variant, after, expect
from fault_tools import ONLY_MAIN, PLACES, Arm

from oncurve.run.checkpoint_manifest import checkpoints_in


def killed_inside(bench: Bench, name: str, variant: Variant, place: str, number: int, *, at_once: bool) -> Report:
    """Start a run that is armed, wait for its death and that of the others, resume, compare."""
    draw = random.Random(f"{bench.seed} {name}")
    calls, seconds = bench.calls(variant)[place]
    rank = 0 if variant.processes == 1 or place in ONLY_MAIN or at_once else number % variant.processes
    delay = 0.0 if at_once else draw.random() * seconds / max(calls, 1)
    note = bench.folder / "struck.txt"
    note.write_text("ended before it could be struck")
    last = calls if rank == 0 else calls // 2  # calls are counted in process 0, and others may have fewer
    arm = Arm(place, draw.randint(1, max(last, 1)), delay, note)
    run, started = bench.run(f"killed_{number}", variant, arms={rank: arm})
    struck = started.children[rank].wait()
    began = time.perf_counter()
    codes = started.wait()
    detect = time.perf_counter() - began
    said = f"process {rank}, call {arm.call} of {calls}: " if variant.processes > 1 else f"call {arm.call} of {calls}: "
    report = Report(name, variant.name, said + note.read_text(), detect, note=f"exit codes {codes}")
    if struck != -signal.SIGKILL:
        report.note += ", not killed"
        return report
    if not tools.rows_of(run) and not checkpoints_in(run / "checkpoints"):
        report.note += ", before it had anything to lose"
        shutil.rmtree(run)
        run, again = bench.run(f"killed_{number}", variant)
        expect(again, 0)
        report.is_bitwise_equal = not tools.differences(run, bench.clean(variant))
        report.has_passed = report.is_bitwise_equal
        return report
    return after(bench, report, run, variant)


def kill_scenarios(bench: Bench, kills: int) -> Iterator[Scenario]:
    """Scenarios 1, 2 and 15: kills inside of every phase, in turn through the variants."""
    places = [place for place in PLACES if not place.startswith("before")]
    for number in range(kills):
        variant = VARIANTS[number % len(VARIANTS)]
        place = places[(number + 3 * (number // len(VARIANTS))) % len(places)]  # another one for a variant each time
        if place == "refilling" and "refill" not in variant.name:
            place = "forward"
        name = f"SIGKILL in {place}, {number + 1} of {kills}"
        yield (
            name,
            lambda name=name, variant=variant, place=place, number=number: killed_inside(
                bench, name, variant, place, number, at_once=False
            ),
        )
    for number, place in enumerate(place for place in PLACES if place.startswith("before")):
        for variant in (VARIANTS[0], VARIANTS[4]):
            name = f"SIGKILL {place}, {variant.name}"
            yield (
                name,
                lambda name=name, variant=variant, place=place, number=number: killed_inside(
                    bench, name, variant, place, 1000 + number, at_once=True
                ),
            )


def told(bench: Bench, name: str, variant: Variant, phase: str, number: int, *, twice: bool = False) -> Report:
    """A signal in a phase: saved within its grace, the exit code of the signal, resumed to the same bits."""
    run, started = bench.run(name, variant)
    victim, step = started.children[-1], bench.num_steps(variant) // 2
    while started.is_running():
        now = tools.status(run, started.main.pid)
        if now is not None and now[0] >= step and (now[1] == phase or now[0] > step + 2):
            break
        time.sleep(0.0005)
    began = time.perf_counter()
    victim.send(number)
    if twice:
        time.sleep(0.002)
        victim.send(number)
    codes = started.wait()
    detect = time.perf_counter() - began
    expected = {130 if number == signal.SIGINT else 143}
    report = Report(name, variant.name, f"after {tools.recorded_steps(run)} steps", detect, note=f"exit codes {codes}")
    reached = tools.recorded_steps(run)
    saved = checkpoints_in(run / "checkpoints")[-1][0]
    report = after(bench, report, run, variant, reached=reached)
    if not twice:
        report.has_passed &= set(codes) == expected and report.steps_redone == 0 and saved >= reached
    return report


def signal_scenarios(bench: Bench) -> Iterator[Scenario]:
    """Scenario 5."""
    for variant in (VARIANTS[0], VARIANTS[4], VARIANTS[6]):
        for phase, number in (
            ("sample", signal.SIGTERM),
            ("grade", signal.SIGINT),
            ("train", signal.SIGUSR1),
            ("evaluate", signal.SIGTERM),
            ("save", signal.SIGTERM),
        ):
            name = f"{number.name} in {phase}, {variant.name}"
            yield (
                name,
                lambda name=name, variant=variant, phase=phase, number=number: told(
                    bench, name, variant, phase, number
                ),
            )
    yield "SIGTERM twice", lambda: told(bench, "SIGTERM twice", VARIANTS[0], "train", signal.SIGTERM, twice=True)
