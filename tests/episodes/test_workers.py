"""Calls of tools and environments beside sampling, and the limits of their seconds."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from oncurve.core.errors import Failure, SamplerError
from oncurve.episodes import workers as module
from oncurve.episodes.workers import Calls, Job, Workers


def test_a_call_whose_limit_passed_while_nobody_looked_does_not_hold_up_whoever_waits() -> None:
    """Other rows decode meanwhile; then nothing is left but this call, and there is nothing more to wait for."""
    workers, given, ended = Workers(1), list[Any](), threading.Event()
    calls = Calls(workers)
    calls.submit(lambda: ended.wait(60), limit_seconds=0.05, deliver=lambda result, _: given.append(result))
    time.sleep(0.2)
    waiting = threading.Thread(target=lambda: calls.collect(wait=True), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    assert isinstance(given[0], Failure)
    assert given[0].error == "timeout"
    ended.set()
    workers.close()


def test_waiting_ends_with_a_limit_that_passes_meanwhile_or_with_a_result() -> None:
    workers, given, ended = Workers(2), list[Any](), threading.Event()
    calls = Calls(workers)
    calls.submit(lambda: ended.wait(60), limit_seconds=0.2, deliver=lambda result, _: given.append(result))
    calls.submit(lambda: "done", limit_seconds=60.0, deliver=lambda result, _: given.append(result))
    while not calls.is_idle:
        calls.collect(wait=True)
    assert given[0] == "done"
    assert isinstance(given[1], Failure)
    ended.set()
    workers.close()


def test_threads_are_as_many_as_calls_up_to_their_number_and_end_when_they_are_closed() -> None:
    workers, given, gate = Workers(2), list[Any](), threading.Event()
    before = set(threading.enumerate())
    calls = Calls(workers)
    for number, threads in ((1, 1), (2, 2), (3, 2)):
        calls.submit(lambda: gate.wait(60), limit_seconds=60, deliver=lambda *result: given.append(result))
        assert (workers._num_threads, workers._num_open, calls.is_idle) == (threads, number, False)
    started = [one for one in threading.enumerate() if one not in before and one.name == "oncurve-tools"]
    assert [one.daemon for one in started] == [True, True]
    calls.collect(wait=False)
    assert given == []
    gate.set()
    while not calls.is_idle:
        calls.collect(wait=True)
    assert [value for value, _ in given] == [True] * 3
    assert all(0 <= seconds < 60 for _, seconds in given)
    assert (workers._num_open, workers.num_hung) == (0, 0)
    workers.close()
    for one in started:
        one.join(20)
    assert not any(one.is_alive() for one in started)
    assert workers._num_threads == 0


def test_a_call_that_is_given_up_leaves_its_place_to_another_and_its_value_to_who_asked() -> None:
    workers, given, late, gate = Workers(1), list[Any](), list[Any](), threading.Event()
    calls = Calls(workers)
    calls.submit(
        lambda: gate.wait(60), limit_seconds=0.05, deliver=lambda *result: given.append(result), late=late.append
    )
    calls.submit(lambda: "next", limit_seconds=60, deliver=lambda result, _: given.append(result))
    while not calls.is_idle:
        calls.collect(wait=True)
    assert given == [(Failure("timeout", "it did not end within 0.05 s"), 0.05), "next"]
    assert (workers.num_hung, workers._num_threads, workers._num_open) == (1, 1, 0)
    gate.set()
    end = time.monotonic() + 20
    while not late and time.monotonic() < end:
        time.sleep(0.001)
    assert late == [True]
    workers.close()


def test_only_so_many_calls_may_hang_and_one_with_a_result_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HUNG", 1)
    workers = Workers(1)
    job = Job(lambda: None, 2.0, lambda *_: None, workers._jobs)  # type: ignore[arg-type]
    job.is_done = True
    assert not workers.give_up(job)
    job.is_done = False
    assert workers.give_up(job)
    with pytest.raises(SamplerError, match=r"2 calls .* limits \(2 s\)"):
        workers.give_up(job)


@pytest.mark.parametrize(
    ("left", "least", "most"),
    [(None, 0.05, 0.05), (60.0, 0.5, 0.5), (-1.0, 0.001, 0.001), (0.3, 0.1, 0.3)],
)
def test_whoever_waits_looks_again_at_the_next_limit_within_half_a_second(
    left: float | None, least: float, most: float
) -> None:
    calls = Calls(Workers(1))
    for started in (None, time.monotonic() - 1000.0):
        limit = 1000.0 + (left or 0.0)
        job = Job(lambda: None, limit, lambda *_: None, calls._done, started=started if left else None)  # type: ignore[arg-type]
        calls._open[job] = None
    assert least <= calls._until_next_limit() <= most


def test_what_a_call_raises_to_end_the_process_is_its_failure_and_posted_events_are_done() -> None:
    async def later() -> str:
        return "awaited"

    def leave() -> None:
        raise SystemExit(3)

    def interrupt() -> None:
        raise KeyboardInterrupt

    workers, given = Workers(1), list[Any]()
    calls = Calls(workers)
    calls.post(lambda: given.append("posted"))
    calls.collect(wait=True)
    assert given == ["posted"]
    for call in (later, leave, interrupt):
        calls.submit(call, limit_seconds=60, deliver=lambda result, _: given.append(result))
        while not calls.is_idle:
            calls.collect(wait=True)
    assert given[1] == "awaited"
    assert [failure.detail.partition("it ")[2] for failure in given[2:]] == [
        "called sys.exit(3)",
        "raised KeyboardInterrupt",
    ]
    assert workers._loop is not None
    workers.close()
    assert workers._loop is None
