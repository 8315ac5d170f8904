"""The processor's time that a call takes, as little disturbed by the machine as can be."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def assert_ends_within(seconds: float, call: Callable[[], object]) -> None:
    """The call takes less than ``seconds`` of this thread's processor time, the third time at the latest.

    What is guarded against grows without bound with its input, so a limit of many times the usual is enough; the
    collector of garbage, which may look through a whole suite's objects, is held off.
    """
    taken = []
    gc.disable()
    try:
        for _ in range(3):
            started = time.thread_time()
            call()
            taken.append(time.thread_time() - started)
            if taken[-1] < seconds:
                return
    finally:
        gc.enable()
    raise AssertionError(f"it takes {min(taken):.2f} s, more than {seconds} s")
