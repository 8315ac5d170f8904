"""The next token of a row: its random number, the token that follows from it, and the strings that end a completion.

A random number is a pure function of (seed, step, prompt, completion, position). There is no generator and so no state:
a completion does not depend on who else is in the batch, on the order of work, or on what was sampled before a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oncurve.core.records import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: the step of the splitmix64 sequence (Steele, Lea, Flood 2014)."""


def stream_keys(seed: int, step: int, prompts: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """One 64-bit key per completion, mixed from the four numbers that name it."""
    mask = (1 << 64) - 1
    key = np.full(len(prompts), np.uint64(seed & mask))
    for part in (np.full(len(prompts), np.uint64(step & mask)), prompts.astype(np.uint64), indices.astype(np.uint64)):
        key = mix(key + GOLDEN * (part + np.uint64(1)))
    return key


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in (0, 1) for each key at its position in the completion, with 52 random bits.

    With a bit more, the largest number would round to 1 and draw a token that lies outside the distribution.
    """
    bits = mix(keys + GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64; arrays wrap around modulo 2^64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def first_above(p: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The first token of each row whose cumulative probability, among those that may be drawn, exceeds the number."""
    cumulative = p.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform[:, None].double() * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=p.shape[1] - 1)


def draw(
    logits: Float[Tensor, "B V"],
    uniform: Float[Tensor, " B"],
    params: SamplingParams,
    *,
    forbidden: Sequence[int] = (),
    find: Callable[[Tensor, Tensor], Tensor] = first_above,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """The next token of each row and its log-probability at the temperature, in float32.

    The token depends on this row's logits and uniform number alone. The log-probability is that of the whole
    distribution, before top-p, top-k, min-p and forbidden tokens cut it, as the trainer computes it. Temperature 0
    takes the largest logit; its log-probability is at temperature 1. ``find`` is a faster ``first_above``.
    """
    scaled = logits.float() if params.temperature in (0, 1) else logits.float() / params.temperature
    if params.temperature == 0 or forbidden:  # what is allowed may be so improbable that its probability is none
        log_p = torch.log_softmax(scaled, dim=-1)
        allowed = log_p.clone()
        if forbidden:
            allowed[:, list(forbidden)] = -torch.inf
        tokens = allowed.argmax(dim=-1) if params.temperature == 0 else find(restrict(allowed.exp(), params), uniform)
        return tokens, log_p.gather(1, tokens[:, None]).squeeze(1)
    p = torch.softmax(scaled, dim=-1)
    tokens = find(restrict(p, params), uniform)
    return tokens, p.gather(1, tokens[:, None]).squeeze(1).log_()


def restrict(p: Float[Tensor, "B V"], params: SamplingParams) -> Float[Tensor, "B V"]:
    """Probabilities with those outside top-k, top-p and min-p set to zero, in that order, not renormalized."""
    if 0 < params.top_k < p.shape[1]:
        p = torch.where(p >= p.topk(params.top_k, dim=-1).values[:, -1:], p, 0.0)
    if params.top_p < 1:
        largest, limit = p.topk(min(1024, p.shape[1])).values, params.top_p * p.sum(dim=-1, keepdim=True)
        if p.is_cuda or (largest.sum(dim=-1, keepdim=True) < limit).any():  # rare; a graph of CUDA cannot ask
            largest = p.sort(dim=-1, descending=True).values
        count = (largest.cumsum(dim=-1) - largest < limit).sum(dim=-1, keepdim=True)
        last = largest.gather(1, count - 1)
        equal, spare = p == last, count - (largest > last).sum(dim=-1, keepdim=True)
        p = torch.where((p > last) | (equal & (equal.cumsum(dim=-1) <= spare)), p, 0.0)
    if params.min_p > 0:
        p = torch.where(p >= params.min_p * p.amax(dim=-1, keepdim=True), p, 0.0)
    return p


class StopStrings:
    """Looks for stop strings at the end of running completions by decoding only their last tokens."""

    def __init__(
        self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, can_end: np.ndarray | None = None
    ) -> None:
        """``can_end`` says of each token id whether it can end one; other completions are not decoded. None: any."""
        self.stop = tuple(text for text in stop if text)
        self.tokenizer = tokenizer
        # A token is at least one byte, except tokens that decode to nothing: eight spare tokens allow for those.
        self.window = max((len(text.encode()) for text in self.stop), default=0) + 8
        self._can_end = can_end

    def ended(self, completions: Sequence[list[int]]) -> list[bool]:
        """Which completions hold a stop string that their last token finished."""
        newest = np.array([ids[-1] if ids else -1 for ids in completions], dtype=np.int64)
        return self.ended_by(newest, lambda row: completions[row][-self.window :]).tolist()

    def ended_by(self, newest: np.ndarray, recent: Callable[[int], list[int]]) -> np.ndarray:
        """Which completions hold a stop string that their newest token finished.

        ``recent`` gives the last ``window`` tokens of a completion by its index, and is asked of few.
        """
        has_stop = np.zeros(len(newest), dtype=bool)
        candidates = np.flatnonzero(self._may_have_ended(newest)).tolist() if self.stop else []
        if candidates:
            chosen = [recent(row) for row in candidates]
            tails = self._decode(chosen)
            has_stop[candidates] = [
                any(text in tail for text in self.stop) and self._is_new(tail, ids)
                for tail, ids in zip(tails, chosen, strict=True)
            ]
        return has_stop

    def _may_have_ended(self, newest: np.ndarray) -> np.ndarray:
        """Tokens that can end a stop string, and those of which the table knows nothing."""
        if self._can_end is None:
            return np.ones(len(newest), dtype=bool)
        is_known = (newest >= 0) & (newest < len(self._can_end))
        return ~is_known | self._can_end[np.where(is_known, newest, 0)]

    def _is_new(self, tail: str, ids: list[int]) -> bool:
        """The last token finished a stop string; one that was there before it has been let pass."""
        [before] = self._decode([ids[:-1]])
        return any(tail.rfind(text) > before.rfind(text) for text in self.stop)

    def _decode(self, sequences: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=False, clean_up_tokenization_spaces=False)
