"""Continuous batching: rows of requests enter and leave the batch at every token.

A row's tokens are drawn from its own random stream, so that it does not matter who else is there, in which slot it
lies, and when it entered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oncurve.model.decode_cuda_graph import NEWEST, Drawn
from oncurve.model.decoding import Decoder
from oncurve.model.ops_native import NativeOps
from oncurve.model.weights import Backbone, head_key, head_matrix
from oncurve.records import FinishReason
from oncurve.sample.base import PolicyView, Sampled, SamplingParams
from oncurve.sample.draw import draw
from oncurve.sample.request import Request
from oncurve.sample.row_memory import KeptPrompt, KeptRow, RowMemory
from oncurve.sample.rows import PAST, PROMPT_TOKENS, SLOT, BufferSizes, Rows
from oncurve.sample.stops import StopStrings
from oncurve.sample.streams import uniforms

ADMIT_SHARE = 0.25
"""Waiting rows start when this share of all slots is free: starting a few at a time would read few prompts at once."""


@dataclass(frozen=True, eq=False)
class DrawUnderWay:
    """A step that was started and whose tokens nobody has looked at."""

    rows: np.ndarray
    serials: np.ndarray
    """Serial numbers of these rows when it began."""
    drawn: Drawn


@dataclass(eq=False)
class PromptSlot:
    """A prompt that is held."""

    slot: int
    num_requests: int = 0
    """Requests that read it and have not ended."""
    is_read: bool = False
    """Its keys and values are in the slot."""


class RowBatch:
    """Rows that are drawn with the same settings, and requests whose rows wait for slots."""

    def __init__(
        self,
        policy: PolicyView,
        backbone: Backbone,
        params: SamplingParams,
        end_ids: tuple[int, ...],
        sizes: BufferSizes,
        memory: RowMemory,
        *,
        is_closed: bool,
        version: str | None = None,
    ) -> None:
        """``is_closed``: no request comes later than the first turn, and none has earlier turns. ``version`` names the
        weights where they may change under the rows; then rows have the same bits whoever is beside them."""
        self.version, self._policy = version, policy
        self.backbone, self.params, self.end_ids, self.sizes = backbone, params, end_ids, sizes
        self.memory, self.is_closed = memory, is_closed
        self.stops = StopStrings(params.stop, policy.tokenizer)
        self.waiting: deque[Request] = deque()
        """Requests some of whose rows have not begun."""
        self.rows = Rows(sizes)
        self._entered: dict[Request, None] = {}
        """Requests some of whose rows run or have ended."""
        self._prompts: dict[KeptPrompt, PromptSlot] = {}
        self._free_prompts = list(range(sizes.prompts - 1, -1, -1))
        self._first_logits: dict[Request, Tensor] = {}
        """Behind the prompts of requests some of whose rows still wait."""
        self._heard: set[int] = set()
        """Rows of requests that hear of each token."""
        self._under_way: DrawUnderWay | None = None
        self._is_restricted = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
        with policy.compute():
            compute_type = backbone.compute_type()
        self._decoder = Decoder(
            backbone,
            head_matrix(policy.model),
            compute_type,
            head_key=head_key(policy.model),
            slots=sizes.rows,
            prompt_slots=sizes.prompts,
            prompt_tokens=sizes.prompt_tokens,
            completion_tokens=sizes.completion_tokens,
            apart=version is not None,
        )

    def renew(self, version: str) -> None:
        """The weights have changed: rows that run go on with them, behind the keys and values that they have."""
        self._finish_step()
        model = self._policy.model
        self._decoder.renew(head_matrix(model), head_key(model))
        self.version = version
        for row in self.rows.running.tolist():
            request, place = self.rows.owners[row]
            written = int(self.rows.lengths[row] - self.rows.begins[row])
            known = [one for one in request.versions[place] if one[0] < written]
            request.versions[place] = [*known, (written, version)]

    def close(self) -> None:
        """Give back what decoding has taken of a GPU's memory."""
        self._first_logits.clear()
        self._under_way = None
        self._decoder.close()

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.waiting and not len(self.rows.running)

    @property
    def requests(self) -> list[Request]:
        """All that have not ended."""
        return list(dict.fromkeys([*self._entered, *self.waiting]))

    def turn(self) -> None:
        """Let rows enter, then one more token for every running row."""
        while self.waiting and (entering := self._admit()):
            self._begin(entering)
        if self.is_closed and not self.waiting:
            self._decoder.end_prompts()
        if self._draws_ahead():
            self._start_step()
        else:
            self._finish_step()
            if len(self.rows.running):
                self._compact()
                self._step()

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        """Cut off the rows of some requests; what they have so far is given as it is."""
        self._finish_step()
        for request in [request for request in self.waiting if chosen(request)]:
            self.waiting.remove(request)
            self._first_logits.pop(request, None)
            for place in range(request.started, request.count):
                self._give(request, place, ([], [], "abort"))
            request.started = request.count
        running = self.rows.running.tolist()
        self._leave([(row, "abort") for row in running if chosen(self.rows.owners[row][0])])

    def _admit(self) -> list[tuple[Request, np.ndarray]]:
        """Requests some of whose rows enter now, and the rows of each; their prompts are read then."""
        rows, free = self.rows, self.rows.num_free
        entering: list[tuple[Request, np.ndarray]] = []
        fresh: list[Request] = []
        if len(rows.running) and free < max(1, int(ADMIT_SHARE * self.sizes.rows)):
            return []
        while self.waiting and free:
            request = self.waiting[0]
            held = self._prompts.get(request.prompt)
            if held is None:
                if not self._free_prompts:
                    break
                held = self._prompts[request.prompt] = PromptSlot(self._free_prompts.pop())
            if not request.started:
                fresh.append(request)
                held.num_requests += 1
                self._entered[request] = None
            count = min(request.count - request.started, free)
            entering.append((request, rows.enter(request, request.started, count, prompt_slot=held.slot)))
            request.started += count
            free -= count
            if request.started == request.count:
                self.waiting.popleft()
        self._read(fresh)
        return entering

    def _read(self, fresh: list[Request]) -> None:
        """Compute the prompts of requests whose first row enters, or put those back that were kept."""
        first = [request for request in fresh if not request.own]
        later = dict.fromkeys(request.prompt for request in fresh if request.own)
        lost = [prompt for prompt in later if not self._holds(prompt)]
        if asked := [*(request.prompt for request in first), *lost]:
            slots = [self._prompts[prompt].slot for prompt in asked]
            read = self._decoder.prefill([prompt.token_ids for prompt in asked], slots)
            self._first_logits.update(zip(first, read, strict=False))
        for request in fresh:
            self._prompts[request.prompt].is_read = True
            request.read_under = self.version or ""

    def _holds(self, prompt: KeptPrompt) -> bool:
        """The prompt is in its slot, or was kept and is put there."""
        held = self._prompts[prompt]
        return held.is_read or self._decoder.put_prompt(held.slot, prompt.held)

    def _begin(self, entering: list[tuple[Request, np.ndarray]]) -> None:
        """Draw the first tokens of rows that begin, and let those run that did not end with them."""
        rows, entered = self.rows, np.concatenate([chosen for _, chosen in entering])
        for request, chosen in entering:
            if request.on_tokens is not None:
                self._heard.update(chosen.tolist())
        if self.version is not None:
            self._note_versions(entered)
        returns = rows.lengths[entered] > 0
        logits = [self._first_logits[request] for request, chosen in entering if not request.own for _ in chosen]
        for request, _ in entering:
            if request.started == request.count:
                self._first_logits.pop(request, None)
        serials = rows.serials[entered]
        if logits:
            self._take(torch.stack(logits), entered[~returns])
        rows.start(entered[rows.are_there(entered, serials)])
        if returns.any():
            self._return(entered[returns])

    def _note_versions(self, entered: np.ndarray) -> None:
        """The first token comes from the weights that read the prompt, also where others came before the row began."""
        for row in entered.tolist():
            request, place = self.rows.owners[row]
            request.versions[place] = [(0, request.read_under)]
            if request.read_under != self.version:
                request.versions[place].append((1, str(self.version)))

    def _return(self, returning: np.ndarray) -> None:
        """Give rows back what they had computed before they left; where it had to make room, compute it again.

        Kernels do that before the batch goes on, so that it is the same batch; without them all rows are computed in
        every step, so that a lost one catches up among them.
        """
        rows, lost = self.rows, []
        for row in returning.tolist():
            if held := self._kept(row).held:
                self._decoder.put_row(int(rows.places[row, SLOT]), held)
            else:
                lost.append(row)
        left = np.array(lost, dtype=np.int64)
        until = rows.places[left, PAST]
        rows.places[left, PAST] = 0
        if self._decoder.reads_anywhere:
            for past in range(int(until.max(initial=0))):
                self._decode(left[until > past])

    def _kept(self, row: int) -> KeptRow:
        request, place = self.rows.owners[row]
        return request.rows[place]

    def _decode(self, chosen: np.ndarray) -> Tensor:
        """Decode one more token of each row; the last hidden states."""
        rows = self.rows
        places = rows.places[chosen]
        past = places[:, PAST]
        rows.places[chosen, PAST] = past + 1
        tokens, positions = rows.tokens[chosen, past], places[:, PROMPT_TOKENS] + past
        return self._decoder.hidden(*(torch.from_numpy(part) for part in (tokens, positions, places)))

    def _step(self) -> None:
        """Decode one more token of every running row, and draw the next of those that have read all they were told."""
        rows, running = self.rows, self.rows.running
        hidden = self._decode(running)
        ready = rows.places[running, PAST] == rows.lengths[running]
        if not ready.all():
            running, hidden = running[ready], hidden[torch.from_numpy(ready).to(hidden.device)]
        if len(running):
            self._take(self._decoder.logits(hidden), running)

    def _draws_ahead(self) -> bool:
        """Tokens may be drawn where logits are computed: nothing but uniform numbers decides about them."""
        if not self._decoder.draws or self._is_restricted or not len(self.rows.running):
            return False
        rows, running = self.rows, self.rows.running
        is_late = rows.lengths[running] - rows.begins[running] >= self.params.min_completion_tokens
        return bool((is_late & (rows.places[running, PAST] + 1 >= rows.lengths[running])).all())

    def _start_step(self) -> None:
        """Start a step, and only then look at the tokens of the step before.

        Rows that turn out to have ended with these are computed once more for nothing.
        """
        rows = self.rows
        if not self._decoder.reads_anywhere and rows.are_sparse:
            self._finish_step()
            self._compact()
        running = rows.running
        written = rows.places[running, PAST] + 1 - rows.begins[running]
        goes = written < rows.limits[running]
        started = None
        if goes.any():
            running, written = running[goes], written[goes]
            places = rows.places[running]
            past = places[:, PAST]
            tokens = np.where(past < rows.lengths[running], rows.tokens[running, past], NEWEST)
            rows.places[running, PAST] = past + 1
            given, at, where = (torch.from_numpy(one) for one in (tokens, places[:, PROMPT_TOKENS] + past, places))
            drawn = self._decoder.draw(given, at, where, uniforms(rows.keys[running], written), self._choose)
            started = DrawUnderWay(running, rows.serials[running], drawn)
        self._finish_step()
        self._under_way = started

    def _choose(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        return draw(logits, uniform, self.params, forbidden=[])

    def _finish_step(self) -> None:
        """Write down the tokens that are under way, but those of rows that have ended since they were asked for."""
        step, self._under_way = self._under_way, None
        if step is not None:
            tokens, logprobs = step.drawn.get()
            runs = self.rows.are_there(step.rows, step.serials)
            self._record(step.rows[runs], tokens[runs], logprobs[runs])

    def _compact(self) -> None:
        """Move rows next to each other, where they cost by the slots that they span."""
        if not self._decoder.reads_anywhere and self.rows.are_sparse:
            moved, to = self.rows.compact()
            tokens = int(self.rows.places[self.rows.running, PAST].max())
            self._decoder.move(torch.from_numpy(moved), torch.from_numpy(to), tokens)

    def _take(self, logits: Tensor, chosen: np.ndarray) -> None:
        """Draw the next token of some rows, and let those that ended leave."""
        written = self.rows.lengths[chosen] - self.rows.begins[chosen]
        self._record(chosen, *self._draw(logits, self.rows.keys[chosen], written))

    def _draw(self, logits: Tensor, keys: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The next token of each row and its log-probability."""
        params, uniform = self.params, torch.from_numpy(uniforms(keys, positions))
        early = positions < params.min_completion_tokens
        native = self._decoder.wide_ops
        if isinstance(native, NativeOps) and not self._is_restricted and not early.any():
            tokens, logprobs = native.draw(logits.contiguous(), uniform, params.temperature)
            return tokens.numpy(), logprobs.numpy()
        uniform = uniform.to(logits.device)
        if not early.any():
            return _fetched(*draw(logits, uniform, params, forbidden=[]))
        drawn_tokens, drawn_logprobs = np.empty(len(logits), dtype=np.int64), np.empty(len(logits), dtype=np.float32)
        for forbidden, chosen in ((list(self.end_ids), early), ([], ~early)):
            if chosen.any():
                places = torch.from_numpy(np.flatnonzero(chosen)).to(logits.device)
                tokens, logprobs = draw(logits[places], uniform[places], params, forbidden=forbidden)
                drawn_tokens[chosen], drawn_logprobs[chosen] = _fetched(tokens, logprobs)
        return drawn_tokens, drawn_logprobs

    def _record(self, chosen: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Write down the next token of some rows, and let those that ended leave."""
        rows = self.rows
        written = rows.record(chosen, tokens, logprobs)
        for row in self._heard.intersection(chosen.tolist()) if self._heard else ():
            if (hear := rows.owners[row][0].on_tokens) is not None:
                hear(rows.recent(row, int(rows.lengths[row])))
        stopped = (tokens[:, None] == np.asarray(self.end_ids, dtype=np.int64)).any(axis=1)
        if self.stops.stop:
            found = self.stops.ended_by(tokens, lambda place: rows.recent(int(chosen[place]), self.stops.window))
            stopped = stopped | (found & (written >= self.params.min_completion_tokens))
        over = stopped | (written >= rows.limits[chosen])
        if over.any():
            ended = zip(chosen[over].tolist(), stopped[over].tolist(), strict=True)
            self._leave([(row, "stop" if is_stop else "length") for row, is_stop in ended])

    def _leave(self, ended: list[tuple[int, FinishReason]]) -> None:
        """Give the completions of rows to their requests, and free their slots."""
        given = []
        for row, reason in ended:
            request = self.rows.owners[row][0]
            if request.rows and (reason == "stop" or request.keeps):
                self._keep(row)
            sampled = self.rows.result(row, reason)
            self._heard.discard(row)
            given.append((*self.rows.leave(row), sampled))
        self.rows.drop_left()
        for request, place, sampled in given:
            self._give(request, place, sampled)

    def _give(self, request: Request, place: int, sampled: Sampled) -> None:
        """Hand over one completion; after the last one of the last request, nobody needs the prompt."""
        is_last = len(request.sampled) + 1 == request.count
        if is_last and request in self._entered:
            del self._entered[request]
            held = self._prompts[request.prompt]
            held.num_requests -= 1
            if not held.num_requests:
                self._free_prompts.append(self._prompts.pop(request.prompt).slot)
        request.give(place, sampled)

    def _keep(self, row: int) -> None:
        """Remember what a row has computed: it may return."""
        slot, past, prompt_slot, _ = self.rows.places[row].tolist()
        kept, prompt = self._kept(row), self.rows.owners[row][0].prompt
        if not self._decoder.takes_prompt(prompt.held):
            prompt.held = self._decoder.prompt(prompt_slot)
        self.memory.keep(kept, self._decoder.row(slot, past), past)


def _fetched(tokens: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Both on the CPU, by one copy from a GPU."""
    if not tokens.is_cuda:
        return tokens.numpy(), logprobs.numpy()
    both = torch.stack([tokens.double(), logprobs.double()]).cpu().numpy()
    return both[0].astype(np.int64), both[1].astype(np.float32)
