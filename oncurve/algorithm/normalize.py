"""How do losses of tokens become one scalar? The denominator is always handed in, never taken from a microbatch."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oncurve.batch import Size


def sequence_mean(loss: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, of: Size) -> Float[Tensor, ""]:
    """Mean over the tokens of each completion, then over the completions of the update.

        L = 1/N sum_i 1/|o_i| sum_t l_it              DeepSeekMath, arXiv:2402.03300, equation 3

    A token of a short completion weighs more than one of a long completion. A completion without a token counts in N.
    """
    tokens = mask.sum(dim=1).clamp(min=1)
    return (torch.where(mask, loss, 0.0).sum(dim=1) / tokens).sum() / max(of.num_rows, 1)


def token_mean(loss: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, of: Size) -> Float[Tensor, ""]:
    """Mean over all completion tokens of the update.

    L = sum_it l_it / sum_i |o_i|                 DAPO, arXiv:2503.14476, equation 8
    """
    return torch.where(mask, loss, 0.0).sum() / max(of.num_tokens, 1)


def constant(
    loss: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, of: Size, tokens_per_row: int
) -> Float[Tensor, ""]:
    """Sum over the tokens, divided by a number that does not depend on what was sampled.

        L = sum_it l_it / (N tokens_per_row)          Dr. GRPO, arXiv:2503.20783, section 3.2

    ``tokens_per_row`` is the limit on completion tokens, so that a token weighs the same however long its completion.
    """
    return torch.where(mask, loss, 0.0).sum() / (max(of.num_rows, 1) * tokens_per_row)


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the elements where the mask is True, over all dimensions or one; NaN where it is True nowhere.

        mean = sum(x m) / sum(m)                      CS336 (2025), assignment 5

    For statistics. A loss uses the normalizers above, whose denominators do not depend on the microbatch.

    >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])).item()
    1.5
    """
    kept = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))
    if dim is None:
        return kept.sum() / mask.sum()
    return kept.sum(dim=dim) / mask.sum(dim=dim)
