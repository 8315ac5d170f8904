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
from oncurve.rollouts.serving.row_memory import KeptPrompt, KeptRow, RowMemory


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
    rows: tuple[KeptRow, ...] = ()
    """What each completion is to go on from, and to keep for its next turn; none for those that have one turn."""
    prompt: KeptPrompt = field(init=False)

    def __post_init__(self) -> None:
        self.sampled = [None] * self.asked.count
        known = self.rows[0].prompt if self.rows else None
        self.prompt = known or KeptPrompt(self.asked.token_ids)
        for row in self.rows:
            row.begin(self.prompt)
        self.future.set_running_or_notify_cancel()  # a caller that goes away must not touch it

    @property
    def own(self) -> tuple[int, ...]:
        """Tokens of earlier turns and their answers."""
        return self.asked.token_ids[len(self.prompt.token_ids) :]

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
        memory: RowMemory,
    ) -> None:
        super().__init__(policy, backbone, params, end_ids=end_ids, max_rows=sizes.rows, kv_tokens=None)
        self.sizes, self.label, self.memory = sizes, label, memory
        self.waiting: deque[Request] = deque()
        self.running = np.zeros(0, dtype=np.int64)
        """Slots with a row that runs."""
        self._free = list(range(sizes.rows - 1, -1, -1))
        self._free_prompts = list(range(sizes.prompts - 1, -1, -1))
        self._tokens = np.zeros((sizes.rows, sizes.completion_tokens), dtype=np.int64)
        self._logprobs = np.zeros((sizes.rows, sizes.completion_tokens), dtype=np.float32)
        self._lengths, self._limits, self._places, self._prompt_lengths = np.zeros((4, sizes.rows), dtype=np.int64)
        self._begins, self._past = np.zeros((2, sizes.rows), dtype=np.int64)
        """Tokens of earlier turns and their answers, and tokens that are decoded."""
        self._keys = np.zeros(sizes.rows, dtype=np.uint64)
        self._requests: dict[int, Request] = {}
        """Of each running slot."""
        self._heard: set[int] = set()
        """Slots of requests that hear of each token."""
        self._entered: dict[Request, None] = {}
        """Requests some of whose rows run or have ended."""
        self._prompt_slots: dict[KeptPrompt, int] = {}
        self._unread: set[KeptPrompt] = set()
        """Prompts that have a slot and are not in it yet."""
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
        return list(dict.fromkeys([*self._entered, *self.waiting]))

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
            if request.prompt not in self._prompt_slots:
                if not self._free_prompts:
                    break
                self._prompt_slots[request.prompt] = self._free_prompts.pop()
                self._unread.add(request.prompt)
            self._entered[request] = None
            count = min(request.asked.count - request.started, free - len(entering))
            entering += [(request, request.started + place) for place in range(count)]
            request.started += count
            if request.started == request.asked.count:
                self.waiting.popleft()
        if entering:
            self._read([request for request, place in entering if place == 0])
            self._begin(entering)

    def _read(self, fresh: list[Request]) -> None:
        """Compute the prompts of requests whose first row enters, or put those back that were kept."""
        first = [request for request in fresh if not request.own]
        others = dict.fromkeys(request.prompt for request in fresh if request.own and request.prompt in self._unread)
        lost = [prompt for prompt in others if not self._put_back(prompt)]
        asked = [*(request.prompt for request in first), *lost]
        if asked:
            slots = [self._prompt_slots[prompt] for prompt in asked]
            read = self._decoder.prefill([prompt.token_ids for prompt in asked], slots)
            self._first.update(zip(first, read, strict=False))
        self._unread.clear()

    def _put_back(self, prompt: KeptPrompt) -> bool:
        return self._decoder.put_prompt(self._prompt_slots[prompt], prompt.held)

    def _begin(self, entering: list[tuple[Request, int]]) -> None:
        """Give rows their slots, and draw the first tokens of those that begin."""
        slots = np.array([self._free.pop() for _ in entering])
        for slot, (request, place) in zip(slots.tolist(), entering, strict=True):
            self._requests[slot] = request
            if request.on_tokens is not None:
                self._heard.add(slot)
            self._places[slot], self._keys[slot] = place, request.keys[place]
            self._prompt_lengths[slot] = len(request.prompt.token_ids)
            self._limits[slot] = request.asked.params.max_completion_tokens
            own = request.own
            self._begins[slot] = self._lengths[slot] = len(own)
            self._tokens[slot, : len(own)] = own
            self._past[slot] = request.rows[place].num_tokens if own else 0
        begins = self._begins[slots] == 0
        logits = [self._first[request] for request, _ in entering if not request.own]
        for request in [request for request in self._first if request.started == request.asked.count]:
            del self._first[request]
        self.running = np.concatenate([self.running, slots])
        self._return(slots[~begins])
        if logits:
            self._take(torch.stack(logits), slots[begins])

    def _return(self, slots: np.ndarray) -> None:
        """Give rows back what they had computed before they left; where it had to make room, compute it again.

        Kernels do that before the batch goes on, so that it is the same batch; without them all rows are computed in
        every step, so that a lost one catches up among them.
        """
        lost = np.array([slot for slot in slots.tolist() if not self._row(slot).held], dtype=np.int64)
        for slot in slots.tolist():
            if held := self._row(slot).held:
                self._decoder.put_row(slot, held)
        until = self._past[lost].copy()
        if not self._decoder.reads_anywhere:
            self._past[lost] = until = np.zeros_like(until)
        for past in range(int(until.max(initial=0))):
            left = lost[until > past]
            self._past[left] = past
            self._decode(left)
        self._past[lost] = until

    def _row(self, slot: int) -> KeptRow:
        return self._requests[slot].rows[int(self._places[slot])]

    def _decode(self, slots: np.ndarray) -> torch.Tensor:
        """Decode one more token of each row; the last hidden states."""
        past, prompt_lengths = self._past[slots], self._prompt_lengths[slots]
        prompt_slots = np.array([self._prompt_slots[self._requests[slot].prompt] for slot in slots.tolist()])
        places = torch.from_numpy(np.stack([slots, past, prompt_slots, prompt_lengths], axis=1))
        token = torch.from_numpy(self._tokens[slots, past])
        self._past[slots] = past + 1
        return self._decoder.hidden(token, torch.from_numpy(prompt_lengths + past), places)

    def _advance(self) -> None:
        """Decode one more token of every running row, and draw the next of those that have read all they were told."""
        slots = self.running
        hidden = self._decode(slots)
        ready = self._past[slots] == self._lengths[slots]
        if not ready.all():
            hidden, slots = hidden[torch.from_numpy(ready).to(hidden.device)], slots[ready]
        if len(slots):
            self._take(self._decoder.logits(hidden), slots)

    def _take(self, logits: torch.Tensor, slots: np.ndarray) -> None:
        """Draw the next token of some slots, and let those that ended leave."""
        at = self._lengths[slots]
        written = at - self._begins[slots]
        tokens, logprobs = self._draw(self._decoder, logits, self._keys[slots], written)
        self._tokens[slots, at], self._logprobs[slots, at] = tokens, logprobs
        self._lengths[slots] = at + 1
        for slot in self._heard:
            if (hear := self._requests[slot].on_tokens) is not None:
                hear(self._tokens[slot, self._begins[slot] : self._lengths[slot]].tolist())
        stopped = ends(tokens, self.end_ids)
        if self.stops.stop:
            found = self.stops.ended_by(tokens, lambda place: self._recent(slots[place]))
            stopped = stopped | (found & (written + 1 >= self.params.min_completion_tokens))
        over = stopped | (written + 1 >= self._limits[slots])
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
        begin, length = int(self._begins[slot]), int(self._lengths[slot])
        return self._tokens[slot, max(begin, length - self.stops.window) : length].tolist()

    def _give(self, request: Request, place: int, sampled: GeneratedCompletion) -> None:
        """Hand over one completion; after the last one, nobody needs the prompt."""
        if request.give(place, sampled) and request in self._entered:
            del self._entered[request]
            if all(other.prompt is not request.prompt for other in self._entered):
                self._free_prompts.append(self._prompt_slots.pop(request.prompt))

    def _leave(self, over: np.ndarray, reasons: list[FinishReason]) -> None:
        """Give the completions of running rows that are over to their requests, and free their slots."""
        for index in np.flatnonzero(over).tolist():
            slot = int(self.running[index])
            if self._requests[slot].rows and reasons[index] == "stop":
                self._keep(slot)
            request, written = self._requests.pop(slot), slice(self._begins[slot], self._lengths[slot])
            sampled = GeneratedCompletion(
                self._tokens[slot, written].tolist(),
                self._logprobs[slot, written].tolist(),
                reasons[index],
                (self.label,),
            )
            self._free.append(slot)
            self._heard.discard(slot)
            self._give(request, int(self._places[slot]), sampled)
        self.running = self.running[~over] if len(over) else self.running

    def _keep(self, slot: int) -> None:
        """Remember what a row has computed: it may return."""
        row, prompt, past = self._row(slot), self._requests[slot].prompt, int(self._past[slot])
        if not self._decoder.takes_prompt(prompt.held):
            prompt.held = self._decoder.prompt(self._prompt_slots[prompt])
        self.memory.keep(row, self._decoder.row(slot, past), past)


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
