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
    log_p = torch.log_softmax(logits.float() / (params.temperature or 1.0), dim=-1)
    allowed = log_p
    if forbidden:
        allowed = log_p.clone()
        allowed[:, forbidden] = -torch.inf
    if params.temperature == 0:
        tokens = allowed.argmax(dim=-1)
        return tokens, log_p.gather(1, tokens[:, None]).squeeze(1)
    p = restrict(allowed.exp(), params)
    cumulative = p.double().cumsum(dim=-1)
    threshold = uniform[:, None].double() * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    tokens = tokens.clamp(max=logits.shape[1] - 1)
    return tokens, log_p.gather(1, tokens[:, None]).squeeze(1)


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
