"""Which token comes next, given the logits and one uniform number per row?"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oncurve.rollouts.base import SamplingParams


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
        allowed[:, forbidden] = -torch.inf
        tokens = allowed.argmax(dim=-1) if params.temperature == 0 else _first_above(allowed.exp(), uniform, params)
        return tokens, log_p.gather(1, tokens[:, None]).squeeze(1)
    p = torch.softmax(scaled, dim=-1)
    tokens = _first_above(p, uniform, params)
    return tokens, p.gather(1, tokens[:, None]).squeeze(1).log_()


def _first_above(p: Tensor, uniform: Tensor, params: SamplingParams) -> Tensor:
    """The first token of each row whose cumulative probability, among those that may be drawn, exceeds the number."""
    cumulative = restrict(p, params).cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform[:, None].double() * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=p.shape[1] - 1)


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
