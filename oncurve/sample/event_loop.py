"""An event loop in a thread, through which a synchronous trainer talks to many servers at once."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from oncurve.core.errors import ConfigError

T = TypeVar("T")


class EventLoopThread:
    """An event loop that runs beside the caller until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something in the loop and wait for it; a signal that ends the waiting ends the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin something in the loop without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the loop and its thread; who waits for something in it is told that it was cancelled."""
        self.call(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def require_aiohttp() -> None:
    """Raises ConfigError if the library that carries all this is not installed."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("rollout servers need aiohttp, which is not installed. Run `pip install 'oncurve[servers]'`")
