"""Pool of worker processes for calls that may hang, crash or exhaust the memory."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from oncurve.sandbox.connection import ChildGone, ChildMisbehaved, ChildSilent, Connection
from oncurve.sandbox.inside.frames import Frame

log = logging.getLogger(__name__)

QUICK_SECONDS = 0.5
"""Processor time after which an item waits until all others of its batch are done."""
START_SECONDS = 60.0
"""A worker that has not imported its handler by then counts as dead."""
MAX_FRAME_BYTES = 128 * 2**20
"""A worker that sends a longer result counts as dead."""
_MAX_FAILED_STARTS = 3
_STARVED_FACTOR = 3.0
_GRACE_SECONDS = 0.5
_PARENT_FIELD = 1
_SESSION_FIELD = 3
_START = (
    "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a.pop('path'); "
    "import oncurve.rewards.worker as w; w.main(**a)"
)

OutcomeError = Literal["timeout", "memory", "crashed", "died", "not_run"]
"""The item ran over its time, over its memory, raised, killed its worker twice, or was not reached in time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one item."""

    result: Any = None
    """The handler's return value, as JSON keeps it; None if there is an error."""
    error: OutcomeError | None = None
    """None if the handler returned."""
    detail: str = ""
    """The exception or signal, in one line."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A place for one process, which is there when it is needed. Used by one thread at a time."""

    handler: str
    memory_bytes: int
    process: subprocess.Popen[bytes] | None = None
    connection: Connection | None = None
    is_ready: bool = False
    num_served: int = 0

    def start(self) -> None:
        """A fresh process, unless there is one."""
        if self.process is not None:
            return
        ours, theirs = socket.socketpair()
        arguments = {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "handler": self.handler,
            "descriptor": theirs.fileno(),
            "memory_bytes": self.memory_bytes,
            "parent": os.getpid(),
        }
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", _START, json.dumps(arguments)],
                env=_empty_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.connection = Connection(ours)

    def get_ready(self, deadline: float) -> Connection:
        """Wait until the handler is imported. Raises RuntimeError if it cannot be, and what a connection raises."""
        assert self.connection is not None
        if not self.is_ready:
            frame = self.connection.receive(deadline, MAX_FRAME_BYTES)
            if frame["k"] == "broken":
                raise RuntimeError(f"a grading process cannot import {self.handler}: {frame['detail']}")
            self.is_ready = True
        return self.connection

    def reply(self, connection: Connection, seconds: float, ends: float) -> Frame:
        """The process's answer. Raises ChildSilent if that takes longer than ``seconds``.

        A process that has not had the time goes on: a busy machine must not flip a verdict.
        """
        assert self.process is not None
        started, cpu_before = time.monotonic(), _cpu_seconds(self.process.pid)
        deadline, latest = started + seconds, min(started + _STARVED_FACTOR * seconds, ends)
        while not _has_more(connection, min(deadline, latest)):
            used = _cpu_seconds(self.process.pid) - cpu_before
            if deadline >= latest or used >= 0.9 * seconds or _stat(self.process.pid)[:1] != ["R"]:
                raise ChildSilent
            deadline = time.monotonic() + seconds - used
        return connection.receive(time.monotonic() + seconds, MAX_FRAME_BYTES)

    def kill(self) -> None:
        """Kill the process, if there is one, with all that it has started in its session."""
        if self.process is not None and self.process.returncode is None:
            _kill_session(self.process.pid)

    def end(self) -> int | None:
        """End the process, if there is one, and what it has started; its exit code."""
        process, connection = self.process, self.connection
        self.process, self.connection, self.is_ready, self.num_served = None, None, False, 0
        if process is None or connection is None:
            return None
        connection.close()
        if process.returncode is None:
            _kill_session(process.pid)
        return process.wait()


