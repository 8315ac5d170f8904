"""How does the engine sample when it knows the model's layers? Rows enter and leave the batch at every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oncurve.records import FinishReason
from oncurve.rollouts.base import PolicyView, SamplingParams
from oncurve.rollouts.engine.draw import draw
from oncurve.rollouts.engine.rows import Room, Rows, ends
from oncurve.rollouts.engine.stops import StopStrings
from oncurve.rollouts.engine.streams import uniforms
from oncurve.trunk.caches import whole_blocks
from oncurve.trunk.decoding import Decoder
from oncurve.trunk.native_ops import NativeOps
from oncurve.trunk.weights import Trunk, head_matrix

Around = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Takes the name of a part of sampling ("load", "prefill", "decode") and its function; gives what is called instead."""
Sampled = tuple[list[int], list[float], FinishReason]
MOVE_BELOW = 0.75
"""Without kernels the running rows are moved together when they fill no more than this share of the slots they span."""


class FusedSampling:
    """One call of the engine: prompts in, the completions of each out."""

    def __init__(
        self,
        policy: PolicyView,
        trunk: Trunk,
        params: SamplingParams,
        *,
        end_ids: tuple[int, ...],
        max_rows: int,
        kv_tokens: int | None,
        kv_type: torch.dtype | None = None,
    ) -> None:
        self.kv_type = kv_type
        self.policy, self.trunk, self.params = policy, trunk, params
        self.end_ids, self.max_rows, self.kv_tokens = end_ids, max_rows, kv_tokens
        self.stops = StopStrings(params.stop, policy.tokenizer)
        self.around: Around | None = None
        self._first_logits: dict[int, Tensor] = {}
        """Of prompts that were read and some of whose rows still wait."""

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
        room = Room.of(
            num_prompts=len(prompts),
            group_size=group_size,
            prompt_tokens=whole_blocks(longest),
            completion_tokens=whole_blocks(params.max_completion_tokens),
            max_rows=self.max_rows,
            kv_tokens=self.kv_tokens,
        )
        compute_type = self.trunk.compute_type()
        rows = Rows(len(prompts), group_size, room, params)
        lengths = np.array([len(prompt) for prompt in prompts])
        with torch.autocast(self.trunk.device.type, enabled=False):
            make = Decoder if self.around is None else self.around("load", Decoder)
            decoder: Decoder = make(
                self.trunk,
                head_matrix(self.policy.model),
                compute_type,
                slots=room.slots,
                prompt_slots=room.prompt_slots,
                prompt_tokens=longest,
                completion_tokens=params.max_completion_tokens,
                kv_type=self.kv_type,
                has_spare=self.kv_tokens is None,
            )
            if self.around is not None:
                decoder.prefill = self.around("prefill", decoder.prefill)  # type: ignore[method-assign]
                decoder.step = self.around("decode", decoder.step)  # type: ignore[method-assign]
            try:
                while not rows.is_done:
                    self._admit(decoder, rows, prompts, keys)
                    if rows.none_waits:
                        decoder.end_prompts()
                    self._step(decoder, rows, lengths, keys)
                    for prompt in rows.take_whole():
                        finish(prompt, rows.group(prompt))
            finally:
                for name in ("prefill", "step"):  # which hold the decoder, so that its memory would stay for a while
                    vars(decoder).pop(name, None)

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
        if not len(rows.running):
            return
        self._arrange(decoder, rows, prompt_lengths)
        running, places = rows.running, _places(rows, prompt_lengths)
        past, lengths = places[:, 1], places[:, 3]
        last = torch.from_numpy(rows.tokens[running, past])
        logits = decoder.step(last, torch.from_numpy(lengths + past), torch.from_numpy(places))
        tokens, logprobs = self._draw(decoder, logits, keys[running], past + 1)
        rows.record(running, tokens, logprobs)
        rows.keep(rows.finish(running, self._stopped(rows, running, tokens)))

    def _arrange(self, decoder: Decoder, rows: Rows, prompt_lengths: np.ndarray) -> None:
        """Without kernels, let rows lie as attention reads them best: next to each other, and few of them with a copy
        of their prompt each."""
        if isinstance(decoder.cache_ops, NativeOps):
            return
        running = rows.running
        if rows.none_waits:
            places = _places(rows, prompt_lengths)
            if decoder.should_join(len(running), int(places[:, 3].max())):
                decoder.join(torch.from_numpy(places), int(rows.lengths[running].max()))
                rows.line_up()
                return
        if len(running) <= MOVE_BELOW * (rows.slots.max() + 1):
            moved, to = rows.fill()
            decoder.move(torch.from_numpy(moved), torch.from_numpy(to), int(rows.lengths[running].max()))

    def _draw(
        self, decoder: Decoder, logits: Tensor, keys: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next token of each row and its log-probability."""
        params, uniform = self.params, torch.from_numpy(uniforms(keys, positions))
        restricted = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
        early = positions < params.min_completion_tokens
        native = decoder.wide_ops
        if isinstance(native, NativeOps) and not restricted and not early.any():
            tokens, logprobs = native.draw(logits.contiguous(), uniform, params.temperature)
            return tokens.numpy(), logprobs.numpy()
        uniform = uniform.to(logits.device)
        if not early.any():
            tokens, logprobs = draw(logits, uniform, params, forbidden=[])
            return tokens.cpu().numpy(), logprobs.cpu().numpy()
        drawn_tokens, drawn_logprobs = np.empty(len(logits), dtype=np.int64), np.empty(len(logits), dtype=np.float32)
        for forbidden, chosen in ((list(self.end_ids), early), ([], ~early)):
            if chosen.any():
                places = torch.from_numpy(np.flatnonzero(chosen)).to(logits.device)
                tokens, logprobs = draw(logits[places], uniform[places], params, forbidden=forbidden)
                drawn_tokens[chosen], drawn_logprobs[chosen] = tokens.cpu().numpy(), logprobs.cpu().numpy()
        return drawn_tokens, drawn_logprobs

    def _stopped(self, rows: Rows, chosen: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Which rows ended with the token just recorded."""
        stopped = ends(tokens, self.end_ids)
        if self.stops.stop:
            texts = self.stops.ended([rows.tokens[row, : rows.lengths[row]].tolist() for row in chosen])
            stopped = stopped | (np.array(texts) & (rows.lengths[chosen] >= self.params.min_completion_tokens))
        return stopped


def _places(rows: Rows, prompt_lengths: np.ndarray) -> np.ndarray:
    """What ``Decoder.step`` is told of each running row [R, 4]."""
    prompts = rows.prompt_of[rows.running]
    past = rows.lengths[rows.running] - 1
    return np.stack([rows.slots, past, rows.prompt_slots[prompts], prompt_lengths[prompts]], axis=1)
