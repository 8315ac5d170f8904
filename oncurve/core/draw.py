"""The token that comes next, given the logits and one uniform number per row."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oncurve.core.records import SamplingParams

SMALLEST_PART, LARGEST_PART = 64, 1024
"""Words of a part of the vocabulary, where a GPU looks for the next token."""


def draw(
    logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"], params: SamplingParams, *, forbidden: list[int]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """The next token of each row and its log-probability at the temperature, in float32.

    The token is the first whose cumulative probability exceeds the uniform number, so that it depends on this row's
    logits and number alone. The log-probability is that of the whole distribution, before top-p, top-k, min-p and
    forbidden tokens cut it, as the trainer computes it. Temperature 0 takes the largest logit; its log-probability is
    at temperature 1.
    """
    scaled = logits.float() if params.temperature in (0, 1) else logits.float() / params.temperature
    if params.temperature == 0 or forbidden:  # what is allowed may be so improbable that its probability is none
        log_p = torch.log_softmax(scaled, dim=-1)
        allowed = log_p.clone()
        if forbidden:
            allowed[:, forbidden] = -torch.inf
        tokens = allowed.argmax(dim=-1) if params.temperature == 0 else _first_above(allowed.exp(), uniform, params)
        return tokens, log_p.gather(1, tokens[:, None]).squeeze(1)
    p = torch.softmax(scaled, dim=-1)
    tokens = _first_above(p, uniform, params)
    return tokens, p.gather(1, tokens[:, None]).squeeze(1).log_()


def _first_above(p: Tensor, uniform: Tensor, params: SamplingParams) -> Tensor:
    """The first token of each row whose cumulative probability, among those that may be drawn, exceeds the number."""
    allowed = restrict(p, params)
    if p.is_cuda and (width := part_width(p.shape[1])):
        return first_above_by_parts(allowed, uniform, width)
    cumulative = allowed.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform[:, None].double() * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=p.shape[1] - 1)


def part_width(words: int) -> int:
    """Into parts of how many words a vocabulary can be cut; 0 if it is not worth it."""
    width = min(words & -words, LARGEST_PART)
    return width if width >= SMALLEST_PART else 0


def first_above_by_parts(p: Tensor, uniform: Tensor, width: int) -> Tensor:
    """The same token, found by the sums of parts of the vocabulary first, and then in its part.

    The cumulative sums of a whole vocabulary in float64 are twice its size, written and read again.
    """
    parts = p.unflatten(1, (-1, width))
    sums = parts.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold = uniform[:, None].double() * sums[:, -1:]
    part = torch.searchsorted(sums, threshold, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, part)
    chosen = parts.gather(1, part[..., None].expand(-1, -1, width)).squeeze(1)
    cumulative = chosen.cumsum(dim=-1, dtype=torch.float64).add_(before)
    # By its own sum a part may end a rounding before the threshold: then it is the last of its words with a probability
    last = torch.nextafter(cumulative[:, -1:], torch.zeros_like(threshold))
    word = torch.searchsorted(cumulative, torch.minimum(threshold, last), right=True).clamp_(max=width - 1)
    return torch.add(word, part, alpha=width).squeeze(1)


def restrict(p: Float[Tensor, "B V"], params: SamplingParams) -> Float[Tensor, "B V"]:
    """Probabilities with those outside top-k, top-p and min-p set to zero, in that order, not renormalized."""
    if 0 < params.top_k < p.shape[1]:
        kth = p.topk(params.top_k, dim=-1).values[:, -1:]
        p = torch.where(p >= kth, p, 0.0)
    if params.top_p < 1:
        largest, order = p.sort(dim=-1, descending=True)
        before = largest.cumsum(dim=-1) - largest
        keep = before < params.top_p * largest.sum(dim=-1, keepdim=True)
        p = torch.zeros_like(p).scatter(1, order, torch.where(keep, largest, 0.0))
    if params.min_p > 0:
        p = torch.where(p >= params.min_p * p.amax(dim=-1, keepdim=True), p, 0.0)
    return p
