"""Continuous batching over requests: rows enter and leave at every token.

Each row knows its request, its place in it and its random stream, so that it does not matter who else is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from oncurve.model.decoding import Decoder
from oncurve.model.weights import Backbone, head_matrix
from oncurve.records import FinishReason
from oncurve.rollouts.base import PolicyView, SamplingParams
from oncurve.rollouts.engine.fused import FusedSampling
from oncurve.rollouts.engine.generic import ModuleSampling
from oncurve.rollouts.engine.rows import ADMIT_SHARE, ends
from oncurve.rollouts.servers.protocol import GeneratedCompletion, GenerateRequest


@dataclass(eq=False)
class Request:
    """What one caller waits for."""

    asked: GenerateRequest
    keys: np.ndarray
    """The random stream of each completion."""
    future: Future[list[GeneratedCompletion]] = field(default_factory=Future)
    sampled: list[GeneratedCompletion | None] = field(default_factory=list)
    started: int = 0
    """Rows that run or have ended."""
    on_row: Callable[[int, GeneratedCompletion], None] | None = None
    """Hears of each completion when it has ended, once."""
    on_tokens: Callable[[list[int]], object] | None = None
    """Hears after each token of what the one completion of the request has so far."""
    told: set[int] = field(default_factory=set)
    """Places that it has heard of."""

    def __post_init__(self) -> None:
        self.sampled = [None] * self.asked.count
        self.future.set_running_or_notify_cancel()  # a caller that goes away must not touch it

    def anew(self) -> Request:
        """Forget what was sampled: it is sampled again, from the same streams."""
        self.sampled, self.started = [None] * self.asked.count, 0
        return self

    def give(self, place: int, sampled: GeneratedCompletion) -> bool:
        """Put a completion in its place; True if it was the last one."""
        self.sampled[place] = sampled
        if self.on_row is not None and place not in self.told:
            self.told.add(place)
            self.on_row(place, sampled)
        is_done = all(one is not None for one in self.sampled)
        if is_done and not self.future.done():
            self.future.set_result([one for one in self.sampled if one is not None])
        return is_done


@dataclass(frozen=True)
class BufferSizes:
    """How large the buffers of a batch are."""

    rows: int
    prompts: int
    prompt_tokens: int
    completion_tokens: int


class OpenBatch(FusedSampling):
    """Rows in slots; all of them are drawn with the same settings. A slot is a row of every array here."""

    def __init__(
        self,
        policy: PolicyView,
        backbone: Backbone,
        params: SamplingParams,
        end_ids: tuple[int, ...],
        sizes: BufferSizes,
        label: str,
    ) -> None:
        super().__init__(policy, backbone, params, end_ids=end_ids, max_rows=sizes.rows, kv_tokens=None)
        self.sizes, self.label = sizes, label
        self.waiting: deque[Request] = deque()
        self.running = np.zeros(0, dtype=np.int64)
        """Slots with a row that runs."""
        self._free = list(range(sizes.rows - 1, -1, -1))
        self._free_prompts = list(range(sizes.prompts - 1, -1, -1))
        self._tokens = np.zeros((sizes.rows, sizes.completion_tokens), dtype=np.int64)
        self._logprobs = np.zeros((sizes.rows, sizes.completion_tokens), dtype=np.float32)
        self._lengths, self._limits, self._places, self._prompt_lengths = np.zeros((4, sizes.rows), dtype=np.int64)
        self._keys = np.zeros(sizes.rows, dtype=np.uint64)
        self._requests: dict[int, Request] = {}
        """Of each running slot."""
        self._heard: set[int] = set()
        """Slots of requests that hear of each token."""
        self._prompt_slots: dict[Request, int] = {}
        self._first: dict[Request, torch.Tensor] = {}
        """Logits behind the prompts of requests some of whose rows still wait."""
        with policy.compute():
            compute_type = backbone.compute_type()
        with torch.inference_mode(), torch.autocast(backbone.device.type, enabled=False):
            self._decoder = Decoder(
                backbone,
                head_matrix(policy.model),
                compute_type,
                slots=sizes.rows,
                prompt_slots=sizes.prompts,
                prompt_tokens=sizes.prompt_tokens,
                completion_tokens=sizes.completion_tokens,
            )

    def close(self) -> None:
        """Give back what decoding has taken of a GPU's memory."""
        self._decoder.close()

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.waiting and not len(self.running)

    @property
    def requests(self) -> list[Request]:
        """Everybody who waits for something."""
        return list(dict.fromkeys([*self._prompt_slots, *self.waiting]))

    def add(self, request: Request) -> None:
        """Let a request that fits wait for slots."""
        self.waiting.append(request)

    @torch.inference_mode()
    def turn(self) -> None:
        """Let rows enter, then one more token for every running row."""
        with torch.autocast(self.backbone.device.type, enabled=False):
            self._enter()
            if len(self.running):
                self._advance()

    def abort(self, chosen: Callable[[Request], bool] = lambda request: True) -> None:
        """Cut off the rows of some requests; what they have so far is given as it is."""
        for request in [request for request in self.waiting if chosen(request)]:
            self.waiting.remove(request)
            for place in range(request.started, request.asked.count):
                self._give(request, place, GeneratedCompletion([], [], "abort", ()))
            request.started = request.asked.count
            self._first.pop(request, None)
        over = np.array([chosen(self._requests[slot]) for slot in self.running.tolist()], dtype=bool)
        self._leave(over, ["abort"] * len(over))

    def _enter(self) -> None:
        free = len(self._free)
        if not self.waiting or (len(self.running) and free < max(1, int(ADMIT_SHARE * self.sizes.rows))):
            return
        entering: list[tuple[Request, int]] = []
        while self.waiting and len(entering) < free:
            request = self.waiting[0]
            if request not in self._prompt_slots:
                if not self._free_prompts:
                    break
                self._prompt_slots[request] = self._free_prompts.pop()
            count = min(request.asked.count - request.started, free - len(entering))
            entering += [(request, request.started + place) for place in range(count)]
            request.started += count
            if request.started == request.asked.count:
                self.waiting.popleft()
        if entering:
            self._read([request for request, place in entering if place == 0])
            self._begin(entering)

    def _read(self, fresh: list[Request]) -> None:
        """Compute the prompts of requests whose first row enters."""
        if fresh:
            slots = [self._prompt_slots[request] for request in fresh]
            read = self._decoder.prefill([request.asked.token_ids for request in fresh], slots)
            self._first.update(zip(fresh, read, strict=True))

    def _begin(self, entering: list[tuple[Request, int]]) -> None:
        """Give rows their slots and draw their first tokens."""
        slots = np.array([self._free.pop() for _ in entering])
        for slot, (request, place) in zip(slots.tolist(), entering, strict=True):
            self._requests[slot] = request
            if request.on_tokens is not None:
                self._heard.add(slot)
            self._places[slot], self._keys[slot] = place, request.keys[place]
            self._prompt_lengths[slot] = len(request.asked.token_ids)
            self._limits[slot] = request.asked.params.max_completion_tokens
        self._lengths[slots] = 0
        logits = torch.stack([self._first[request] for request, _ in entering])
        for request in [request for request in self._first if request.started == request.asked.count]:
            del self._first[request]
        self.running = np.concatenate([self.running, slots])
        self._take(logits, slots)

    def _advance(self) -> None:
        slots = self.running
        past, prompt_lengths = self._lengths[slots] - 1, self._prompt_lengths[slots]
        prompt_slots = np.array([self._prompt_slots[self._requests[slot]] for slot in slots.tolist()])
        places = torch.from_numpy(np.stack([slots, past, prompt_slots, prompt_lengths], axis=1))
        last = torch.from_numpy(self._tokens[slots, past])
        self._take(self._decoder.step(last, torch.from_numpy(prompt_lengths + past), places), slots)

    def _take(self, logits: torch.Tensor, slots: np.ndarray) -> None:
        """Draw the next token of some slots, and let those that ended leave."""
        at = self._lengths[slots]
        tokens, logprobs = self._draw(self._decoder, logits, self._keys[slots], at)
        self._tokens[slots, at], self._logprobs[slots, at] = tokens, logprobs
        self._lengths[slots] = at + 1
        for slot in self._heard:
            if (hear := self._requests[slot].on_tokens) is not None:
                hear(self._tokens[slot, : int(self._lengths[slot])].tolist())
        stopped = ends(tokens, self.end_ids)
        if self.stops.stop:
            found = self.stops.ended_by(tokens, lambda place: self._recent(slots[place]))
            stopped = stopped | (found & (at + 1 >= self.params.min_completion_tokens))
        over = stopped | (at + 1 >= self._limits[slots])
        if over.any():
            ended = dict(zip(slots.tolist(), ["stop" if one else "length" for one in stopped], strict=True))
            leaving = dict(zip(slots.tolist(), over.tolist(), strict=True))
            running = self.running.tolist()
            self._leave(
                np.array([leaving.get(slot, False) for slot in running]),
                [ended.get(slot, "length") for slot in running],  # type: ignore[arg-type]
            )

    def _recent(self, slot: int) -> list[int]:
        """The last tokens of a row, as many as stop strings need."""
        length = int(self._lengths[slot])
        return self._tokens[slot, max(0, length - self.stops.window) : length].tolist()

    def _give(self, request: Request, place: int, sampled: GeneratedCompletion) -> None:
        """Hand over one completion; after the last one, nobody needs the prompt."""
        if request.give(place, sampled) and request in self._prompt_slots:
            self._free_prompts.append(self._prompt_slots.pop(request))

    def _leave(self, over: np.ndarray, reasons: list[FinishReason]) -> None:
        """Give the completions of running rows that are over to their requests, and free their slots."""
        for index in np.flatnonzero(over).tolist():
            slot = int(self.running[index])
            request, length = self._requests.pop(slot), int(self._lengths[slot])
            sampled = GeneratedCompletion(
                self._tokens[slot, :length].tolist(),
                self._logprobs[slot, :length].tolist(),
                reasons[index],
                (self.label,),
            )
            self._free.append(slot)
            self._heard.discard(slot)
            self._give(request, int(self._places[slot]), sampled)
        self.running = self.running[~over] if len(over) else self.running


def sample_through_module(policy: PolicyView, requests: list[Request], label: str, *, share: int) -> None:
    """Requests with equal settings and counts, from a model whose layers we do not compute ourselves: all together from
    beginning to end, ``share`` completions of each at a time."""
    asked = requests[0].asked
    for start in range(0, asked.count, share):
        count = min(share, asked.count - start)
        with torch.inference_mode(), policy.compute():
            keys = np.concatenate([request.keys[start : start + count] for request in requests])
            sampling = ModuleSampling(policy, asked.params, keys, asked.end_ids, rounds=False)
            rows = sampling.run([request.asked.token_ids for request in requests], count)
        for number, row in enumerate(rows):
            sampled = GeneratedCompletion(row.token_ids, row.logprobs, row.finish_reason or "abort", (label,))
            requests[number // count].give(start + number % count, sampled)
