"""Scheduler of rows: a batch into which requests enter and from which they leave at every token, whoever asks for them.

A step's groups are requests that are all there when it begins. Turns of episodes and callers of a server come whenever
they like. A row that waits for a tool leaves the batch; on a CPU it returns with its keys and values, on a GPU as a
longer prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from oncurve.core.decoder import Decoders
from oncurve.core.errors import SamplerError
from oncurve.core.records import SamplingParams
from oncurve.core.requests import Request
from oncurve.core.sampler import PolicyView, check_ids
from oncurve.model.decode_memory import MOST_ROWS, DecodeCall
from oncurve.model.out_of_memory import Shortage, release
from oncurve.sample.row_batch import RowBatch
from oncurve.sample.row_memory import RowMemory

SMALLEST = 64
"""Tokens of prompts and completions for which buffers are made at least where requests may come later; they double as
requests need it."""


class RowScheduler:
    """Requests with equal settings run together, whenever they come. One with other settings, or too long for the
    buffers, waits until those before it are done; then the batch is made anew."""

    def __init__(
        self,
        policy: PolicyView,
        decoders: Decoders,
        *,
        is_closed: bool = False,
        shares_weights: bool = False,
        version: str | None = None,
        key: str = "rollouts.max_rows",
    ) -> None:
        """``is_closed``: all requests are there before the first turn, with equal settings and equally many completions
        each, so that buffers are made for just these.

        ``shares_weights``: other threads read the weights meanwhile. ``version`` names them, where they may change
        under rows that run (``renew``). ``key`` is what a user sets to begin with fewer
        rows.
        """
        self.policy, self.decoders, self.key = policy, decoders, key
        self.is_closed, self.shares_weights = is_closed, shares_weights
        self.version = version
        self._memory = RowMemory()
        self._arrived: deque[Request] = deque()
        self._batch: RowBatch | None = None
        self._tokens = (SMALLEST, SMALLEST)
        """Lengths of prompts and of completions for which buffers are made where requests may come later."""
        self._call, self._rows = self._open_call(), 1
        """The last use of memory, and its number of completions at a time."""

    @property
    def has_work(self) -> bool:
        """Something runs or waits."""
        return bool(self._arrived or (self._batch is not None and not self._batch.is_idle))

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. Raises SamplerError for a token that the model does not have."""
        check_ids(self.policy.model, request.token_ids)
        self._arrived.append(request)

    def forget(self) -> None:
        """Drop the buffers: the weights are about to change, or the memory is wanted."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()

    def expect(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Make buffers for so many from the beginning, and give up nothing that a row goes on from later."""
        self._tokens, self._memory = (prompt_tokens, completion_tokens), RowMemory(2**62)

    def renew(self, version: str) -> None:
        """The weights have changed, and rows go on with them."""
        self.version = version
        if self._batch is not None:
            with self._arithmetic(), self.policy.compute():
                self._batch.renew(version)

    def turn(self) -> None:
        """One token for everybody; where memory runs out, everything begins anew, fewer completions at a time.

        Each completion names its own random stream, so what callers get is the same. Raises SamplerError where there is
        not enough memory for one.
        """
        with self._arithmetic():
            self._turn()

    def run(self) -> None:
        """Turns until nothing runs or waits."""
        with self._arithmetic():
            while self.has_work:
                self._turn()

    def cut(self, chosen: Callable[[Request], bool]) -> None:
        """Cut off what was chosen; it is given as far as it came."""
        if self._batch is not None:
            self._batch.abort(chosen)
        for request in [request for request in self._arrived if chosen(request)]:
            self._arrived.remove(request)
            for place in range(request.count):
                request.give(place, ([], [], "abort"))

    def broken(self) -> list[Request]:
        """The requests that an error raised by ``turn`` concerns; they are not sampled any more."""
        batch, self._batch = self._batch, None
        if batch is not None:
            return batch.requests
        return [self._arrived.popleft()] if self._arrived else []

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        with torch.inference_mode(), torch.autocast(self.policy.model.device.type, enabled=False):
            yield

    def _turn(self) -> None:
        with Shortage() as shortage:
            self._take_arrived()
            if self._batch is not None:
                self._batch.turn()
        if shortage.reason is not None:
            batch, self._batch = self._batch, None
            if batch is not None:
                self._arrived.extendleft(request.again() for request in reversed(batch.requests))
            del batch
            self._shrink(shortage.reason)

    def _shrink(self, reason: str) -> None:
        """Raises SamplerError if there was one completion; what others ask for later may be smaller."""
        release()
        try:
            self.decoders.shrink(self._rows, reason, self._call, key=self.key)
        except SamplerError:
            self._tokens = (SMALLEST, SMALLEST)
            self.decoders.forget_limit()
            raise

    def _closed_call(self) -> DecodeCall:
        """All requests with equally many completions, to the rule for memory."""
        first = self._arrived[0]
        params = first.params
        return DecodeCall(
            num_prompts=len(self._arrived),
            group_size=first.count,
            prompt_tokens=max(len(request.token_ids) for request in self._arrived),
            completion_tokens=params.max_completion_tokens,
            cuts=params.cuts,
        )

    def _open_call(self) -> DecodeCall:
        """Any number of requests, to the rule for memory."""
        prompt_tokens, completion_tokens = self._tokens
        return DecodeCall(
            num_prompts=max(MOST_ROWS, self.decoders.max_rows or 0),
            group_size=1,
            is_open=True,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cuts=True,
        )

    def _take_arrived(self) -> None:
        """Let requests join the batch, in their order, up to the first that does not fit."""
        while self._arrived:
            request = self._arrived[0]
            if not self._fits(request):
                if self._batch is not None and not self._batch.is_idle:
                    return
                self._make_batch()
            assert self._batch is not None
            self._batch.add(self._arrived.popleft())

    def _fits(self, request: Request) -> bool:
        batch = self._batch
        return (
            batch is not None
            and _settings(request) == (batch.params, batch.end_ids)
            and len(request.prompt.token_ids) <= batch.sizes.prompt_tokens
            and request.positions <= batch.sizes.completion_tokens
        )

    def _make_batch(self) -> None:
        """Buffers that hold the first request and, where others may come later, all before it."""
        self._batch, request = None, self._arrived[0]  # its buffers are free before the new ones are made
        if self.is_closed:
            self._call = self._closed_call()
        else:
            grown = max if self.decoders.is_exact else _double_until
            prompt_tokens, completion_tokens = self._tokens
            self._tokens = (
                grown(prompt_tokens, len(request.prompt.token_ids)),
                grown(completion_tokens, request.positions),
            )
            self._call = self._open_call()
        params, end_ids = _settings(request)
        with self.policy.compute():
            plan = self.decoders.plan(
                self.policy, self._call, end_ids, is_shared=self.shares_weights, version=self.version
            )
            self._rows = plan.sizes.rows
            decoder = plan.make()
        self._batch = RowBatch(
            self.policy,
            decoder,
            params,
            end_ids,
            plan.sizes,
            self._memory,
            is_closed=self.is_closed,
            version=self.version,
        )


def _settings(request: Request) -> tuple[SamplingParams, tuple[int, ...]]:
    """The settings that rows must have in common to run together; how long they may become is each row's own."""
    return replace(request.params, max_completion_tokens=1), request.end_ids


def _double_until(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size
