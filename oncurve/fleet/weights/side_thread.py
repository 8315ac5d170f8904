"""Waiting in a thread that may be left behind, for calls that may never return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def aside(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Do something that blocks, beside the event loop. Whoever stops waiting leaves the thread where it is: it ends
    with the process, and nothing waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    async def do() -> T:
        return work()

    def settle(task: asyncio.Task[T]) -> None:
        error = task.exception()
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def run() -> None:
        own = asyncio.new_event_loop()
        task = own.create_task(do())
        own.run_until_complete(asyncio.wait([task]))
        own.close()
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, task)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
