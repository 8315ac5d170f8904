"""The pool grades several programs at once, survives dead sandboxes and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
from sandbox_tiers import NEEDS_SANDBOX

from oncurve.rewards.programs import judge_program
from oncurve.sandbox.failures import SandboxDied
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.pool import SandboxPool, Workplace, default_num_workers
from oncurve.sandbox.program_tests import ProgramCase, ProgramCases

pytestmark = NEEDS_SANDBOX
TESTS = ProgramCases("f", (ProgramCase((2,), {}, "", 4),))
LIMITS = Limits(cpu_seconds=1, wall_seconds=15.0)


def right(workplace: Workplace) -> bool:
    return judge_program(workplace, ["def f(x): return 2 * x"], TESTS, limits=LIMITS).is_correct


def children() -> set[int]:
    found = set()
    for name in os.listdir("/proc"):
        try:
            if (
                name.isdecimal()
                and int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
            ):
                found.add(int(name))
        except OSError:
            continue
    return found


def test_programs_that_sleep_do_not_hold_up_the_others() -> None:
    with SandboxPool(allow="landlock", limits=LIMITS, num_workers=4) as pool:
        assert all(future.result() for future in [pool.submit(right) for _ in range(8)])
        sleeper = ["import time\ndef f(x): time.sleep(100)"]
        longer = Limits(cpu_seconds=1, wall_seconds=8.0)
        slow = [pool.submit(lambda place: judge_program(place, sleeper, TESTS, limits=longer)) for _ in range(3)]
        assert all(future.result() for future in [pool.submit(right) for _ in range(8)])
        assert not any(future.done() for future in slow)
        assert [future.result().kind for future in slow] == ["timeout"] * 3


def test_the_event_loop_is_never_blocked() -> None:
    async def grade(pool: SandboxPool) -> tuple[bool, int]:
        future = asyncio.wrap_future(pool.submit(right))
        ticks = 0
        while not future.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return await future, ticks

    with SandboxPool(allow="landlock", num_workers=1) as pool:
        paid, ticks = asyncio.run(grade(pool))
    assert paid
    assert ticks > 3


def test_a_sandbox_that_dies_once_costs_nothing_but_a_restart() -> None:
    deaths = []

    def work(workplace: Workplace) -> bool:
        assert right(workplace)
        if not deaths:
            process = workplace.program._process
            assert process is not None
            deaths.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            process.wait(30.0)  # the signal is on its way for a moment, in which a quick process still serves
        return right(workplace)

    with SandboxPool(allow="landlock", num_workers=1) as pool:
        assert pool.submit(work).result()
        assert pool.num_starts == 2


def test_a_sandbox_that_dies_twice_is_an_error_and_the_next_program_is_graded() -> None:
    calls = []

    def work(workplace: Workplace) -> bool:
        calls.append(workplace)
        raise SandboxDied("again")

    with SandboxPool(allow="landlock", num_workers=1) as pool:
        with pytest.raises(SandboxDied, match="again"):
            pool.submit(work).result()
        assert len(calls) == 2
        assert pool.submit(right).result()


def test_a_mistake_in_the_work_is_passed_on() -> None:
    with SandboxPool(allow="landlock", num_workers=1) as pool:
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda workplace: 1 / 0).result()
        assert pool.submit(right).result()


def test_closing_leaves_no_process_and_no_thread() -> None:
    before, threads = children(), threading.active_count()
    pool = SandboxPool(allow="landlock", num_workers=2)
    for future in [pool.submit(right) for _ in range(4)]:
        future.result()
    assert children() - before
    pool.close()
    pool.close()
    assert children() <= before
    assert threading.active_count() <= threads


def test_the_number_of_workers_follows_the_processors() -> None:
    assert 1 <= default_num_workers() <= 32
    assert default_num_workers() == min(32, 2 * len(os.sched_getaffinity(0)))
