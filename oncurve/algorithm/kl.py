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

from jaxtyping import Float
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
