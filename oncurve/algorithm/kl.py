"""Estimators of the KL divergence from the reference, from the sampled tokens.

Every function here has the same signature. d = log p - log p_ref of a token that the policy sampled. An estimate can be
right in value and wrong as a loss, because the gradient of a mean over samples misses that the samples move too:

    in the loss         gradient, on the policy's own samples         with importance = True
    k1                  zero on average                               that of KL(policy || reference)
    k2                  that of KL(policy || reference)               that of E[d^2] / 2, no KL
    k3                  that of KL(reference || policy)               that of KL(policy || reference)
    absolute            that of E[sign(d) log p], no KL               that of E|d|
    in the reward       k1 has the gradient of KL(policy || reference); the others have not

arXiv:2510.01555; arXiv:2512.21852; DeepSeek-V3.2, arXiv:2512.02556.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def k1(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The log-ratio, whose mean over tokens of the policy is the KL. It can be negative.

        k1 = log p - log p_ref                        Schulman 2020, "Approximating KL divergence"

    For the reward. In a loss without importance weights its gradient is zero on average.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Half the squared log-ratio: biased in value, right in gradient.

        k2 = (log p - log p_ref)^2 / 2                Schulman 2020, "Approximating KL divergence"

    On the policy's own samples its gradient is that of KL(policy || reference).
    """
    return (logprobs - ref_logprobs) ** 2 / 2


def k3(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """An estimate of KL(policy || reference) that is never negative.

        k3 = exp(log p_ref - log p) - (log p_ref - log p) - 1   Schulman 2020, "Approximating KL divergence"

    Its mean over tokens of the policy is the KL. As a loss, its gradient is that of the forward KL(ref || policy).

    >>> k3(torch.zeros(1, 1), torch.zeros(1, 1)).item()
    0.0
    """
    difference = ref_logprobs - logprobs
    return torch.exp(difference) - difference - 1


def absolute(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The size of the log-ratio: no KL, but a measure of distance that outliers do not dominate.

        abs = |log p - log p_ref|

    As a loss it pulls every token back with the same force, however far it is.
    """
    return (logprobs - ref_logprobs).abs()


def k1_reversed(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The log-ratio the wrong way round, as some texts print it: mean(log p_old - log p).

        -k1 = log p_ref - log p

    On tokens that the reference sampled it estimates KL(reference || policy). Against the policy that sampled, with one
    update per batch, value and mean gradient are zero. Only to reproduce such a text.
    """
    return ref_logprobs - logprobs


def importance_corrected(
    kl: Float[Tensor, "B T"], log_ratio: Float[Tensor, "B T"] | Float[Tensor, "B 1"]
) -> Float[Tensor, "B T"]:
    """The estimate times the ratio of its token, which carries gradient.

        w_t k_t, w_t = exp(log p_t - log p_old,t)    DeepSeek-V3.2, arXiv:2512.02556

    Its mean over tokens of the old policy is the mean over those of the policy, in value and in gradient. ``log_ratio``
    of shape [B, 1] is that of a whole completion (GSPO), an approximation.
    """
    return kl * torch.exp(log_ratio)


def per_completion(kl: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """The KL of each completion, the sum over its tokens, as it is subtracted from a reward."""
    return torch.where(mask, kl, 0.0).sum(dim=1)
