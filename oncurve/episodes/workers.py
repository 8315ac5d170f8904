"""Threads in which tools and environments run, beside sampling, each call with a limit of seconds.

A thread cannot be ended from outside. One whose call is over its limit is left alone, another takes its place, and what
it gives later is thrown away.
"""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oncurve.core.errors import Failure, SamplerError, attempt
from oncurve.model.allocator import share_arenas
from oncurve.sample.event_loop import EventLoopThread

MAX_HUNG = 512
"""Threads that hang in a call for ever; with more, something is wrong that waiting does not cure."""


@dataclass(eq=False)
class Job:
    """One call on its way."""

    call: Callable[[], Any]
    limit_seconds: float
    deliver: Callable[[Any, float], None]
    """Takes the value, or the Failure, and the seconds that it took, in the thread that asked for it."""
    done: queue.SimpleQueue[Any]
    """Takes the job with its result, for the thread that asked for it."""
    late: Callable[[Any], None] | None = None
    """Takes, in its own thread, what the call gives when it was given up."""
    started: float | None = None
    is_done: bool = False
    """It has a result."""
    is_over: bool = False
    """Nobody waits for the result any more."""
    seconds: float = 0.0


class Workers:
    """Threads that run the calls of everybody who has ``Calls`` of them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.num_hung = 0
        """Threads that were left in a call that did not end."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_open = 0
        self._num_threads = 0
        self._loop: EventLoopThread | None = None
        self._lock = threading.Lock()
        share_arenas()

    def put(self, job: Job) -> None:
        """Runs a call when a thread is free."""
        with self._lock:
            self._num_open += 1
            self._start_missing()
        self._jobs.put(job)

    def finish(self, job: Job) -> None:
        """Forgets a call whose result has come."""
        with self._lock:
            job.is_over = True
            self._num_open -= 1

    def give_up(self, job: Job) -> bool:
        """Leaves a call and its thread alone, unless it has a result by now. Returns whether it is given up.

        Raises SamplerError if too many calls hang for ever.
        """
        with self._lock:
            if job.is_done:
                return False
            job.is_over = True
            self.num_hung += 1
            self._num_open -= 1
            self._num_threads -= 1
            self._start_missing()
        if self.num_hung > MAX_HUNG:
            raise SamplerError(
                f"{self.num_hung} calls of tools or environments did not end within their limits "
                f"({job.limit_seconds:g} s), and each holds a thread. Give what they call a time limit of its own"
            )
        return True

    def close(self) -> None:
        """Lets the threads end; those that hang are left to the end of the process."""
        for _ in range(self._num_threads):
            self._jobs.put(None)
        self._num_threads = 0
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _start_missing(self) -> None:
        if self._num_threads < min(self.threads, self._num_open):
            self._num_threads += 1
            threading.Thread(target=self._work, name="oncurve-tools", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.started = time.monotonic()
            result = attempt(lambda job=job: self._value(job))
            job.seconds = time.monotonic() - job.started
            with self._lock:
                is_late = job.is_over  # given up: another thread has this one's place
                job.is_done = True
                if not is_late:
                    job.done.put((job, result))
            if is_late:
                if job.late is not None:
                    job.late(result)
                return

    def _value(self, job: Job) -> Any:
        """The value of a call, awaited if it has to be, all of them in one event loop."""
        try:
            value = job.call()
            if not inspect.isawaitable(value):
                return value
            future = self._event_loop().start(_awaited(value))
            try:
                return future.result(job.limit_seconds + 1.0)  # it is given up from outside before
            finally:
                future.cancel()
        except SystemExit as error:
            raise RuntimeError(f"it called sys.exit({error.code})") from None
        except (KeyboardInterrupt, GeneratorExit) as error:  # raised by the call: signals reach the main thread alone
            raise RuntimeError(f"it raised {type(error).__name__}") from None

    def _event_loop(self) -> EventLoopThread:
        with self._lock:
            if self._loop is None:
                self._loop = EventLoopThread("oncurve-async-tools")
            return self._loop


class Calls:
    """Calls of one thread, which gets their results when it collects them."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._done: queue.SimpleQueue[tuple[Job, Any] | Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[Job, None] = {}

    def submit(
        self,
        call: Callable[[], Any],
        *,
        limit_seconds: float,
        deliver: Callable[[Any, float], None],
        late: Callable[[Any], None] | None = None,
    ) -> None:
        """Run a call, sync or async, when a thread is free."""
        job = Job(call, limit_seconds, deliver, self._done, late)
        self._open[job] = None
        self._workers.put(job)

    def post(self, event: Callable[[], None]) -> None:
        """Have something done in the thread that collects; from any thread."""
        self._done.put(event)

    @property
    def is_idle(self) -> bool:
        """No call is on its way."""
        return not self._open

    def collect(self, *, wait: bool) -> None:
        """Deliver what has come, and give up calls over their limits; with ``wait``, at least one of the two.

        Raises SamplerError if too many calls hang for ever.
        """
        while True:
            wait = not self._give_up_late_ones() and wait
            try:
                delivery = self._done.get(timeout=self._until_next_limit()) if wait else self._done.get_nowait()
            except queue.Empty:
                if wait:
                    continue
                return
            wait = False
            if not isinstance(delivery, tuple):
                delivery()
                continue
            job, result = delivery
            if not job.is_over:
                self._workers.finish(job)
                self._open.pop(job, None)
                job.deliver(result, job.seconds)

    def _until_next_limit(self) -> float:
        now = time.monotonic()
        limits = [job.started + job.limit_seconds - now for job in self._open if job.started is not None]
        return min(max(min(limits, default=0.05), 0.001), 0.5)

    def _give_up_late_ones(self) -> bool:
        """Deliver a timeout for every call over its limit. Returns whether there was one."""
        now, has_late = time.monotonic(), False
        for job in [job for job in self._open if job.started is not None and now > job.started + job.limit_seconds]:
            if self._workers.give_up(job):
                self._open.pop(job, None)
                late = Failure("timeout", f"it did not end within {job.limit_seconds:g} s")
                job.deliver(late, job.limit_seconds)
                has_late = True
        return has_late


async def _awaited(value: Any) -> Any:
    return await value
