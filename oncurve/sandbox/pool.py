"""Pool of warm sandboxes that grades many programs at once."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from oncurve.sandbox.failures import SandboxDied
from oncurve.sandbox.instance import Sandbox
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.startup import TierName
from oncurve.sandbox.tiers import choose_isolation

T = TypeVar("T")


class Workplace:
    """Two sandboxes that never share a process: one for programs, one for the code that tests them."""

    def __init__(self, *, tier: TierName, limits: Limits, index: int, packages: tuple[str, ...] = ()) -> None:
        self.program = Sandbox(tier=tier, limits=limits, slot=2 * index, packages=packages)
        self.judge = Sandbox(tier=tier, limits=limits, slot=2 * index + 1, packages=packages)

    def close(self) -> None:
        """Ends both sandboxes."""
        self.program.close()
        self.judge.close()

    @property
    def num_starts(self) -> int:
        """Number of starts of its sandboxes."""
        return self.program.num_starts + self.judge.num_starts


class SandboxPool:
    """Sandboxes for several programs at a time, kept warm between them.

    ``submit`` never waits; work runs in threads that spend their time waiting for sandboxes, each with a workplace
    of its own. The threads live as long as the pool, because a sandbox ends with the thread that started it.

    Raises SandboxUnavailable if this machine has no isolation as strong as the allowed one.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        allow: TierName = "bubblewrap",
        tier: TierName | None = None,
        num_workers: int | None = None,
        packages: tuple[str, ...] = (),
    ) -> None:
        self.tier: TierName = tier or choose_isolation(allow)
        self.limits = limits or Limits()
        self.num_workers = num_workers or default_num_workers()
        self._workplaces = [
            Workplace(tier=self.tier, limits=self.limits, index=index, packages=packages)
            for index in range(self.num_workers)
        ]
        self._free: queue.LifoQueue[Workplace] = queue.LifoQueue()
        for workplace in reversed(self._workplaces):
            self._free.put(workplace)
        self._threads = ThreadPoolExecutor(self.num_workers, thread_name_prefix="sandbox")
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, work: Callable[[Workplace], T]) -> Future[T]:
        """Has work done in one of the workplaces; if a sandbox dies under it, it is done once more.

        The future raises SandboxDied if it dies again. ``asyncio.wrap_future`` makes it awaitable.
        """
        return self._threads.submit(self._do, work)

    def _do(self, work: Callable[[Workplace], T]) -> T:
        workplace = self._free.get()
        try:
            try:
                return work(workplace)
            except SandboxDied:
                workplace.close()
                return work(workplace)
        except BaseException:
            workplace.close()
            raise
        finally:
            self._free.put(workplace)

    def close(self) -> None:
        """Finishes the work that has begun, drops the rest, and ends all sandboxes; harmless when called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        for workplace in self._workplaces:
            workplace.close()

    @property
    def num_starts(self) -> int:
        """Number of starts of sandboxes, the first time included."""
        return sum(workplace.num_starts for workplace in self._workplaces)

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def default_num_workers() -> int:
    """Twice the processors that this process may use, so that a program that sleeps leaves none idle; at most 32."""
    return min(2 * len(os.sched_getaffinity(0)), 32)
