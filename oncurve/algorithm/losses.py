"""What does one token of a completion contribute to the loss?

Every function here has the same signature, so that a row of the table of algorithms can name any of them. They return
one number per token, also on masked tokens; a normalizer turns them into a scalar.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def policy_gradient(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """The plain policy gradient: the log-probability of a token weighted by the advantage of its completion.

        l_t = -A log p_t                              REINFORCE, Williams 1992

    With raw rewards as advantages this is the loss ``no_baseline``, with group-relative ones
    ``reinforce_with_baseline``. The old log-probabilities are not used: it is right for one update per batch only.
    """
    return -advantages[:, None] * logprobs


def clipped(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Tensor, "B T"]:
    """PPO's clipped surrogate: no gain from moving a token's ratio further than the bounds.

        w_t = exp(log p_t - log p_old,t)
        l_t = -min(w_t A, clip(w_t, 1 - clip_low, 1 + clip_high) A)     PPO, arXiv:1707.06347, equation 7

    With one update per batch w_t is 1 and the gradient is that of the plain policy gradient.

    >>> zero = torch.zeros(1, 1)
    >>> round(clipped(zero + 0.4, zero, torch.ones(1), zero == 0).item(), 3)  # exp(0.4) = 1.49 is cut to 1.2
    -1.2
    """
    ratio = torch.exp(logprobs - old_logprobs)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    weight = advantages[:, None]
    return -torch.minimum(ratio * weight, bounded * weight)


def is_clipped(
    ratio: Float[Tensor, "B T"], advantages: Float[Tensor, " B"], *, clip_low: float, clip_high: float
) -> Bool[Tensor, "B T"]:
    """Tokens whose gradient the clipped loss removes: the ratio left the bounds in the direction of the advantage."""
    weight = advantages[:, None]
    return ((ratio > 1 + clip_high) & (weight > 0)) | ((ratio < 1 - clip_low) & (weight < 0))
