"""Scheduler of rows: a batch into which requests enter and from which they leave at every token, whoever asks for them.

A step's groups are requests that are all there when it begins. Turns of episodes and callers of a server come whenever
they like. A row that waits for a tool leaves the batch; on a CPU it returns with its keys and values, on a GPU as a
longer prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from oncurve.core.decoder import Decoder, Decoders, fetched
from oncurve.core.draw import StopStrings, draw, uniforms
from oncurve.core.errors import SamplerError, Shortage, release
from oncurve.core.records import DecodeCall, FinishReason, Group, SamplingParams
from oncurve.core.requests import PAST, PROMPT_TOKENS, SLOT, BufferSizes, PromptState, Request, Rows, RowState, Sampled
from oncurve.core.sampler import PolicyView, SamplingRequest, check_ids, end_token_ids, make_group

ADMIT_SHARE = 0.25
"""Waiting rows start when this share of all slots is free: starting a few at a time would read few prompts at once."""


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
        decoder: Decoder,
        params: SamplingParams,
        end_ids: tuple[int, ...],
        sizes: BufferSizes,
        *,
        is_closed: bool,
        version: str | None = None,
        can_end: np.ndarray | None = None,
    ) -> None:
        """``is_closed``: all requests are there before decoding begins, and none continues another. ``version`` names
        the weights where they may change under the rows; then rows have the same bits whoever is beside them."""
        self.version, self._policy = version, policy
        self.decoder, self.params, self.end_ids, self.sizes = decoder, params, end_ids, sizes
        self.is_closed = is_closed
        self.stops = StopStrings(params.stop, policy.tokenizer, can_end=can_end)
        self.waiting: deque[Request] = deque()
        """Requests some of whose rows have not begun."""
        self.rows = Rows(sizes)
        self._entered: dict[Request, None] = {}
        """Requests some of whose rows run or have ended."""
        self._prompts: dict[PromptState, PromptSlot] = {}
        self._free_prompts = list(range(sizes.prompts - 1, -1, -1))
        self._first_logits: dict[Request, Tensor] = {}
        """Behind the prompts of requests some of whose rows still wait."""
        self._heard: set[int] = set()
        """Rows of requests that hear of each token."""

    def renew(self, version: str) -> None:
        """The weights have changed: rows that run go on with them, behind the keys and values that they have."""
        self.settle()
        self.decoder.renew()
        self.version = version
        for row in self.rows.running.tolist():
            request, index = self.rows.owners[row]
            written = int(self.rows.lengths[row] - self.rows.begins[row])
            known = [span for span in request.versions[index] if span[0] < written]
            request.versions[index] = [*known, (written, version)]

    def close(self) -> None:
        """Give back what decoding has taken of a GPU's memory."""
        self._first_logits.clear()
        self.decoder.close()

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.waiting and not len(self.rows.running)

    @property
    def requests(self) -> list[Request]:
        """All that have not ended."""
        return list(dict.fromkeys([*self._entered, *self.waiting]))

    def add(self, request: Request) -> None:
        """Let the rows of a request wait for slots."""
        if request.rows and self.decoder.keeper is None:
            request.read_again()
        self.waiting.append(request)

    def turn(self) -> None:
        """Let rows enter, then one more token for every running row."""
        while self.waiting and (entering := self._admit()):
            self._begin(entering)
        if self.is_closed and not self.waiting:
            self.decoder.end_prompts()
        self.advance()

    def advance(self) -> None:
        """One more token for every running row."""
        if len(self.rows.running):
            self.compact()
            self.step()

    def settle(self) -> None:
        """Look at the tokens of a step that was started, where steps are started before they are looked at."""

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        """Cut off the rows of some requests; what they have so far is given as it is."""
        self.settle()
        for request in [request for request in self.waiting if chosen(request)]:
            self.waiting.remove(request)
            self._first_logits.pop(request, None)
            for index in range(request.started, request.count):
                self._give(request, index, ([], [], "abort"))
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
            prompt_slot = self._prompts.get(request.prompt)
            if prompt_slot is None:
                if not self._free_prompts:
                    break
                prompt_slot = self._prompts[request.prompt] = PromptSlot(self._free_prompts.pop())
            if not request.started:
                fresh.append(request)
                prompt_slot.num_requests += 1
                self._entered[request] = None
            count = min(request.count - request.started, free)
            entering.append((request, rows.enter(request, request.started, count, prompt_slot=prompt_slot.slot)))
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
        if prompts := [*(request.prompt for request in first), *lost]:
            slots = [self._prompts[prompt].slot for prompt in prompts]
            read = self.decoder.prefill([prompt.token_ids for prompt in prompts], slots)
            self._first_logits.update(zip(first, read, strict=False))
        for request in fresh:
            self._prompts[request.prompt].is_read = True
            request.read_under = self.version or ""

    def _holds(self, prompt: PromptState) -> bool:
        """The prompt is in its slot, or was kept and is put there."""
        prompt_slot = self._prompts[prompt]
        keeper = self.decoder.keeper
        return prompt_slot.is_read or (keeper is not None and keeper.put_prompt(prompt_slot.slot, prompt))

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
            request, index = self.rows.owners[row]
            request.versions[index] = [(0, request.read_under)]
            if request.read_under != self.version:
                request.versions[index].append((1, str(self.version)))

    def _return(self, returning: np.ndarray) -> None:
        """Give rows back what they had computed before they left; where it had to make room, compute it again.

        Kernels do that before the batch goes on, so that it is the same batch; without them all rows are computed in
        every step, so that a lost one catches up among them.
        """
        rows, lost, keeper = self.rows, [], self.decoder.keeper
        for row in returning.tolist():
            if keeper is None or not keeper.put_row(int(rows.addresses[row, SLOT]), self._cached_row(row)):
                lost.append(row)
        left = np.array(lost, dtype=np.int64)
        until = rows.addresses[left, PAST]
        rows.addresses[left, PAST] = 0
        if self.decoder.mover is None:
            for past in range(int(until.max(initial=0))):
                self._decode(left[until > past])

    def _cached_row(self, row: int) -> RowState:
        request, index = self.rows.owners[row]
        return request.rows[index]

    def _decode(self, chosen: np.ndarray) -> Tensor:
        """Decode one more token of each row; the last hidden states."""
        rows = self.rows
        addresses = rows.addresses[chosen]
        past = addresses[:, PAST]
        rows.addresses[chosen, PAST] = past + 1
        tokens, positions = rows.tokens[chosen, past], addresses[:, PROMPT_TOKENS] + past
        return self.decoder.hidden(*(torch.from_numpy(part) for part in (tokens, positions, addresses)))

    def step(self) -> None:
        """Decode one more token of every running row, and draw the next of those that have read all they were told."""
        rows, running = self.rows, self.rows.running
        hidden = self._decode(running)
        ready = rows.addresses[running, PAST] == rows.lengths[running]
        if not ready.all():
            running, hidden = running[ready], hidden[torch.from_numpy(ready).to(hidden.device)]
        if len(running):
            self._take(self.decoder.logits(hidden), running)

    def compact(self) -> None:
        """Move rows next to each other, where they cost by the slots that they span."""
        if (mover := self.decoder.mover) is not None and self.rows.are_sparse:
            moved, to = self.rows.compact()
            tokens = int(self.rows.addresses[self.rows.running, PAST].max())
            mover.move(torch.from_numpy(moved), torch.from_numpy(to), tokens)

    def _take(self, logits: Tensor, chosen: np.ndarray) -> None:
        """Draw the next token of some rows, and let those that ended leave."""
        written = self.rows.lengths[chosen] - self.rows.begins[chosen]
        self.record(chosen, *self._draw(logits, self.rows.keys[chosen], written))

    def _draw(self, logits: Tensor, keys: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The next token of each row and its log-probability."""
        params, uniform = self.params, torch.from_numpy(uniforms(keys, positions))
        early = positions < params.min_completion_tokens
        if not early.any():
            return self.decoder.choose(logits, uniform, params)
        uniform = uniform.to(logits.device)
        drawn_tokens, drawn_logprobs = np.empty(len(logits), dtype=np.int64), np.empty(len(logits), dtype=np.float32)
        for forbidden, chosen in ((list(self.end_ids), early), ([], ~early)):
            if chosen.any():
                drawn_rows = torch.from_numpy(np.flatnonzero(chosen)).to(logits.device)
                tokens, logprobs = draw(logits[drawn_rows], uniform[drawn_rows], params, forbidden=forbidden)
                drawn_tokens[chosen], drawn_logprobs[chosen] = fetched(tokens, logprobs)
        return drawn_tokens, drawn_logprobs

    def record(self, chosen: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Write down the next token of some rows, and let those that ended leave."""
        rows = self.rows
        written = rows.record(chosen, tokens, logprobs)
        for row in self._heard.intersection(chosen.tolist()) if self._heard else ():
            if (hear := rows.owners[row][0].on_tokens) is not None:
                hear(rows.recent(row, int(rows.lengths[row])))
        stopped = (tokens[:, None] == np.asarray(self.end_ids, dtype=np.int64)).any(axis=1)
        if self.stops.stop:
            has_stop = self.stops.ended_by(tokens, lambda index: rows.recent(int(chosen[index]), self.stops.window))
            stopped = stopped | (has_stop & (written >= self.params.min_completion_tokens))
        over = stopped | (written >= rows.limits[chosen])
        if over.any():
            ended = zip(chosen[over].tolist(), stopped[over].tolist(), strict=True)
            self._leave([(row, "stop" if is_stop else "length") for row, is_stop in ended])

    def _leave(self, ended: list[tuple[int, FinishReason]]) -> None:
        """Give the completions of rows to their requests, and free their slots."""
        finished = []
        for row, reason in ended:
            request = self.rows.owners[row][0]
            if request.rows and (reason == "stop" or request.keeps):
                self._keep(row)
            sampled = self.rows.result(row, reason)
            self._heard.discard(row)
            finished.append((*self.rows.leave(row), sampled))
        self.rows.drop_left()
        for request, index, sampled in finished:
            self._give(request, index, sampled)

    def _give(self, request: Request, index: int, sampled: Sampled) -> None:
        """Hand over one completion; after the last one of the last request, nobody needs the prompt."""
        is_last = len(request.sampled) + 1 == request.count
        if is_last and request in self._entered:
            del self._entered[request]
            prompt_slot = self._prompts[request.prompt]
            prompt_slot.num_requests -= 1
            if not prompt_slot.num_requests:
                self._free_prompts.append(self._prompts.pop(request.prompt).slot)
        request.give(index, sampled)

    def _keep(self, row: int) -> None:
        """Remember what a row has computed: it may return."""
        slot, past, prompt_slot, _ = self.rows.addresses[row].tolist()
        if (keeper := self.decoder.keeper) is not None:
            keeper.keep(self._cached_row(row), self.rows.owners[row][0].prompt, (slot, past, prompt_slot))


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
        """Make buffers for so many from the beginning."""
        self._tokens = (prompt_tokens, completion_tokens)

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
            for index in range(request.count):
                request.give(index, ([], [], "abort"))

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
            num_prompts=self.decoders.most_rows,
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
        self._batch = self.decoders.batch_type(RowBatch)(
            self.policy,
            decoder,
            params,
            end_ids,
            plan.sizes,
            is_closed=self.is_closed,
            version=self.version,
            can_end=self.decoders.ending_tokens(params.stop, self.policy),
        )


def _settings(request: Request) -> tuple[SamplingParams, tuple[int, ...]]:
    """The settings that rows must have in common to run together; how long they may become is each row's own."""
    return replace(request.params, max_completion_tokens=1), request.end_ids


def _double_until(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size


class RowEngine:
    """Samples in process from the policy's own weights.

    Each prompt is read once for its group, finished rows leave at once and waiting ones enter. There is nothing to
    synchronize; the memory for keys and values is given back after each call.
    """

    def __init__(self, params: SamplingParams, decoders: Decoders) -> None:
        self.params, self.decoders = params, decoders
        self.on_group: Callable[[Group], None] | None = None
        self._policy: PolicyView | None = None
        self._version = 0

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Remember the policy: its module holds the current weights already."""
        self._policy, self._version = policy, version

    def close(self) -> None:
        """Let go of the policy."""
        self._policy = None

    def sample(self, request: SamplingRequest) -> list[Group]:
        """One group per prompt. A prompt that occurs twice gets different completions each time."""
        if self._policy is None:
            raise SamplerError("the engine has no weights yet; call load_weights before sample")
        prompts, params = request.prompts, request.params or self.params
        if not prompts:
            return []
        policy, model = self._policy, self._policy.model
        end_ids = end_token_ids(model, policy.tokenizer)
        keys = request.stream_keys(params.seed)
        groups: dict[int, Group] = {}

        def finish(index: int, sampled: list[Sampled]) -> None:
            groups[index] = make_group(
                prompts[index], sampled, tokenizer=policy.tokenizer, end_ids=end_ids, version=self._version
            )
            if self.on_group is not None:
                self.on_group(groups[index])

        scheduler = RowScheduler(policy, self.decoders, is_closed=True)
        for index, prompt in enumerate(prompts):
            scheduler.add(Request(prompt.prompt_ids, keys[index], params, end_ids, on_done=partial(finish, index)))
        was_training = model.training
        model.eval()
        try:
            scheduler.run()
        finally:
            scheduler.forget()
            model.train(was_training)
        return [groups[index] for index in range(len(prompts))]
