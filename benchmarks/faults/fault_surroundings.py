"""Runs whose surroundings have changed or fail, which must be refused or saved."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import fault_tools as tools
from fault_bench import VARIANTS, Bench, Report, Scenario, Variant, recover

from oncurve.run.checkpoint_manifest import checkpoints_in


def refused(bench: Bench, name: str, code: int, said: str, *words: str, variant: Variant = VARIANTS[0]) -> Report:
    """A resume that must be refused with a message, and the one after it that must work."""
    run = bench.broken_off(name)
    started = bench.resume(run, variant, *words)
    codes = started.wait()
    detect = time.perf_counter() - started.began
    seconds, _ = recover(bench, run, VARIANTS[0])
    found = tools.differences(run, bench.clean(VARIANTS[0]))
    passed = set(codes) == {code} and said in started.main.output and not found
    return Report(
        name,
        variant.name,
        detect_seconds=detect,
        recover_seconds=seconds,
        is_bitwise_equal=not found,
        has_passed=passed,
        note=f"exit codes {codes}",
    )


def surroundings_scenarios(bench: Bench) -> Iterator[Scenario]:
    """Scenarios 4, 16 and 18: no room, another recipe, somebody else's lock, a port that is taken."""

    def no_room() -> Report:
        run, variant = bench.broken_off("no room for a checkpoint"), VARIANTS[0]
        started = bench.resume(run, variant, file_limit=200_000)
        codes = started.wait()
        detect = time.perf_counter() - started.began
        seconds, _ = recover(bench, run, variant)
        found = tools.differences(run, bench.clean(variant))
        lost = 2 * bench.completions_per_step(variant)
        passed = codes == [6] and not found
        return Report(
            "no room for a checkpoint", variant.name, "", detect, seconds, 2, lost, not found, 0, passed, f"{codes}"
        )

    def small_disk() -> Report:
        place = bench.folder / "disk"
        place.mkdir(exist_ok=True)
        mounting = ["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(place)]
        if os.getuid() != 0 or subprocess.run(mounting, capture_output=True, check=False).returncode:
            return Report("full file system", VARIANTS[0].name, has_passed=True, note="left out: needs root")
        try:
            words = (f"run.folder={place}", "run.save_every_steps=1", "run.keep_checkpoints=99", "run.steps=30")
            run, started = bench.run("small_disk", VARIANTS[0], *words)
            codes = started.wait()
            run = place / run.name
            from oncurve.run.checkpoint_manifest import verify

            good = [verify(folder)["step"] for _, folder in checkpoints_in(run / "checkpoints")]
            said = "No space left on device" in started.main.output and "Traceback" not in started.main.output
            note = f"exit codes {codes}, {len(good)} whole checkpoints"
            passed = codes == [6] and said and len(good) > 1
            return Report("full file system", VARIANTS[0].name, has_passed=passed, note=note)
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)

    yield "no room for a checkpoint", no_room
    yield "full file system", small_disk
    changes = {
        "another group size": "algorithm.group_size=2",
        "another data set": "data.limit=63",
        "another learning rate": "optimizer.learning_rate=0.5",
    }
    for how, word in changes.items():
        name = f"resumed with {how}: refused"
        yield name, lambda name=name, word=word: refused(bench, name, 2, "not the run that was saved", word)
    two = Variant("two processes", (), 2)
    name = "resumed with another number of processes: refused"
    yield name, lambda: refused(bench, name, 2, "the number of processes: 1 -> 2", variant=two)

    def held() -> Report:
        run, first = bench.run("held", VARIANTS[0], "run.steps=500")
        while not (run / "status.json").exists():
            time.sleep(0.005)
        second = bench.resume(run, VARIANTS[0])
        codes = second.wait()
        named = f"process {first.main.pid} on " in second.main.output
        first.main.send(signal.SIGKILL)
        first.wait()
        third = bench.resume(run, VARIANTS[0], "run.steps=1", "--allow-change")
        third.wait()
        taken = f"Previous process {first.main.pid}" in third.main.output
        passed = codes == [2] and named and taken
        return Report("a lock that is held, then stale", VARIANTS[0].name, has_passed=passed, note=f"{codes}")

    yield "a lock that is held, then stale", held

    def port_taken() -> Report:
        """A stranger listens where the processes should meet; a new start takes another port."""
        import socket

        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", 0))
            stranger.listen()
            port = str(stranger.getsockname()[1])
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0"}
            try:
                run, started = bench.run("port", VARIANTS[0])
                codes = started.wait()
            finally:
                for key in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
                    del os.environ[key]
        detect = time.perf_counter() - started.began
        said = started.main.output
        passed = codes == [7] and f"127.0.0.1:{port}" in said and "Traceback" not in said and not run.exists()
        return Report("the port is taken", "one of two processes", "", detect, has_passed=passed, note=f"{codes}")

    yield "the port is taken", port_taken
