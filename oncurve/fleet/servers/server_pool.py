"""Pool of rollout servers: prompts go to servers that are alive and hold the current weights.

No balancer stands in front: one would send each call somewhere else, so that nobody could tell which server has which
weights. The trainer knows every server, sends each prompt to the one with the least to do, and sends it elsewhere when
nothing comes back.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp

from oncurve.core.errors import SamplerError
from oncurve.fleet.servers import protocol
from oncurve.fleet.servers.adapter_proof import AdapterProof
from oncurve.fleet.servers.client import ServerClient, ServerFailed, ServerLost, ServerSlow
from oncurve.fleet.servers.pending_group import PendingGroup
from oncurve.fleet.servers.rollout_server import RolloutServer, State
from oncurve.fleet.settings import Deadlines
from oncurve.fleet.weights.side_thread import aside
from oncurve.fleet.weights.weight_manifest import Manifest

if TYPE_CHECKING:
    from oncurve.fleet.servers.nccl_group import GroupPush
    from oncurve.fleet.weights.weight_stream import Shipment

MAX_FAILURES = 6
"""A prompt that servers answered so often with a failure is not tried again: the fault is not theirs."""
REGISTRY_SECONDS = 0.5
"""Seconds between two searches for new servers."""


class ServerPool:
    """All servers of a run. Everything happens in one event loop, which calls ``open`` first and ``close`` last."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        find: Callable[[], Iterable[str]] = tuple,
        deadlines: Deadlines,
        max_rows: int = 256,
        token: str | None = None,
        address: str | None = None,
        restart: Callable[[str], None] | None = None,
        push: GroupPush | None = None,
        files: Callable[[str], Manifest | None] = lambda label: None,
        repair: Callable[[str], Manifest | None] = lambda label: None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``find`` names servers that came later; ``max_rows`` completions are asked of one server at a time, each
        group whole; ``address`` is where servers fetch weights that do not see the trainer's disk; ``restart`` starts a
        server again that must not be used any more; ``push`` hands weights over without files, of which ``files`` gives
        those of a version, None while it cannot. ``repair`` writes one whole of which a server could not apply the
        differences."""
        self.why_another: Callable[[Mapping[str, Any]], str | None] = lambda model_config: None
        """Reason why a server's configuration is that of another model than the one in training; None if it is not."""
        self.in_flight = False
        """Servers take new weights under the rows that run."""
        self.labels: dict[str, int] = {}
        """The number of each version that was published."""
        self.proofs: dict[str, AdapterProof] = {}
        """The changes that the adapters of the newest versions make, by label."""
        self.deadlines, self.max_rows, self.token, self.address = deadlines, max_rows, token, address
        self.servers: list[RolloutServer] = []
        self.counts: Counter[str] = Counter()
        """Numbers of attempts that were lost, failed, cut off, or of another version."""
        self._urls, self._find, self._restart, self._say = list(urls), find, restart, notify
        self._push, self._files, self._repair = push, files, repair
        self._target: Manifest | None = None
        self._session: aiohttp.ClientSession | None = None
        self._waiting: deque[tuple[asyncio.Future[RolloutServer], PendingGroup | None]] = deque()
        self._tasks: set[asyncio.Task[object]] = set()
        self._changed = asyncio.Event()
        self._ready_at = self._counted_since = time.monotonic()
        self._broken: BaseException | None = None

    async def open(self) -> None:
        """Start to watch over the servers."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        for url in self._urls:
            self.add(url)
        self._start(self._look_for_more())

    async def close(self) -> None:
        """Stop watching; the servers go on as they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._push is not None:
            self._push.close()
        if self._session is not None:
            await self._session.close()

    def add(self, url: str) -> None:
        """Take a server into the pool; it serves when it has the current weights."""
        assert self._session is not None
        client = ServerClient(url, self._session, token=self.token, connect_seconds=self.deadlines.connect_seconds)
        if all(server.url != client.url for server in self.servers):
            server = RolloutServer(client, self)
            self.servers.append(server)
            self._start(server.keep())

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:  # a mistake of ours: nobody may wait for it for ever
            self._broken = task.exception()
            self._check_gone()

    async def _look_for_more(self) -> None:
        while True:
            for url in self._find():
                if all(server.url != url.rstrip("/") for server in self.servers):
                    self._say(f"rollout server {url} joins")
                    self.add(url)
            self._check_gone()
            await asyncio.sleep(REGISTRY_SECONDS)

    def proof(self, label: str) -> AdapterProof | None:
        """The change that the adapter of a version makes; None for whole weights."""
        return self.proofs.get(label)

    def current(self) -> Manifest | None:
        """The version that completions must come from."""
        return self._target

    async def message(self, manifest: Manifest) -> dict[str, object]:
        """The message that announces a version. Raises ServerFailed while there are no files of it."""
        if not manifest.files:
            with_files = await aside(partial(self._files, manifest.label), name="writes-weights")
            if with_files is None:
                raise ServerFailed(f"there are no files of {manifest.label} while the policy trains")
            manifest = with_files
        return manifest.message(address=self.address, token=self.token)

    async def repair(self, manifest: Manifest) -> None:
        """A server could not make the version of what it was told: let it be there whole."""
        repaired = await aside(partial(self._repair, manifest.label), name="writes-weights")
        self.counts["repaired"] += repaired is not None
        if repaired is not None and self._target is not None and self._target.label == repaired.label:
            self._target = repaired

    def moved(self, server: RolloutServer, old: State, why: str) -> None:
        """A server is in another state: say it if it matters to a person, and let it work if it can."""
        if old != server.state and "ready" in (old, server.state) and "syncing" not in (old, server.state):
            self._say(f"rollout server {server.url}: {old} -> {server.state} ({why})")
        elif server.state == "poisoned":
            self._say(f"rollout server {server.url} is poisoned: {why}")
            if self._restart is not None:
                self._restart(server.url)
        if old == "ready" or self.ready:
            self._ready_at = time.monotonic()
        self._hand_out()
        self._changed.set()

    def refused(self, server: RolloutServer, why: str) -> None:
        """Say which server is of no use; the others go on."""
        self._say(f"rollout server {server.url} cannot be used: {why}")
        self._check_gone()

    @property
    def ready(self) -> list[RolloutServer]:
        """Servers with the current weights."""
        return [server for server in self.servers if server.state == "ready"]

    @property
    def asleep(self) -> list[RolloutServer]:
        """Servers that gave their memory back."""
        return [server for server in self.servers if server.state == "asleep"]

    @property
    def versions(self) -> Mapping[str, int] | None:
        """The number of each version of the run by its label, where weights may change under rows; None elsewhere."""
        return self.labels if self.in_flight else None

    async def idle_fraction(self) -> float:
        """Share of the living servers' time since the last call in which they had nothing to sample."""
        now, living = time.monotonic(), [server for server in self.servers if server.state not in ("down", "poisoned")]
        seconds, self._counted_since = now - self._counted_since, now
        busy = sum(server.take_busy_seconds() for server in living)
        return min(1.0, max(0.0, 1.0 - busy / max(1e-9, seconds * len(living))))

    async def rest(self) -> None:
        """Let the servers give the memory of their GPU back until new weights are published, or the same again.

        Raises SamplerError for a server that cannot.
        """
        for server in self.ready:
            try:
                await server.rest_until_needed()
            except ServerFailed as error:
                raise SamplerError(
                    f"{error}. Start it with --enable-sleep-mode, or set rollouts.sleep to false"
                ) from None
            except ServerLost as error:
                server.lose(str(error))

    async def publish(self, manifest: Manifest, shipment: Shipment | None = None) -> int:
        """Let every server take a version; how many have it when the first ones do.

        Consumes the manifest; waits until one server has it and the other living ones had as long again. With a
        ``shipment`` of it, those that can get it without files do so first.

        Raises SamplerError if no server has it in time.
        """
        self._ready_at = started = time.monotonic()
        async with AsyncExitStack() as stack:
            members = await self._hold(stack) if shipment is not None else []
            self._target = manifest
            self.labels[manifest.label] = manifest.version
            for server in self.servers:
                server.is_needed = True
                if server.state == "ready" and not self.in_flight:
                    server.state, server.why = "stale", "there are newer weights"
                if server not in members:
                    server.poke()
            if members and self._push is not None and shipment is not None:
                await self._push.hand_over(members, shipment)
        for server in members:
            server.poke()
        if self.in_flight and self.ready:
            return len(self.ready)
        await self._wait_for_server()
        end = time.monotonic() + (time.monotonic() - started) + 0.25
        while any(server.state in ("stale", "syncing") for server in self.servers):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), end - time.monotonic())
            except TimeoutError:
                break
        return len(self.ready)

    async def _hold(self, stack: AsyncExitStack) -> list[RolloutServer]:
        """The servers that get the next version without files; their watchers wait until it was handed over."""
        members = self._push.candidates(self.servers) if self._push is not None else []
        for server in members:
            await stack.enter_async_context(server.control)
        return self._push.candidates(members) if self._push is not None and members else []

    async def sample(self, jobs: Sequence[PendingGroup], finish: Callable[[int], None] = lambda index: None) -> None:
        """Fill all jobs; ``finish`` hears the index of each when it is filled.

        Raises SamplerError if they cannot be filled; none is ever filled in part and returned.
        """
        tasks = [asyncio.ensure_future(self._fill(job, partial(finish, index))) for index, job in enumerate(jobs)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fill(self, job: PendingGroup, finish: Callable[[], None]) -> None:
        while job.missing:
            server = await self._wait_for_server(job)
            indices = job.missing
            cost = job.cost_tokens
            server.reserve(len(indices), cost)
            try:
                await self._attempt(server, job, indices)
            finally:
                server.reserve(-len(indices), -cost)
                self._hand_out()
        finish()

    async def _attempt(self, server: RolloutServer, job: PendingGroup, indices: list[int]) -> None:
        """Ask one server for what is missing. Where it fails, the indices stay open.

        An attempt has a name. What answers to another name, or after its attempt was given up, is not taken.
        """
        if job.labels is None and (self._target is None or self._target.label != job.label):
            raise SamplerError(f"completions of {job.label} were asked for, and the servers have newer weights by now")
        if not server.takes_keys:
            protocol.refuse_unknown_cuts(job.params)
        name = uuid.uuid4().hex
        body = protocol.request_body(
            job.prompt_ids,
            request_id=name,
            keys=[job.keys[index] for index in indices],
            params=job.params,
            end_ids=job.end_ids,
            takes_keys=server.takes_keys,
            has_adapter=self._target is not None and self._target.adapter is not None,
        )
        limit = self.deadlines.answer_seconds(job.params.room(0))
        read = partial(protocol.read_response, request_id=name, count=len(indices))
        request = asyncio.ensure_future(server.client.generate(body, within=limit, read=read))
        server.tasks.add(request)
        try:
            await asyncio.wait({request})
            if request.cancelled():
                raise ServerLost(f"{server.url} was lost")
            answers = request.result()
        except (ServerSlow, ServerFailed, ValueError, KeyError, TypeError, OverflowError) as error:
            self._count_failure(server, job, error)
            return
        except ServerLost as lost:
            self.counts["lost"] += 1
            if server.state == "ready":
                server.lose(str(lost))
            return
        finally:
            server.tasks.discard(request)
            request.cancel()
        aborted, foreign = job.fill(indices, answers)
        self.counts["aborted"] += aborted
        self.counts["foreign"] += foreign
        if aborted + foreign == len(indices):
            self._count_failure(server, job, ValueError(f"{aborted} completions cut off, {foreign} of other weights"))
        else:
            server.has_done_well()

    def _count_failure(self, server: RolloutServer, job: PendingGroup, error: Exception) -> None:
        self.counts["failed"] += 1
        job.num_failures += 1
        asyncio.get_running_loop().call_later(server.rest() + 0.01, self._hand_out)
        server.poke()
        if job.num_failures >= MAX_FAILURES:
            raise SamplerError(
                f"a prompt of {len(job.prompt_ids)} tokens failed {job.num_failures} times on rollout servers, "
                f"the last time so: {server.url}: {error}"
            )

    async def _wait_for_server(self, job: PendingGroup | None = None) -> RolloutServer:
        """The server with the least to do, as soon as one has room. Earlier steps go first; first come, first served.

        Raises SamplerError when none was ready for too long, or when none ever will be.
        """
        future: asyncio.Future[RolloutServer] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, job))
        self._hand_out()
        self._check_gone()
        try:
            return await future
        finally:
            future.cancel()

    def _hand_out(self) -> None:
        """Give the waiting ones servers with room. The taker's tokens count from the next turn of the loop, so one at
        a time is let go."""
        waiting = [entry for entry in self._waiting if not entry[0].done()]
        self._waiting = deque(sorted(waiting, key=lambda entry: 0 if entry[1] is None else entry[1].order))
        ready = [server for server in self.ready if server.outstanding_rows < self.max_rows and not server.is_resting]
        for entry in self._waiting if ready else ():
            future, job = entry
            if free := [server for server in ready if job is None or job.labels is None or job.allows((server.label,))]:
                best = min(free, key=lambda server: (server.outstanding_tokens, server.outstanding_rows))
                self._waiting.remove(entry)
                future.set_result(best)
                asyncio.get_running_loop().call_soon(self._hand_out)
                return

    def _check_gone(self) -> None:
        """Tell those who wait that there is nothing to wait for."""
        error: BaseException | None = self._broken
        if error is None and (not self._waiting or self.ready):
            return
        silent = time.monotonic() - self._ready_at
        syncing = any(server.state == "syncing" for server in self.servers)
        states = (
            "; ".join(f"{server.url} is {server.state}: {server.why}" for server in self.servers) or "none is known"
        )
        if error is None and self.servers and all(server.is_refused for server in self.servers):
            error = SamplerError(f"no rollout server can be used: {states}")
        elif error is None and silent > self.deadlines.gone_seconds + syncing * self.deadlines.push_seconds:
            error = SamplerError(
                f"no rollout server was ready for {silent:.0f} s (rollouts.deadlines.gone_seconds is "
                f"{self.deadlines.gone_seconds:g}): {states}. Start servers and go on with `oncurve resume`"
            )
        while error is not None and self._waiting:
            if not (future := self._waiting.popleft()[0]).done():
                future.set_exception(error)
