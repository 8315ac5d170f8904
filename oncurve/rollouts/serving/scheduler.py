"""Scheduler of rows: they enter and leave the batch at every token, whoever asks for them.

A server runs it in a thread of its own for all its callers. Episodes run it in the trainer. A row that waits for a
tool leaves the batch; on a CPU it returns with its keys and values, on a GPU as a longer prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from oncurve.errors import SamplerError
from oncurve.model.decode_memory import MOST_ROWS, DecodeCall
from oncurve.model.out_of_memory import Shortage, release
from oncurve.rollouts.base import PolicyView, SamplingParams
from oncurve.rollouts.engine.budget import RowBudget
from oncurve.rollouts.engine.proof import Proof
from oncurve.rollouts.servers.protocol import GeneratedCompletion, GenerateRequest
from oncurve.rollouts.serving.open_batch import BufferSizes, OpenBatch, Request, sample_through_module
from oncurve.rollouts.serving.row_memory import RowMemory

SMALLEST = 64
"""Tokens of prompts and completions for which buffers are made at least; they double as requests need it."""

NO_BATCH = BufferSizes(1, 1, SMALLEST, SMALLEST)


class RowScheduler:
    """Requests with equal settings run together, whenever they come. One with other settings, or too long for the
    buffers, waits until those before it are done; then the batch is made anew."""

    def __init__(self, policy: PolicyView, budget: RowBudget, proof: Proof, *, key: str = "--max-rows") -> None:
        """``key`` is what a user sets to begin with fewer rows."""
        self.policy, self.budget, self.label, self.key = policy, budget, "default", key
        self._proof = proof
        self.memory = RowMemory()
        self._arrived: deque[Request] = deque()
        self._batch: OpenBatch | None = None
        self._sizes = NO_BATCH

    @property
    def has_work(self) -> bool:
        """Something runs or waits."""
        return bool(self._arrived or (self._batch is not None and not self._batch.is_idle))

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self._arrived.append(request)

    def forget(self) -> None:
        """Drop the buffers: the weights are about to change, or the memory is wanted."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()

    def turn(self) -> None:
        """One token for everybody. What breaks is told to those who wait for it."""
        try:
            self._turn_once()
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            self._fail(error)

    def _turn_once(self) -> None:
        """One token for everybody; where memory runs out, everything begins anew, fewer completions at a time.

        Each completion names its own random stream, so what callers get is the same.
        """
        with Shortage() as shortage:
            self._take_arrived()
            if self._batch is not None:
                self._batch.turn()
        if shortage.reason is None:
            return
        batch, self._batch = self._batch, None
        if batch is not None:
            self._arrived.extendleft(request.anew() for request in reversed(batch.requests))
        del batch
        self._shrink(self._sizes.rows, shortage.reason, self._call(self._sizes))

    def _shrink(self, rows: int, reason: str, call: DecodeCall) -> None:
        """Raises SamplerError if there was one completion; what others ask for later may be smaller."""
        release()
        try:
            self.budget.shrink(rows, reason, call, key=self.key)
        except SamplerError:
            self._sizes, self.budget.limit = NO_BATCH, None
            raise

    def _call(self, sizes: BufferSizes) -> DecodeCall:
        """What a batch of these sizes is to the rule for memory: any number of requests."""
        return DecodeCall(
            num_prompts=MOST_ROWS,
            group_size=1,
            is_open=True,
            prompt_tokens=sizes.prompt_tokens,
            completion_tokens=sizes.completion_tokens,
            cuts=True,
        )

    def cut(self, chosen: Callable[[Request], bool]) -> None:
        """Cut off what was chosen; it is given as far as it came."""
        if self._batch is not None:
            self._batch.abort(chosen)
        for request in [request for request in self._arrived if chosen(request)]:
            self._arrived.remove(request)
            for place in range(request.asked.count):
                request.give(place, GeneratedCompletion([], [], "abort", ()))

    def _take_arrived(self) -> None:
        """Let requests join the batch, in their order, up to the first that does not fit."""
        while self._arrived:
            request = self._arrived[0]
            if not self._fits(request):
                if self._batch is not None and not self._batch.is_idle:
                    return
                if not self._make_batch(request):
                    self._sample_whole()
                    continue
            assert self._batch is not None
            self._batch.add(self._arrived.popleft())

    def _fits(self, request: Request) -> bool:
        batch = self._batch
        return (
            batch is not None
            and _settings(request.asked) == (batch.params, batch.end_ids)
            and len(request.prompt.token_ids) <= batch.sizes.prompt_tokens
            and _positions(request) <= batch.sizes.completion_tokens
        )

    def _make_batch(self, request: Request) -> bool:
        """Buffers that hold the request and all before it; False for a model whose layers we do not compute."""
        with torch.inference_mode(), self.policy.compute():
            backbone = self._proof.backbone(self.policy)
        if backbone is None:
            return False
        self._batch = None  # its buffers are free before the new ones are made
        old = self._sizes
        sizes = BufferSizes(
            1,
            1,
            _double_until(old.prompt_tokens, len(request.prompt.token_ids)),
            _double_until(old.completion_tokens, _positions(request)),
        )
        with self.policy.compute():
            rows = self.budget.rows(self.policy.model, backbone, self._call(sizes))
        self._sizes = replace(sizes, rows=rows, prompts=rows)
        params, end_ids = _settings(request.asked)
        self._batch = OpenBatch(self.policy, backbone, params, end_ids, self._sizes, self.label, self.memory)
        return True

    def _sample_whole(self) -> None:
        """The first request and those that are like it, from beginning to end."""
        first, together, rows = self._arrived[0].asked, [], 0
        call = DecodeCall(
            num_prompts=len(self._arrived),
            group_size=first.count,
            prompt_tokens=max(len(request.asked.token_ids) for request in self._arrived),
            completion_tokens=first.params.max_completion_tokens,
        )
        with self.policy.compute():
            most = self.budget.rows(self.policy.model, None, call)
        while self._arrived and self._arrived[0].asked.count == first.count:
            asked = self._arrived[0].asked
            is_alike = (asked.params, asked.end_ids) == (first.params, first.end_ids)
            if together and (rows + asked.count > most or not is_alike):
                break
            together.append(self._arrived.popleft())
            rows += asked.count
        share = min(first.count, most)
        try:
            with Shortage() as shortage:
                sample_through_module(self.policy, together, self.label, share=share)
            if shortage.reason is not None:
                self._shrink(share * len(together), shortage.reason, call)
                self._arrived.extendleft(request.anew() for request in reversed(together))
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            _refuse(together, error)

    def _fail(self, error: Exception) -> None:
        """Tell everybody in the batch that it broke, and begin a new one."""
        batch, self._batch = self._batch, None
        if batch is not None:
            _refuse(batch.requests, error)
        elif self._arrived:
            _refuse([self._arrived.popleft()], error)


def _refuse(requests: list[Request], error: Exception) -> None:
    for request in requests:
        if not request.future.done():
            known = isinstance(error, SamplerError)
            request.future.set_exception(
                error if known else SamplerError(f"sampling failed: {type(error).__name__}: {error}")
            )


def _settings(asked: GenerateRequest) -> tuple[SamplingParams, tuple[int, ...]]:
    """What rows must have in common to run together; how long they may become is each row's own."""
    return replace(asked.params, max_completion_tokens=1), asked.end_ids


def _positions(request: Request) -> int:
    """Positions behind its prompt that a completion may fill."""
    return len(request.own) + request.asked.params.max_completion_tokens


def _double_until(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size
