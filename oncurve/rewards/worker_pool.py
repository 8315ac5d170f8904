"""Pool of worker processes for calls that may hang, crash or exhaust the memory."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oncurve.rewards.worker import HEADER, MAX_FRAME_BYTES, encode

START_SECONDS = 60.0
"""A worker that has not imported its handler by then counts as dead."""
_MAX_FAILED_STARTS = 3
_STARVED_FACTOR = 3.0
_START = (
    "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a.pop('path'); "
    "import oncurve.rewards.worker as w; w.main(**a)"
)

OutcomeError = Literal["timeout", "memory", "crashed", "died", "not_run"]
"""The item ran over its time, over its memory, raised, killed its worker twice, or was not reached in time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item."""

    result: Any = None
    """The handler's return value, as JSON keeps it; None if there is an error."""
    error: OutcomeError | None = None
    """None if the handler returned."""
    detail: str = ""
    """The exception or signal, in one line."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One process and the item it is busy with."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    deadline: float
    is_ready: bool = False
    item: int | None = None
    """Index of the item in flight; None when it waits for one."""
    started: float = 0.0
    cpu_at_start: float = 0.0
    num_served: int = 0
    outgoing: bytes = b""
    incoming: bytearray = field(default_factory=bytearray)

    def send(self) -> None:
        """Writes as much of the outgoing frame as fits without waiting."""
        try:
            self.outgoing = self.outgoing[self.connection.send(self.outgoing) :]
        except BlockingIOError:
            return
        except OSError:
            self.outgoing = b""  # the worker is gone; reading finds the end of the stream

    def receive(self) -> tuple[bool, dict[str, Any] | None]:
        """Whether the stream is open, and a whole message if one has arrived."""
        try:
            chunk = self.connection.recv(2**20)
        except BlockingIOError:
            return True, None
        except OSError:
            chunk = b""
        self.incoming += chunk
        if not chunk:
            return False, None
        if len(self.incoming) < HEADER.size:
            return True, None
        length = HEADER.unpack(self.incoming[: HEADER.size])[0]
        if length > MAX_FRAME_BYTES:
            return False, None
        if len(self.incoming) < HEADER.size + length:
            return True, None
        body = bytes(self.incoming[HEADER.size : HEADER.size + length])
        del self.incoming[: HEADER.size + length]
        return True, json.loads(body)


@dataclass(slots=True)
class _Batch:
    """The items of one call and what is known of them so far."""

    payloads: Sequence[object]
    ends: float
    waiting: deque[int]
    outcomes: dict[int, Outcome]
    deaths: dict[int, int]

    @property
    def is_open(self) -> bool:
        return len(self.outcomes) < len(self.payloads)


class WorkerPool:
    """Processes that run one handler on items that cannot be trusted.

    Each worker is a fresh interpreter (never a fork of the trainer) with an empty environment and a memory limit, and
    holds one item at a time. An item over its deadline is killed with its worker, which is replaced; a worker that
    dies gets its item tried once more. After the first such end a spare worker is kept ready. Workers start with the
    first item, and die with the process that started them.

    ``map`` consumes a list of payloads, waits for all of them, and is unblocked by results, deaths and deadlines, at
    the latest after ``batch_seconds``. The pool owns its processes; calls from several threads wait for each other, and
    ``close`` ends a call that is under way in another thread.
    """

    def __init__(
        self,
        handler: str,
        *,
        workers: int = 1,
        timeout_seconds: float = 3.0,
        batch_seconds: float = 60.0,
        memory_gib: float = 2.0,
        items_per_worker: int = 5000,
    ) -> None:
        self.handler = handler
        self.num_workers = workers
        self.timeout_seconds = timeout_seconds
        self.batch_seconds = batch_seconds
        self.memory_bytes = int(memory_gib * 2**30)
        self.items_per_worker = items_per_worker
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._num_spares = 0
        self._lock = threading.Lock()
        self._is_closing = False
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())

    def map(self, payloads: Iterable[object]) -> list[Outcome]:
        """One outcome per payload, in order.

        Raises RuntimeError if the workers do not start at all, or if the pool is closed meanwhile.
        """
        items = list(payloads)
        with self._lock:
            batch = _Batch(items, time.monotonic() + self.batch_seconds, deque(range(len(items))), {}, {})
            is_done = False
            try:
                while batch.is_open:
                    if self._is_closing:
                        raise RuntimeError(f"the grading processes for {self.handler} were closed")
                    self._dispatch(batch)
                    self._wait(batch)
                is_done = True
            finally:
                if not is_done:  # a busy worker would answer the next batch with this one's result
                    _kill_all(self._workers, os.getpid())
        return [batch.outcomes[place] for place in range(len(items))]

    def close(self) -> None:
        """Kills every worker and waits for its end; the next ``map`` starts new ones."""
        self._is_closing = True
        for worker in list(self._workers):
            worker.process.kill()  # whoever waits for it in another thread wakes up
        with self._lock:
            _kill_all(self._workers, os.getpid())
            self._is_closing = False

    def _dispatch(self, batch: _Batch) -> None:
        """Gives an item to every worker that waits, and starts workers while there are more items than that."""
        for worker in list(self._workers):
            if worker.is_ready and worker.item is None and worker.num_served >= self.items_per_worker:
                self._remove(worker)
        num_busy = sum(worker.item is not None for worker in self._workers)
        for worker in self._workers:
            if worker.is_ready and worker.item is None and batch.waiting and num_busy < self.num_workers:
                num_busy += 1
                worker.item = batch.waiting.popleft()
                worker.outgoing = encode(batch.payloads[worker.item])
                worker.started = time.monotonic()
                worker.deadline = worker.started + self.timeout_seconds
                worker.cpu_at_start = _cpu_seconds(worker.process.pid)
                worker.send()
        num_wanted = min(self.num_workers, num_busy + len(batch.waiting)) + self._num_spares
        for _ in range(num_wanted - len(self._workers)):
            self._workers.append(self._start())

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        arguments = {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "handler": self.handler,
            "descriptor": theirs.fileno(),
            "memory_bytes": self.memory_bytes,
            "parent": os.getpid(),
        }
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-c", _START, json.dumps(arguments)],
            env=_empty_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        ours.setblocking(False)
        return _Worker(process, ours, deadline=time.monotonic() + START_SECONDS)

    def _wait(self, batch: _Batch) -> None:
        """Sleeps until a worker has something to say or a deadline passes, and acts on it."""
        active = [worker for worker in self._workers if worker.item is not None or not worker.is_ready]
        next_deadline = min([worker.deadline for worker in active] + [batch.ends])
        poll = select.poll()
        by_descriptor = {worker.connection.fileno(): worker for worker in active}
        for descriptor, worker in by_descriptor.items():
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if worker.outgoing else 0))
        for descriptor, event in poll.poll(max(0.0, next_deadline - time.monotonic()) * 1000 + 1):
            worker = by_descriptor[descriptor]
            if event & select.POLLOUT:
                worker.send()
            if event & ~select.POLLOUT:
                self._read(worker, batch)
        now = time.monotonic()
        for worker in active:
            if worker in self._workers and worker.deadline <= now and (worker.item is not None or not worker.is_ready):
                self._overdue(worker, batch)
        if batch.ends <= now:
            self._give_up(batch)

    def _read(self, worker: _Worker, batch: _Batch) -> None:
        is_open, message = worker.receive()
        if message is not None and "ready" in message:
            worker.is_ready = bool(message["ready"])
            if not worker.is_ready:
                raise RuntimeError(f"a grading process cannot import {self.handler}: {message.get('detail')}")
            self._failed_starts = 0
        elif message is not None and worker.item is not None:
            batch.outcomes[worker.item] = Outcome(
                result=message.get("result"), error=message.get("error"), detail=message.get("detail", "")
            )
            worker.item = None
            worker.num_served += 1
        elif not is_open:
            self._died(worker, batch)

    def _died(self, worker: _Worker, batch: _Batch) -> None:
        """Replaces a worker that ended by itself; its item is tried once more, by another worker."""
        self._remove(worker)
        if worker.item is None:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise RuntimeError(f"grading processes for {self.handler} end before they are ready")
            return
        self._num_spares = 1
        batch.deaths[worker.item] = batch.deaths.get(worker.item, 0) + 1
        if batch.deaths[worker.item] < 2:
            batch.waiting.appendleft(worker.item)
            return
        detail = f"the grading process ended with code {worker.process.returncode}, twice"
        batch.outcomes[worker.item] = Outcome(error="died", detail=detail)

    def _overdue(self, worker: _Worker, batch: _Batch) -> None:
        """Kills a worker past its deadline, unless it has not had the time: a busy machine must not flip a verdict."""
        if worker.item is None:
            self._died(worker, batch)
            return
        used = _cpu_seconds(worker.process.pid) - worker.cpu_at_start
        latest = worker.started + _STARVED_FACTOR * self.timeout_seconds
        is_starved = used < 0.9 * self.timeout_seconds and _is_running(worker.process.pid)
        if is_starved and worker.deadline < latest:
            worker.deadline = min(latest, time.monotonic() + self.timeout_seconds - used)
            return
        self._remove(worker)
        self._num_spares = 1
        detail = f"over the time limit of {self.timeout_seconds:g} s"
        batch.outcomes[worker.item] = Outcome(error="timeout", detail=detail)

    def _give_up(self, batch: _Batch) -> None:
        for worker in [worker for worker in self._workers if worker.item is not None]:
            self._remove(worker)
        detail = f"the batch was not graded within {self.batch_seconds:g} s"
        for place in range(len(batch.payloads)):
            batch.outcomes.setdefault(place, Outcome(error="not_run", detail=detail))

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        _kill(worker)


def _kill(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.kill()
    worker.process.wait()


def _kill_all(workers: list[_Worker], owner: int) -> None:
    """Ends all workers, unless this process is a fork of the one that owns them."""
    if os.getpid() != owner:
        return
    while workers:
        _kill(workers.pop())


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
    """The fields of /proc/<pid>/stat after the name; empty where there is no such file."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _is_running(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] == "R"
