"""A pool that survives whatever its workers do."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_records import children

from oncurve.rewards.worker_pool import Outcome, WorkerPool, _cpu_seconds

HANDLER = "pool_handlers:misbehave"
LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or needs a parent-death signal")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(HANDLER, workers=2, timeout_seconds=0.5, memory_gib=1.0)
    yield made
    made.close()


def give(value: object) -> dict[str, object]:
    return {"do": "return", "value": value}


def test_results_come_back_in_order(pool: WorkerPool) -> None:
    assert [outcome.result for outcome in pool.map(give(k) for k in range(50))] == list(range(50))
    assert pool.map([]) == []


@pytest.mark.parametrize("value", [None, "", "\ud800", "\x00", "é" * 1000, [1, [2.5, None]], {"a": "b"}])
def test_data_of_any_kind_goes_there_and_back(value: object, pool: WorkerPool) -> None:
    assert pool.map([give(value)]) == [Outcome(result=value)]


def test_processes_that_cannot_start_now_start_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(HANDLER, workers=1, timeout_seconds=0.5)
    try:
        with monkeypatch.context() as patched:

            def refuse(*_: object, **__: object) -> None:
                raise BlockingIOError("no memory for a process")

            patched.setattr(subprocess, "Popen", refuse)
            for _ in range(3):
                with pytest.raises(BlockingIOError):
                    pool.map([give(1)])
        assert pool.map([give(1), give(2)]) == [Outcome(result=1), Outcome(result=2)]
    finally:
        pool.close()


def test_a_large_item_does_not_block(pool: WorkerPool) -> None:
    text = "x" * 5_000_000
    assert pool.map([give(text)])[0].result == text


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ({"do": "raise", "value": "no"}, "crashed"),
        ({"do": "object"}, "crashed"),
        ({"do": "spin"}, "timeout"),
        ({"do": "power"}, "timeout"),
        ({"do": "sleep", "value": 60}, "timeout"),
        ({"do": "memory", "value": 4 * 2**30}, "memory"),
        ({"do": "exit"}, "died"),
        ({"do": "segfault"}, "died"),
    ],
)
def test_a_bad_item_is_an_error_of_its_kind_and_its_neighbours_are_not_touched(
    payload: dict[str, object], error: str, pool: WorkerPool
) -> None:
    outcomes = pool.map([give(1), payload, give(2), give(3)])
    assert [outcome.error for outcome in outcomes] == [None, error, None, None]
    assert [outcome.result for outcome in outcomes] == [1, None, 2, 3]
    assert outcomes[1].detail


def test_an_item_whose_worker_died_is_tried_once_more(pool: WorkerPool, tmp_path: Path) -> None:
    outcomes = pool.map([{"do": "die once", "value": str(tmp_path / "flag")}])
    assert outcomes == [Outcome(result="second time")]


def test_what_a_handler_prints_does_not_disturb(pool: WorkerPool) -> None:
    assert pool.map([{"do": "print", "value": 100_000}])[0].result == "printed"


def test_items_that_hang_take_turns_and_no_longer(pool: WorkerPool) -> None:
    pool.map([give(1)] * 4)  # started
    started = time.monotonic()
    outcomes = pool.map([{"do": "sleep", "value": 60}] * 4)
    assert [outcome.error for outcome in outcomes] == ["timeout"] * 4
    assert time.monotonic() - started < 40.0  # 1 s on an idle machine: two turns of 0.5 s


def test_a_batch_ends_in_time_whatever_is_left() -> None:
    pool = WorkerPool(HANDLER, workers=1, timeout_seconds=30.0, batch_seconds=1.5)
    started = time.monotonic()
    outcomes = pool.map([{"do": "sleep", "value": 60}, give(1)])
    assert time.monotonic() - started < 25.0
    assert [outcome.error for outcome in outcomes] == ["not_run", "not_run"]
    pool.batch_seconds = 60.0
    assert pool.map([give(2)])[0].result == 2
    pool.close()


@LINUX_ONLY
def test_workers_see_neither_environment_nor_torch(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "canary")
    pool.close()
    facts = pool.map([{"do": "facts"}])[0].result
    assert "canary" not in str(facts["environment"])
    assert facts["environment"]["PYTHONHASHSEED"] == "0"
    assert facts["modules"] == []
    assert facts["cwd"] == "/"


@LINUX_ONLY
def test_no_zombie_and_no_process_is_left() -> None:
    before = children()
    pool = WorkerPool(HANDLER, workers=2, timeout_seconds=0.3)
    pool.map([give(1), {"do": "exit"}, {"do": "spin"}, give(2)])
    assert len(children() - before) <= 3  # two workers and a spare
    pool.close()
    assert children() - before == set()
    pool.close()


@LINUX_ONLY
def test_every_failure_among_many_items_is_counted_under_its_kind() -> None:
    before = children()
    pool = WorkerPool(HANDLER, workers=2, timeout_seconds=0.3, memory_gib=1.0)
    payloads: list[dict[str, object]] = [give(number) for number in range(800)]
    for index in (50, 450):
        payloads[index] = {"do": "spin"}
        payloads[index + 1] = {"do": "exit"}
        payloads[index + 2] = {"do": "memory", "value": 4 * 2**30}
        payloads[index + 3] = {"do": "raise", "value": "no"}
    outcomes = pool.map(payloads)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    assert sorted(errors) == sorted(["timeout", "died", "memory", "crashed"] * 2)
    assert [outcome.result for outcome in outcomes if not outcome.error] == [
        payload["value"] for payload in payloads if payload["do"] == "return"
    ]
    pool.close()
    assert children() - before == set()


@LINUX_ONLY
def test_a_forgotten_pool_ends_its_workers() -> None:
    before = children()
    pool = WorkerPool(HANDLER)
    pool.map([give(1)])
    assert children() - before
    del pool
    gc.collect()
    assert children() - before == set()


def test_a_closed_pool_starts_again(pool: WorkerPool) -> None:
    pool.close()
    assert pool.map([give(1)])[0].result == 1


def test_workers_are_replaced_after_their_share_of_items() -> None:
    pool = WorkerPool(HANDLER, items_per_worker=2)
    pids = [pool.map([{"do": "facts"}])[0].result["pid"] for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    pool.close()


def test_threads_wait_for_each_other(pool: WorkerPool) -> None:
    results: dict[int, list[object]] = {}

    def work(number: int) -> None:
        results[number] = [outcome.result for outcome in pool.map(give(number) for _ in range(10))]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [number] * 10 for number in range(3)}


def test_a_handler_that_cannot_be_imported_is_said() -> None:
    for handler in ("no_such_module:f", "pool_handlers:no_such_function"):
        pool = WorkerPool(handler)
        with pytest.raises(RuntimeError, match=f"cannot import {handler}"):
            pool.map([1])
        pool.close()


def test_an_interrupted_batch_does_not_leak_into_the_next(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pool.map([give(1)])
    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.map([give("old")])
    assert pool.map([give("new")])[0].result == "new"


@LINUX_ONLY
def test_workers_die_with_the_process_that_started_them() -> None:
    program = textwrap.dedent(
        f"""
        import sys, time
        sys.path[:0] = {sys.path!r}
        from oncurve.rewards.worker_pool import WorkerPool
        pool = WorkerPool("pool_handlers:misbehave", timeout_seconds=600)
        print(pool.map([{{"do": "facts"}}])[0].result["pid"], flush=True)
        pool.map([{{"do": "power"}}])
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert Path(f"/proc/{worker}").exists()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    ends = time.monotonic() + 10.0
    while _is_alive(worker) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not _is_alive(worker)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_rewards_import_neither_torch_nor_transformers_nor_sympy() -> None:
    program = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = {sys.path!r}
        import oncurve.rewards.custom, oncurve.rewards.formats, oncurve.rewards.shaping, oncurve.rewards.r1_zero
        from oncurve.rewards.mathematics import AnswerChecker
        checker = AnswerChecker()
        assert checker.check([("\\\\sqrt{{8}}", "2\\\\sqrt{{2}}"), ("5", "5")]) == ["right", "right"]
        checker.close()
        print(sorted({{"torch", "transformers", "sympy", "math_verify", "numpy"}} & set(sys.modules)))
        """
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@LINUX_ONLY
def test_the_seconds_of_a_process_are_those_of_its_processor() -> None:
    assert _cpu_seconds(os.getpid()) == pytest.approx(sum(os.times()[:2]), abs=0.1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert _cpu_seconds(ended.pid) == 0.0


@LINUX_ONLY
def test_a_worker_that_interrupts_an_item_itself_goes_on() -> None:
    pool = WorkerPool(HANDLER, workers=1, timeout_seconds=1.0, interrupts=True)
    before = pool.map([{"do": "facts"}])[0].result["pid"]
    outcomes = pool.map([{"do": "spin"}, {"do": "facts"}, {"do": "power"}, give(1)])
    assert [outcome.error for outcome in outcomes] == ["timeout", None, "timeout", None]
    assert outcomes[1].result["pid"] == before
    pool.close()


def test_slow_items_wait_until_the_others_are_done_and_none_is_left_without_an_outcome() -> None:
    pool = WorkerPool(HANDLER, workers=1, timeout_seconds=0.5, batch_seconds=0.8, quick_seconds=0.1, interrupts=True)
    spin = {"do": "spin"}
    outcomes = pool.map([spin, give(1), spin, give(2), spin, give(3), spin, give(4)])
    assert [outcome.error for outcome in outcomes] == ["timeout", None] * 4
    assert [outcome.result for outcome in outcomes[1::2]] == [1, 2, 3, 4]
    pool.close()


@LINUX_ONLY
@pytest.mark.parametrize("started", ["child", "child of its own session"])
def test_what_a_worker_has_started_ends_with_it(started: str) -> None:
    pool = WorkerPool(HANDLER, workers=1)
    child = pool.map([{"do": started}])[0].result
    assert Path(f"/proc/{child}").exists()
    pool.close()
    state = Path(f"/proc/{child}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError("the process that a worker has started is still there")
