"""How far is the policy from the reference, estimated from the sampled tokens?"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def k3(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """An estimate of KL(policy || reference) that is never negative.

        d = log p_ref - log p;  k3 = exp(d) - d - 1   Schulman 2020, "Approximating KL divergence"

    Its mean over tokens of the policy is the KL. As a loss, its gradient is that of the forward KL(ref || policy).

    >>> k3(torch.zeros(1, 1), torch.zeros(1, 1)).item()
    0.0
    """
    difference = ref_logprobs - logprobs
    return torch.exp(difference) - difference - 1
