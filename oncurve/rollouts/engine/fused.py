"""Sampling by the engine where it knows the model's layers: rows enter and leave the batch at every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oncurve.model.decode_cuda_graph import NEWEST, Drawn
from oncurve.model.decode_memory import whole_blocks
from oncurve.model.decoding import Decoder
from oncurve.model.ops_native import NativeOps
from oncurve.model.weights import Backbone, head_matrix
from oncurve.rollouts.base import PolicyView, Sampled, SamplingParams
from oncurve.rollouts.engine.draw import draw
from oncurve.rollouts.engine.rows import Capacity, Rows, ends
from oncurve.rollouts.engine.stops import StopStrings
from oncurve.rollouts.engine.streams import uniforms

MOVE_BELOW = 0.75
"""Without kernels the running rows are moved together when they fill no more than this share of the slots they span."""


@dataclass(frozen=True, eq=False)
class Flight:
    """A step that was started and not looked at."""

    rows: np.ndarray
    """Those whose next token it draws."""
    drawn: Drawn


class FusedSampling:
    """One call of the engine: prompts in, the completions of each out."""

    def __init__(
        self,
        policy: PolicyView,
        backbone: Backbone,
        params: SamplingParams,
        *,
        end_ids: tuple[int, ...],
        max_rows: int,
        kv_tokens: int | None,
    ) -> None:
        self.policy, self.backbone, self.params = policy, backbone, params
        self.end_ids, self.max_rows, self.kv_tokens = end_ids, max_rows, kv_tokens
        self.stops = StopStrings(params.stop, policy.tokenizer)
        self._first_logits: dict[int, Tensor] = {}
        """Of prompts that were read and some of whose rows still wait."""
        self._flight: Flight | None = None
        self._is_restricted = params.top_p < 1 or params.top_k > 0 or params.min_p > 0

    def run(
        self,
        prompts: Sequence[tuple[int, ...]],
        group_size: int,
        keys: np.ndarray,
        finish: Callable[[int, list[Sampled]], None],
    ) -> None:
        """Sample; ``finish`` gets the place of each prompt and its completions as soon as the last of them has ended.

        ``keys`` name the random stream of each completion, group after group.
        """
        longest, params = max(len(prompt) for prompt in prompts), self.params
        room = Capacity.of(
            num_prompts=len(prompts),
            group_size=group_size,
            prompt_tokens=whole_blocks(longest),
            completion_tokens=whole_blocks(params.max_completion_tokens),
            max_rows=self.max_rows,
            kv_tokens=self.kv_tokens,
        )
        compute_type = self.backbone.compute_type()
        rows = Rows(len(prompts), group_size, room, params)
        lengths = np.array([len(prompt) for prompt in prompts])
        with torch.autocast(self.backbone.device.type, enabled=False):
            decoder = Decoder(
                self.backbone,
                head_matrix(self.policy.model),
                compute_type,
                slots=room.slots,
                prompt_slots=room.prompt_slots,
                prompt_tokens=longest,
                completion_tokens=params.max_completion_tokens,
            )
            try:
                while not rows.is_done:
                    self._admit(decoder, rows, prompts, keys)
                    if rows.none_waits:
                        decoder.end_prompts()
                    self._step(decoder, rows, lengths, keys)
                    for prompt in rows.take_whole():
                        finish(prompt, rows.group(prompt))
            finally:
                self._first_logits.clear()
                self._flight = None
                decoder.close()

    def _admit(self, decoder: Decoder, rows: Rows, prompts: Sequence[tuple[int, ...]], keys: np.ndarray) -> None:
        """Read the prompts of rows that may start, and draw the first token of each row."""
        while True:
            starting, fresh = rows.admit()
            if not len(starting):
                return
            if fresh:
                read = decoder.prefill([prompts[prompt] for prompt in fresh], rows.prompt_slots[fresh].tolist())
                self._first_logits.update(zip(fresh, read, strict=True))
            logits = torch.stack([self._first_logits[prompt] for prompt in rows.prompt_of[starting].tolist()])
            tokens, logprobs = self._draw(decoder, logits, keys[starting], rows.lengths[starting])
            rows.record(starting, tokens, logprobs)
            for prompt in [prompt for prompt in self._first_logits if rows.has_started(prompt)]:
                del self._first_logits[prompt]
            rows.start(starting[rows.finish(starting, self._stopped(rows, starting, tokens))])

    def _step(self, decoder: Decoder, rows: Rows, prompt_lengths: np.ndarray, keys: np.ndarray) -> None:
        """One more token for every running row."""
        if self._flies(decoder, rows):
            self._fly(decoder, rows, prompt_lengths, keys)
            return
        self._land(rows)
        if not len(rows.running):
            return
        self._arrange(decoder, rows)
        running, places = rows.running, _places(rows, prompt_lengths)
        past, lengths = places[:, 1], places[:, 3]
        last = torch.from_numpy(rows.tokens[running, past])
        logits = decoder.step(last, torch.from_numpy(lengths + past), torch.from_numpy(places))
        tokens, logprobs = self._draw(decoder, logits, keys[running], past + 1)
        rows.record(running, tokens, logprobs)
        rows.keep(rows.finish(running, self._stopped(rows, running, tokens)))

    def _flies(self, decoder: Decoder, rows: Rows) -> bool:
        """Tokens may be drawn where logits are computed: nothing but uniform numbers decides about them."""
        is_late = bool((rows.lengths[rows.running] >= self.params.min_completion_tokens).all())
        return decoder.draws and is_late and not self._is_restricted

    def _fly(self, decoder: Decoder, rows: Rows, prompt_lengths: np.ndarray, keys: np.ndarray) -> None:
        """Start a step, and only then look at the tokens of the step before.

        Rows that turn out to have ended with these are computed once more for nothing.
        """
        if not decoder.reads_anywhere and _are_sparse(rows):
            self._land(rows)
            self._arrange(decoder, rows)
        before = self._flight
        flying = np.zeros(0, dtype=np.int64) if before is None else before.rows
        lengths = rows.lengths[rows.running] + np.isin(rows.running, flying)
        goes = lengths < self.params.max_completion_tokens
        started = None
        if goes.any():
            running, past = rows.running[goes], lengths[goes] - 1
            places = _places(rows, prompt_lengths)[goes]
            places[:, 1] = past
            tokens = np.where(np.isin(running, flying), NEWEST, rows.tokens[running, past])
            given, at, where = (torch.from_numpy(part) for part in (tokens, places[:, 3] + past, places))
            drawn = decoder.draw(given, at, where, uniforms(keys[running], past + 1), self._choose)
            started = Flight(running, drawn)
        self._land(rows)
        self._flight = started

    def _choose(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        return draw(logits, uniform, self.params, forbidden=[])

    def _land(self, rows: Rows) -> None:
        """Write down the tokens that are on their way, but those of rows that have ended since they were asked for."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        tokens, logprobs = flight.drawn.get()
        runs = np.isin(flight.rows, rows.running)
        running, tokens = flight.rows[runs], tokens[runs]
        rows.record(running, tokens, logprobs[runs])
        goes_on = rows.finish(running, self._stopped(rows, running, tokens))
        rows.keep(~np.isin(rows.running, running[~goes_on]))

    def _arrange(self, decoder: Decoder, rows: Rows) -> None:
        """Without kernels, let rows lie next to each other."""
        if not decoder.reads_anywhere and len(rows.running) and _are_sparse(rows):
            moved, to = rows.fill()
            decoder.move(torch.from_numpy(moved), torch.from_numpy(to), int(rows.lengths[rows.running].max()))

    def _draw(
        self, decoder: Decoder, logits: Tensor, keys: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next token of each row and its log-probability."""
        params, uniform = self.params, torch.from_numpy(uniforms(keys, positions))
        early = positions < params.min_completion_tokens
        native = decoder.wide_ops
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

    def _stopped(self, rows: Rows, chosen: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Which rows ended with the token just recorded."""
        stopped = ends(tokens, self.end_ids)
        if self.stops.stop:
            found = self.stops.ended_by(tokens, lambda place: rows.recent(chosen[place], self.stops.window))
            stopped = stopped | (found & (rows.lengths[chosen] >= self.params.min_completion_tokens))
        return stopped


def _fetched(tokens: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Both on the CPU, by one copy from a GPU."""
    if not tokens.is_cuda:
        return tokens.numpy(), logprobs.numpy()
    both = torch.stack([tokens.double(), logprobs.double()]).cpu().numpy()
    return both[0].astype(np.int64), both[1].astype(np.float32)


def _are_sparse(rows: Rows) -> bool:
    """The running rows should lie closer together."""
    return bool(len(rows.running)) and len(rows.running) <= MOVE_BELOW * (rows.slots.max() + 1)


def _places(rows: Rows, prompt_lengths: np.ndarray) -> np.ndarray:
    """What ``Decoder.step`` is told of each running row [R, 4]."""
    prompts = rows.prompt_of[rows.running]
    past = rows.lengths[rows.running] - 1
    return np.stack([rows.slots, past, rows.prompt_slots[prompts], prompt_lengths[prompts]], axis=1)
