"""Calls of tools and environments beside sampling, and the limits of their seconds."""

from __future__ import annotations

import threading
import time
from typing import Any

from oncurve.core.errors import Failure
from oncurve.episodes.workers import Calls, Workers


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
