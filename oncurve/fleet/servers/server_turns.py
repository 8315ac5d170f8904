"""Turns over rollout servers: each is a request of its own, to whichever server has room."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

from oncurve.core.records import SamplingParams
from oncurve.fleet.servers.pending_group import PendingGroup
from oncurve.fleet.servers.server_pool import ServerPool
from oncurve.fleet.weights.weight_manifest import Manifest
from oncurve.sample.event_loop import EventLoopThread
from oncurve.sample.turns import Ask


class ServerTurns:
    """Servers sample in processes of their own; what they give comes back through ``post``."""

    def __init__(
        self,
        loop: EventLoopThread,
        pool: ServerPool,
        params: SamplingParams,
        *,
        weights: Manifest,
        end_ids: tuple[int, ...],
        post: Callable[[Callable[[], None]], None],
        stack: ExitStack,
    ) -> None:
        """Turns of these weights, or of newer ones where those may change at any time. ``stack`` is let go when the
        turns are closed."""
        self._loop, self._pool, self._params, self._weights = loop, pool, params, weights
        self._end_ids, self._post, self._stack = end_ids, post, stack
        self._open: set[Future[None]] = set()

    def ask(self, ask: Ask) -> None:
        """Send it to a server; turns that begin with the same tokens go together."""
        params = self._params.limited_to(ask.max_tokens)
        weights = self._weights
        job = PendingGroup(
            weights.label,
            ask.token_ids,
            list(ask.keys),
            params,
            self._end_ids,
            labels=self._pool.versions,
            oldest=weights.version,
        )
        future = self._loop.start(self._pool.sample([job]))
        self._open.add(future)
        future.add_done_callback(lambda future: self._post(partial(self._deliver, future, job, ask)))

    def _deliver(self, future: Future[None], job: PendingGroup, ask: Ask) -> None:
        """Hand a request's turns on, in the thread that samples. Raises SamplerError if it failed."""
        if future not in self._open:
            return
        self._open.discard(future)
        future.result()
        for index, completion in enumerate(job.completions):
            spans = () if job.labels is None else completion.dated(job.labels)
            ask.deliver(index, (list(completion.token_ids), list(completion.logprobs), completion.finish_reason), spans)

    def advance(self) -> bool:
        """Nothing happens in this thread."""
        return False

    def close(self) -> None:
        """Give up requests that are under way."""
        left, self._open = self._open, set()
        for future in left:
            future.cancel()
        self._stack.close()
