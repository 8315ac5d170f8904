"""Schedule by which the reference of a KL term follows the policy."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def move_reference(reference: nn.Module, policy: nn.Module, *, share: float) -> None:
    """Move the weights of the reference toward those of the policy, in place.

        theta_ref <- (1 - share) theta_ref + share theta      TR-DPO, arXiv:2404.09656
        theta_ref <- theta                                    share=1; DeepSeekMath, arXiv:2402.03300, algorithm 1

    share=1 every n steps is the outer iteration of DeepSeekMath; a small share after every step is an exponential
    moving average, which has the memory of about 1 / share steps.

    Raises ValueError if the two are not the same model.
    """
    targets, sources = dict(reference.named_parameters()), dict(policy.named_parameters())
    if targets.keys() != sources.keys():
        strange = sorted(targets.keys() ^ sources.keys())[0]
        raise ValueError(f"the reference cannot follow the policy: only one of them has the weight {strange}")
    for name, target in targets.items():
        source = sources[name].to(target)
        if share == 1:
            target.copy_(source)
        else:
            target.lerp_(source, share)
