"""State of one rollout server, and the task that watches it and updates its weights."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

from oncurve.core.errors import SamplerError
from oncurve.fleet.servers import protocol
from oncurve.fleet.servers.adapter_proof import AdapterProof, AdapterShare, mismatch
from oncurve.fleet.servers.client import Backoff, Report, ServerClient, ServerFailed, ServerLost, ServerSlow
from oncurve.fleet.settings import Deadlines
from oncurve.fleet.weights.weight_manifest import Manifest

State = Literal["down", "stale", "syncing", "ready", "asleep", "poisoned"]
"""down: no sign of life. stale: alive, with other weights than the current ones. syncing: taking them. ready: samples.
asleep: it gave its memory back until it is wanted. poisoned: it failed while new weights took the place of old ones,
and is left alone until it was started again."""
DEFAULT = "default"
"""The label that vLLM reports before it was given weights."""
DROPS, KEEPS = 2, 1
"""Levels of sleep. Weights are dropped where new ones come when it wakes, and kept in the machine's memory where only
an adapter comes."""


class FleetState(Protocol):
    """The pool as one of its servers sees it."""

    deadlines: Deadlines
    in_flight: bool
    """Servers take new weights under the rows that run."""
    labels: dict[str, int]
    """The number of each version that was published."""

    def current(self) -> Manifest | None:
        """The version that completions must come from; None before the first."""
        ...

    async def message(self, manifest: Manifest) -> dict[str, object]:
        """The message that announces a version. Raises ServerFailed while there are no files of it."""
        ...

    async def repair(self, manifest: Manifest) -> None:
        """A server could not make the version of what it was told: let it be there whole."""
        ...

    def proof(self, label: str) -> AdapterProof | None:
        """The change that the adapter of a version makes; None for whole weights."""
        ...

    def moved(self, server: RolloutServer, old: State, why: str) -> None:
        """The server is in another state now."""
        ...

    def refused(self, server: RolloutServer, why: str) -> None:
        """The server answers, and cannot be used as it is."""
        ...

    @property
    def why_another(self) -> Callable[[Mapping[str, Any]], str | None]:
        """The reason why a configuration is that of another model than the one in training."""
        ...


class RolloutServer:
    """One server: what it says of itself decides its state, never what was sent to it.

    A server that missed an update, was started again, or comes back from the dead reports another label than the
    current one, and serves nothing until it reports that.
    """

    def __init__(self, client: ServerClient, fleet: FleetState) -> None:
        self.client, self.fleet, self.url = client, fleet, client.url
        self.state: State = "down"
        self.why = "not yet asked"
        self.takes_keys = False
        self.is_refused = False
        """It answers, and refuses what we ask: waiting for it does not help."""
        self.outstanding_tokens = self.outstanding_rows = 0
        """Tokens and rows of requests that were sent and not answered."""
        self._busy_seconds, self._busy_since = 0.0, 0.0
        self.control = asyncio.Lock()
        """Held while the server's weights are changed; its watcher waits meanwhile."""
        self.label = ""
        """The version that it reported last."""
        self.life = 0
        """Another number whenever what was agreed with it, such as a group, may be forgotten."""
        self.declined: str | None = None
        """The reason why it gets weights as files alone until it is started again."""
        self.sync_seconds = self.stood_seconds = 0.0
        """Seconds until it had the last version that it fetched; of these, the seconds in which it stood still."""
        self.is_asleep = self.is_needed = False
        self.adapter: AdapterShare | None = None
        """The part of the adapter that it has, as it was proven last."""
        self._proven = ""
        """The version whose adapter it has, beyond doubt."""
        self._base_scores: list[float] | None = None
        """The log-probabilities of the stored tokens without an adapter."""
        self.tasks: set[asyncio.Task[object]] = set()
        """Requests that end when the server is lost: a dead server's open connection would keep them for ever."""
        self._instance: str | None = None
        self._is_paused = self._is_compared = False
        self._corrupt_at: str | None = None
        self._last_sign = 0.0
        self._wake = asyncio.Event()
        self._backoff, self._resting = Backoff(), Backoff()
        self._rests_until = 0.0

    def reserve(self, rows: int, tokens: int) -> None:
        """More is asked of it; or less, with negative numbers."""
        was_idle, now = not self.outstanding_rows, time.monotonic()
        self.outstanding_rows += rows
        self.outstanding_tokens += tokens
        if was_idle:
            self._busy_since = now
        elif not self.outstanding_rows:
            self._busy_seconds += now - self._busy_since

    def take_busy_seconds(self) -> float:
        """The time in which it had something to sample, since this was asked last."""
        now = time.monotonic()
        seconds = self._busy_seconds + (now - self._busy_since if self.outstanding_rows else 0.0)
        self._busy_seconds, self._busy_since = 0.0, now
        return seconds

    def rest(self) -> float:
        """It failed, and others are asked for some seconds, more each time: who fails at once has the least to do."""
        seconds = self._resting.next()
        self._rests_until = time.monotonic() + seconds
        return seconds

    def has_done_well(self) -> None:
        """It answered as it should."""
        self._resting.reset()

    @property
    def is_resting(self) -> bool:
        """It failed a moment ago."""
        return time.monotonic() < self._rests_until

    def poke(self) -> None:
        """Look at the server again at once."""
        self._wake.set()

    def lose(self, why: str) -> None:
        """Nothing comes from it any more: its requests go to others."""
        self._forget()
        self._move("down", why)
        for task in list(self.tasks):
            task.cancel()
        self.poke()

    async def keep(self) -> None:
        """Watch over the server until cancelled."""
        while True:
            self._wake.clear()
            async with self.control:
                pause = await self._look()
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                continue

    async def _look(self) -> float:
        """Ask the server how it is and do what follows from that; seconds until the next time."""
        limits = self.fleet.deadlines
        try:
            report = await self.client.report(within=limits.silent_seconds / 2)
            if not self.label and report.label != DEFAULT and not report.takes_keys:  # of a trainer before this one
                self.is_asleep = self.is_needed = await self.client.is_sleeping(within=limits.silent_seconds / 2)
        except ServerSlow as slow:
            if time.monotonic() - self._last_sign < limits.silent_seconds:
                return 0.0
            return self._gone(str(slow))
        except (ServerLost, ServerFailed) as error:
            return self._gone(str(error))
        except SamplerError as refused:
            return self._gone(str(refused), is_refused=True)
        self._last_sign = time.monotonic()
        self._know(report)
        return await self._follow(report)

    def _gone(self, why: str, *, is_refused: bool = False) -> float:
        if self.state == "poisoned":
            self._corrupt_at = None  # what comes back was started again
        if self.state != "down":
            self.lose(why)
        self.why = why
        self._refuse(why if is_refused else None)
        self._wake.clear()
        return self._backoff.next()

    def _know(self, report: Report) -> None:
        """Take note of a server that was started again."""
        if report.instance != self._instance:
            if self._instance is not None and self.state == "ready":
                self.lose("it was started again")
            self._instance, self._corrupt_at, self._is_paused = report.instance, None, False
        if self.label not in ("", report.label):
            self._forget()
        self.takes_keys, self.label = report.takes_keys, report.label

    def _forget(self) -> None:
        """It may be another process by now."""
        self.life += 1
        self.is_asleep = self._is_compared = False
        self.declined = self._base_scores = None
        self._proven = ""

    def _refuse(self, why: str | None) -> None:
        """Note, and say once, that it cannot be used as it is; None: that it can."""
        was_refused, self.is_refused = self.is_refused, why is not None
        if why is not None and not was_refused:
            self.fleet.refused(self, why)

    async def _compare(self) -> None:
        """Raises SamplerError if it was started with another model than the one in training."""
        model_config = await self.client.model_config(
            within=self.fleet.deadlines.push_seconds, takes_keys=self.takes_keys
        )
        if why := self.fleet.why_another(model_config) if model_config else None:
            raise SamplerError(f"it has another model than the one in training: {why}. Start it with that model")
        self._is_compared = True

    async def _follow(self, report: Report) -> float:
        target, limits = self.fleet.current(), self.fleet.deadlines
        if self._corrupt_at is not None and report.label == self._corrupt_at:
            self._move("poisoned", self.why)
            return limits.heartbeat_seconds
        self._corrupt_at = None
        try:
            if report.is_draining:
                self._move("stale", "it is ending")
            elif target is None:
                self._move("stale", f"has {report.label}")
            elif self.is_asleep and not self.is_needed:
                self._move("asleep", "its GPU trains")
            elif self._goes_on(report.label, target.label):
                await self._sync_in_flight(target)
                return 0.0
            elif report.label != target.label or self.is_asleep:
                if self.state == "ready":
                    self._move("stale", f"has {report.label}: started again, or given weights by another trainer")
                await self._sync(target, report.label)
                return 0.0
            else:
                if self._is_paused:
                    await self._resume()
                await self._prove(target)
                self._move("ready", f"has {report.label}")
                self._backoff.reset()
            self._refuse(None)
        except (ServerLost, ServerFailed, SamplerError) as error:
            self._move("stale" if isinstance(error, ServerFailed) else "down", str(error))
            self._refuse(str(error) if isinstance(error, SamplerError) else None)
            return self._backoff.next()
        return limits.heartbeat_seconds

    async def _sync(self, target: Manifest, old: str) -> None:
        """Hand over the current weights as files. Its next report tells whether it has them."""
        limit = self.fleet.deadlines.push_seconds
        if not self._is_compared:
            await self._compare()
        message, begin = await self.fleet.message(target), time.monotonic()
        self._move("syncing", f"has {old}, takes {target.label}")
        await self.pause(self.why)
        try:
            await self.client.start_update(within=limit)
            await self.client.send_update(message, within=limit)
        except ServerFailed:
            if not self.is_asleep:  # its model is as it was
                await self._resume()
            await self.fleet.repair(target)
            raise
        self.life += 1  # a group that it was in is left with that
        await self.adopt(target.label)
        self.sync_seconds = self.stood_seconds = time.monotonic() - begin

    async def _prove(self, target: Manifest) -> None:
        """Raises SamplerError for a server that has a part of the current adapter only."""
        proof = self.fleet.proof(target.label)
        if proof is None or self._proven == target.label:
            return
        if self._base_scores is None:
            self._base_scores = await self._score(proof, adapter=False)
        self.adapter = proof.share(await self._score(proof, adapter=True), self._base_scores)
        if self.adapter.is_wrong:
            raise SamplerError(mismatch(self.adapter, target.label))
        self._proven = target.label

    async def _score(self, proof: AdapterProof, *, adapter: bool) -> list[float]:
        body = protocol.score_body(proof.token_ids, request_id=secrets.token_hex(8), adapter=adapter)
        read = partial(protocol.read_scores, token_ids=proof.token_ids)
        try:
            return await self.client.generate(body, within=self.fleet.deadlines.push_seconds, read=read)
        except (ValueError, KeyError, TypeError) as error:
            raise ServerFailed(f"{self.url} does not tell log-probabilities: {error}") from None

    def _goes_on(self, label: str, target: str) -> bool:
        """It has older weights of this run, with which its rows may go on until they are changed."""
        is_ready = self.fleet.in_flight and self.state == "ready"
        return is_ready and label != target and label in self.fleet.labels

    async def _sync_in_flight(self, target: Manifest) -> None:
        """The same while its rows run: they stand still only until the new weights, which it has by then, are in place.

        vLLM may not be told of an update while it samples, so that its rows stand still for all of it.
        """
        limit = self.fleet.deadlines.push_seconds
        message, begin = await self.fleet.message(target), time.monotonic()
        stood = begin
        try:
            if not self.takes_keys:
                stood = await self._freeze()
            await self.client.start_update(within=limit)
            await self.client.send_update(message, within=limit)
            if self.takes_keys:
                stood = await self._freeze()
        except ServerFailed:
            if self._is_paused:
                await self._resume()
            await self.fleet.repair(target)
            raise
        try:
            await self.client.finish_update(target.label, within=limit)
        except (ServerFailed, ServerSlow) as error:
            self.mark_corrupt(str(error))
            return
        self.label = target.label
        await self._resume()
        self.sync_seconds, self.stood_seconds = time.monotonic() - begin, time.monotonic() - stood
        self.fleet.moved(self, self.state, self.why)

    async def _freeze(self) -> float:
        """Let its rows stand still; since when."""
        begin = time.monotonic()
        await self.client.pause(within=self.fleet.deadlines.push_seconds, keeps=True)
        self._is_paused = True
        return begin

    async def pause(self, why: str) -> None:
        """Before new weights: it samples nothing, and has room for them."""
        limit = self.fleet.deadlines.push_seconds
        self._move("syncing", why)
        self._is_paused = True
        if self.is_asleep:
            await self.client.wake("weights", within=limit)
        else:
            await self.client.pause(within=limit)

    async def adopt(self, label: str) -> None:
        """After new weights: they take the place of the old ones, and it samples again.

        A server that fails at the first is poisoned, without an error. Raises ServerFailed, ServerLost for the second.
        """
        limit = self.fleet.deadlines.push_seconds
        try:
            await self.client.finish_update(label, within=limit)
        except (ServerFailed, ServerSlow) as error:
            self.mark_corrupt(str(error))
            return
        self.label = label
        if self.is_asleep:
            await self.client.wake("kv_cache", within=limit)
            self.is_asleep = False
        await self._resume()

    def mark_corrupt(self, why: str) -> None:
        """Its weights cannot be told any more: it is not used until it is started again."""
        self._corrupt_at = self.label
        self._forget()
        self._move("poisoned", f"its weights may be half old and half new; start it again. {why}")

    async def release(self, why: str) -> None:
        """Give up an exchange before it touches the weights. A failure of this is its watcher's business."""
        self._move("stale", why)
        try:
            if not self.is_asleep:
                await self._resume()
        except (ServerLost, ServerFailed, SamplerError) as error:
            self.why = str(error)

    async def rest_until_needed(self) -> None:
        """Give the memory of its GPU to the trainer. Raises ServerLost, ServerFailed, SamplerError."""
        limit = self.fleet.deadlines.push_seconds
        async with self.control:
            if self.state != "ready":
                return
            self._is_paused, self.is_needed = True, False
            await self.client.pause(within=limit)
            current = self.fleet.current()
            keeps = current is not None and current.adapter is not None
            await self.client.sleep(KEEPS if keeps else DROPS, within=limit)
            self.is_asleep = True
            self._move("asleep", "its GPU trains")

    async def _resume(self) -> None:
        await self.client.resume(within=self.fleet.deadlines.push_seconds)
        self._is_paused = False

    def _move(self, state: State, why: str) -> None:
        old, self.state, self.why = self.state, state, why
        if old != state:
            self.fleet.moved(self, old, why)
