"""The thread that runs a server's model, for all callers, and pauses for new weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from oncurve.core.errors import SamplerError
from oncurve.core.requests import Request, Sampled
from oncurve.core.sampler import PolicyView
from oncurve.core.scheduler import RowScheduler
from oncurve.fleet.servers.protocol import GeneratedCompletion, GenerateRequest
from oncurve.model.decode_proof import Proof
from oncurve.model.layer_decoders import LayerDecoders
from oncurve.model.row_budget import RowBudget
from oncurve.policy.forward import row_logprobs
from oncurve.policy.lora_forward import adapters_off


class Paused(Exception):
    """No request is taken now."""


@dataclass(frozen=True, eq=False)
class SubmittedRequest:
    """A request on its way, and what its caller waits for."""

    request: Request
    future: Future[list[GeneratedCompletion]]


class Sampling:
    """Samples in a thread of its own, from the weights of one version at a time."""

    def __init__(
        self, policy: PolicyView, *, max_rows: int | None = None, label: str = "default", cuda_graphs: bool = True
    ) -> None:
        """At most ``max_rows`` completions run at one time; None: what fits into a GPU, elsewhere the usual number."""
        self.policy, self.label = policy, label
        decoders = LayerDecoders(RowBudget(max_rows), Proof(on_gpu=cuda_graphs))
        self.scheduler = RowScheduler(policy, decoders, shares_weights=True, version=label, key="--max-rows")
        self._work: dict[Request, SubmittedRequest] = {}
        """All that has no answer yet."""
        self._dropped: set[Request] = set()
        self._reading = threading.Lock()
        self._changed = threading.Condition()
        self._is_paused = self._is_closed = self._is_standing = self._is_frozen = False
        self._ends_running = False
        self._num_running = 0
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """The thread has not died of a mistake."""
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Completions of requests that have no answer yet."""
        return self._num_running

    def submit(
        self, generate_request: GenerateRequest, *, on_tokens: Callable[[list[int]], object] | None = None
    ) -> SubmittedRequest:
        """Take a request; the future gives its completions. Raises Paused while nothing is taken.

        ``on_tokens`` hears after each token, in the thread that samples, of all tokens of a single completion so far.
        Raises ValueError for a token that the model has no embedding of.
        """
        self._check_ids(generate_request.token_ids)
        drawn = generate_request.keys or np.random.default_rng().integers(
            0, 2**63, generate_request.count, dtype=np.uint64
        )
        keys = np.array(drawn, dtype=np.uint64)
        future: Future[list[GeneratedCompletion]] = Future()
        future.set_running_or_notify_cancel()  # a caller that goes away must not touch it

        def done(sampled: list[Sampled]) -> None:
            del self._work[request]
            future.set_result(
                [self._completion(request, index, completion) for index, completion in enumerate(sampled)]
            )

        request = Request(
            generate_request.token_ids,
            keys,
            generate_request.params,
            generate_request.end_ids,
            on_done=done,
            on_tokens=on_tokens,
        )
        work = SubmittedRequest(request, future)
        with self._changed:
            if self._is_paused or self._is_closed:
                raise Paused
            self._is_standing = self._is_frozen and self._is_standing
            self._work[request] = work
            self.scheduler.add(request)
            self._num_running += generate_request.count
            self._changed.notify_all()
        future.add_done_callback(lambda _: self._count_down(generate_request.count))
        return work

    def _completion(self, request: Request, index: int, sampled: Sampled) -> GeneratedCompletion:
        spans = [span for span in request.versions.get(index, ()) if span[0] < len(sampled[0])] or [(0, self.label)]
        starts, labels = zip(*spans, strict=True)
        return GeneratedCompletion(*sampled, labels, starts)

    def _count_down(self, count: int) -> None:
        with self._changed:
            self._num_running -= count

    def drop(self, work: SubmittedRequest) -> None:
        """Nobody waits for this any more."""
        with self._changed:
            self._is_standing = self._is_frozen and self._is_standing
            self._dropped.add(work.request)
            self._changed.notify_all()

    def pause(self, *, abort: bool) -> None:
        """Take nothing more, and wait until nothing runs; ``abort`` cuts off what does."""
        with self._changed:
            self._is_standing = self._is_standing and not self._is_frozen
            self._is_paused, self._is_frozen = True, False
            self._ends_running = self._ends_running or abort
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_standing or not self._thread.is_alive())

    def freeze(self) -> None:
        """Stand still between two tokens, with the rows that run; requests wait."""
        with self._changed:
            self._is_frozen = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_standing or not self._thread.is_alive())

    def resume(self) -> None:
        """Take requests again, and go on."""
        with self._changed:
            self._is_paused = self._ends_running = self._is_frozen = False
            self._changed.notify_all()

    def change(self, apply: Callable[[], None], label: str) -> None:
        """Let other weights take the place of these, while nothing runs, or under rows that stand still.

        Raises SamplerError if it does neither.
        """
        with self._changed:
            if not ((self._is_paused or self._is_frozen) and self._is_standing):
                raise SamplerError("weights cannot change while the server samples; pause it first")
            with self._reading:
                apply()
            self.label = label
            if not self._is_frozen:
                self.scheduler.forget()
            self.scheduler.renew(label)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p of every token but the first, given those before it, in the caller's thread.

        Raises ValueError for a token that the model has no embedding of.
        """
        self._check_ids(token_ids)
        model = self.policy.model
        ids = torch.tensor(token_ids, device=model.device)
        with self._reading, torch.inference_mode(), self.policy.compute():
            return row_logprobs(model, ids).tolist()

    def score_base(self, token_ids: Sequence[int]) -> list[float]:
        """The same without the adapter, while rows that run stand still: they compute with the same modules.

        Raises ValueError as ``score`` does.
        """
        with self._changed:
            was_frozen, self._is_frozen = self._is_frozen, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_standing or not self._thread.is_alive())
        try:
            with adapters_off(self.policy.model):
                return self.score(token_ids)
        finally:
            with self._changed:
                self._is_frozen = was_frozen
                self._changed.notify_all()

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        size = self.policy.model.config.get_text_config().vocab_size
        if beyond := [token for token in token_ids if not 0 <= token < size]:
            raise ValueError(
                f"token {beyond[0]} is none of the model's: its embedding has the tokens 0 to {size - 1}. Is the "
                f"tokenizer that of another model?"
            )

    def close(self) -> None:
        """End the thread when what runs is done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_standing = self._is_frozen or not self._has_work()
                if self._is_standing:
                    self._changed.notify_all()
                    if self._is_closed:
                        return
                    self._changed.wait()
                    continue
                dropped, self._dropped = self._dropped, set()
                ends_running = self._ends_running
            self._turn(dropped, ends_running)

    def _has_work(self) -> bool:
        return bool(self._dropped) or self.scheduler.has_work

    def _turn(self, dropped: set[Request], ends_running: bool) -> None:
        """One token for everybody. What breaks is told to those who wait for it."""
        try:
            if ends_running:
                self.scheduler.cut(lambda request: True)
            elif dropped:
                self.scheduler.cut(lambda request: request in dropped)
            self.scheduler.turn()
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            known = isinstance(error, SamplerError)
            failure = error if known else SamplerError(f"sampling failed: {type(error).__name__}: {error}")
            for request in self.scheduler.broken():
                self._work.pop(request).future.set_exception(failure)