class WorkerPool:
    """Processes that run one handler on items that cannot be trusted.

    Each worker is a fresh interpreter (never a fork of the trainer) with an empty environment and a memory limit, and
    holds one item at a time. An item over its deadline is killed with its worker, which is replaced; a worker that
    dies gets its item tried once more. With ``interrupts`` the worker itself ends an item over its processor time,
    which costs no new process, and is killed only if that fails. With ``quick_seconds`` an item that needs more than
    that waits until all others are done, and one that ``batch_seconds`` then leave no time for counts as over its
    limit: slow items cost nobody else's result.

    There is one worker more than work at a time, so that one is ready where another was killed. Workers start when
    they are needed, and die with the process that started them; what they have started in their session dies with them.

    ``map`` consumes a list of payloads, waits for all of them, and is unblocked by results, deaths and deadlines, at
    the latest after ``batch_seconds``. The pool owns its processes, and a thread for each, since a process ends with
    the thread that started it. Calls from several threads wait for each other, and ``close`` ends a call that is under
    way in another thread.
    """

    def __init__(
        self,
        handler: str,
        *,
        workers: int | None = 1,
        timeout_seconds: float = 3.0,
        batch_seconds: float = 60.0,
        memory_gib: float = 2.0,
        items_per_worker: int = 5000,
        quick_seconds: float | None = None,
        interrupts: bool = False,
    ) -> None:
        self.handler = handler
        self.num_workers = workers or default_num_workers()
        self.quick_seconds = quick_seconds
        self.interrupts = interrupts
        self.timeout_seconds = timeout_seconds
        self.batch_seconds = batch_seconds
        self.items_per_worker = items_per_worker
        self._workers = [_Worker(handler, int(memory_gib * 2**30)) for _ in range(self.num_workers + 1)]
        self._free = deque(self._workers)
        self._threads = self._new_threads()
        self._lock = threading.Lock()
        self._ends = 0.0
        """Deadline of the current call."""
        self._is_closing = self._is_stopped = False
        self._finalizer = weakref.finalize(self, _end_all, self._workers, os.getpid())

    def map(self, payloads: Iterable[object]) -> list[Outcome]:
        """One outcome per payload, in order.

        Raises RuntimeError if the workers do not start at all, or if the pool is closed meanwhile.
        """
        items = list(payloads)
        with self._lock:
            if self.quick_seconds is None or self.quick_seconds >= self.timeout_seconds:
                return self._map(items, self.timeout_seconds, self.batch_seconds)
            outcomes = self._map(items, self.quick_seconds, math.inf)
            slow = [index for index, outcome in enumerate(outcomes) if outcome.error == "timeout"]
            again = self._map([items[index] for index in slow], self.timeout_seconds, self.batch_seconds)
            for index, outcome in zip(slow, again, strict=True):
                if outcome.error != "not_run":  # else it stays over the limit
                    outcomes[index] = outcome
            return outcomes

    def _map(self, items: Sequence[object], seconds: float, batch_seconds: float) -> list[Outcome]:
        self._ends, self._is_stopped = time.monotonic() + batch_seconds, False
        futures = [self._threads.submit(self._outcome, item, seconds) for item in items]
        is_done = False
        try:
            outcomes = self._wait(futures)
            is_done = True
        finally:
            if not is_done:  # a busy worker would answer the next batch with this one's result
                self._is_stopped = True
                self._kill()
                for future in futures:
                    future.cancel()
                wait(futures)
                _end_all(self._workers, os.getpid())
        return outcomes

    def close(self) -> None:
        """Kills every worker and waits for its end; the next ``map`` starts new ones."""
        self._is_closing = True
        self._kill()  # whoever waits for them in another thread wakes up
        with self._lock:
            self._threads.shutdown()
            _end_all(self._workers, os.getpid())
            self._threads = self._new_threads()
            self._is_closing = False

    def _new_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.num_workers, thread_name_prefix="grading-process")

    def _wait(self, futures: Sequence[Future[Outcome]]) -> list[Outcome]:
        return [future.result() for future in futures]

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _outcome(self, payload: object, seconds: float) -> Outcome:
        """The outcome of one item; a worker that dies of it is replaced, and the item tried once more."""
        code = None
        for _ in range(2):
            if self._is_late:
                return self._not_reached()
            worker = self._free.popleft()
            try:
                return self._tried(worker, payload, seconds)
            except (ChildGone, ChildMisbehaved):
                code = worker.end()
                self._check_open()
            except ChildSilent:
                worker.end()
                if self._is_late:
                    return self._not_reached()
                return Outcome(error="timeout", detail=f"over the time limit of {seconds:g} s")
            finally:
                self._give_back(worker)
        return Outcome(error="died", detail=f"the grading process ended with code {code}, twice")

    def _tried(self, worker: _Worker, payload: object, seconds: float) -> Outcome:
        connection = self._ready(worker)
        item = {"k": "item", "text": json.dumps(payload), "seconds": seconds if self.interrupts else 0.0}
        connection.send(item, min(time.monotonic() + START_SECONDS, self._ends))
        frame = worker.reply(connection, seconds + (_GRACE_SECONDS if self.interrupts else 0.0), self._ends)
        worker.num_served += 1
        if worker.num_served >= self.items_per_worker:
            worker.end()
        try:
            if frame["k"] == "result":
                return Outcome(result=json.loads(frame["text"]))
            return Outcome(error=frame["error"], detail=frame["detail"])
        except (KeyError, ValueError):
            raise ChildMisbehaved(f"an answer without its parts: {frame!r:.80}") from None

    def _ready(self, worker: _Worker) -> Connection:
        """Raises RuntimeError for workers that end, again and again, before they are ready."""
        for _ in range(_MAX_FAILED_STARTS):
            worker.start()
            self._check_open()
            limit = time.monotonic() + START_SECONDS
            try:
                return worker.get_ready(min(limit, self._ends))
            except (ChildGone, ChildSilent):
                self._check_open()
                if self._is_late:
                    raise ChildSilent from None
                worker.end()
        raise RuntimeError(f"grading processes for {self.handler} end before they are ready")

    def _check_open(self) -> None:
        if self._is_closing or self._is_stopped:
            raise RuntimeError(f"the grading processes for {self.handler} were closed")

    def _give_back(self, worker: _Worker) -> None:
        """Let the next item have the worker; one that was killed starts anew and is taken last."""
        if worker.process is not None:
            self._free.appendleft(worker)
            return
        try:
            if not (self._is_closing or self._is_stopped or self._is_late):
                worker.start()
        except OSError as error:  # no memory for a process now; the next item that gets the worker tries again
            log.warning("a grading process did not start (%s)", error)
        finally:
            self._free.append(worker)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() >= self._ends

    def _not_reached(self) -> Outcome:
        return Outcome(error="not_run", detail=f"the batch was not graded within {self.batch_seconds:g} s")


def default_num_workers() -> int:
    """One for every processor that this process may use, at most 16."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16)


def _kill_session(leader: int) -> None:
    """Kill the leader of a session, for which nobody has waited yet, with its session and all that descend from it."""
    names = [name for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc/self") else []
    fields = {int(name): status for name in names if (status := _stat(int(name)))}
    doomed = {leader}
    while more := {
        pid
        for pid, status in fields.items()
        if pid not in doomed and (int(status[_PARENT_FIELD]) in doomed or int(status[_SESSION_FIELD]) == leader)
    }:
        doomed |= more
    for pid in doomed:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _end_all(workers: Sequence[_Worker], owner: int) -> None:
    """Ends all workers, unless this process is a fork of the one that owns them."""
    if os.getpid() == owner:
        for worker in workers:
            worker.end()


def _has_more(connection: Connection, until: float) -> bool:
    """Something comes before a moment on the monotonic clock, and be it the end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1))


def _empty_environment() -> dict[str, str]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters do not start without it
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return environment


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the name, "R" first for one that runs; empty where there is no such file."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0
