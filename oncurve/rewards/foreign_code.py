"""Calls of a user's reward functions, which cannot hold up a run for ever."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_GRACE_SECONDS = 1.0
"""Over the limit of an async call, until its event loop counts as blocked."""


class _OverLimit(BaseException):
    """The time is over. No ordinary exception, so that ``except Exception`` in the function does not go on."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """TimeoutError where what runs in it, in the main thread, is over its limit. An earlier alarm goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise _OverLimit

    handler, started = signal.signal(signal.SIGALRM, ring), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again where the function catches even this
    try:
        yield
    except _OverLimit:
        raise TimeoutError(f"over {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3), interval)


_loop: asyncio.AbstractEventLoop | None = None


def run_async(pending: Sequence[Awaitable[Any]], timeout_seconds: float) -> list[Any]:
    """The results of awaitables that run together in a thread of their own; an exception where one fails or is late.

    All calls of the process share one event loop, so that a client that a function keeps stays bound to its loop. A
    loop that a function blocks, with ``time.sleep`` instead of ``asyncio.sleep``, is left to it, and the next calls get
    another one.
    """
    global _loop
    if not pending:
        return []
    if _loop is None:
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_run_for_ever, args=(_loop,), name="oncurve-rewards", daemon=True).start()
    tasks: list[asyncio.Future[Any]] = []
    work = asyncio.run_coroutine_threadsafe(_wait(pending, tasks, timeout_seconds), _loop)
    try:
        with limited(timeout_seconds + 2 * _GRACE_SECONDS):  # whose alarm tells the other processes that this ends
            work.result(timeout_seconds + _GRACE_SECONDS)
    except TimeoutError:
        _loop = None
    over = TimeoutError(f"over {timeout_seconds:g} s")
    done = [_result(task) if task.done() and not task.cancelled() else over for task in tasks]
    return [*done, *[over] * (len(pending) - len(done))]


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    """The loop, begun again when a function stops it."""
    while not loop.is_closed():
        loop.run_forever()


async def _wait(pending: Sequence[Awaitable[Any]], tasks: list[asyncio.Future[Any]], timeout_seconds: float) -> None:
    tasks += [asyncio.ensure_future(_value(awaitable)) for awaitable in pending]
    _, late = await asyncio.wait(tasks, timeout=timeout_seconds)
    for task in late:
        task.cancel()


async def _value(awaitable: Awaitable[Any]) -> Any:
    """The value of an awaitable. What would end the loop's thread becomes an ordinary exception."""
    try:
        return await awaitable
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code})") from None
    except KeyboardInterrupt:
        raise RuntimeError("it raised KeyboardInterrupt") from None


def _result(task: asyncio.Future[Any]) -> Any:
    return task.exception() or task.result()
