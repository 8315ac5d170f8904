"""The code inside a grading process: one handler, one item at a time, under a memory limit.

Started by `oncurve.rewards.worker_pool`; imports neither torch nor the caller's main module. Items and results travel
as JSON text in a frame, because what comes back from a worker must never be able to run code in the trainer.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from oncurve.constants import PR_SET_PDEATHSIG
from oncurve.core.errors import Failure, attempt
from oncurve.sandbox.inside.frames import Frame, receive, send


class OverTime(BaseException):
    """An item used up its processor time. No ``except Exception`` on the way may take it for something else."""


def serve(descriptor: int, handler: Callable[[Any], object]) -> None:
    """Answers every item until the other side closes; one is interrupted after its "seconds" of processor time."""
    signal.signal(signal.SIGPROF, _interrupt)
    send(descriptor, {"k": "ready"})
    while True:
        try:
            item = receive(descriptor)
        except EOFError:
            return
        send(descriptor, _answer(handler, json.loads(item["text"]), item.get("seconds", 0.0)))


def _interrupt(_number: int, _frame: object) -> None:
    raise OverTime


def _answer(handler: Callable[[Any], object], item: Any, seconds: float) -> Frame:
    outcome = attempt(lambda: _run(handler, item, seconds), log=False)
    if isinstance(outcome, Failure):
        return {"k": "failed", "error": outcome.error, "detail": outcome.detail}
    return outcome


def _run(handler: Callable[[Any], object], item: Any, seconds: float) -> Frame:
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return {"k": "result", "text": json.dumps(handler(item))}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except OverTime:
        return {"k": "failed", "error": "timeout", "detail": f"over the time limit of {seconds:g} s"}
    except MemoryError:
        return {"k": "failed", "error": "memory", "detail": "the memory limit of the grading process"}


def _limit(memory_bytes: int, parent: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes its pool
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main(handler: str, descriptor: int, memory_bytes: int, parent: int) -> None:
    """Serves the handler ``module:function`` on an inherited socket."""
    _limit(memory_bytes, parent)
    module, _, function = handler.partition(":")
    loaded = attempt(lambda: getattr(importlib.import_module(module), function), log=False)
    if isinstance(loaded, Failure):
        send(descriptor, {"k": "broken", "detail": loaded.detail})
        return
    serve(descriptor, loaded)
