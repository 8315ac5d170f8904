"""Normalizers from token losses to one scalar. The denominator is always an argument, never taken from a microbatch.

Every function here has the same signature, so that a row of the table of algorithms can name any of them. l_it is the
loss of token t of completion i, N the number of completions of the update, P that of its prompts.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oncurve.core.batch import Size


def constant(
    loss: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    of: Size,
    tokens_per_row: int,
    prompt_tokens: Int[Tensor, " B"] | None = None,
    row_tokens: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """Sum over the tokens, divided by a number that does not depend on what was sampled.

        L = sum_it l_it / (N tokens_per_row)          Dr. GRPO, arXiv:2503.20783, section 3.2

    ``tokens_per_row`` is the limit on completion tokens, so that a token weighs the same however long its completion.
    """
    return torch.where(mask, loss, 0.0).sum() / (max(of.num_rows, 1) * tokens_per_row)


def prompt_mean(
    loss: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    of: Size,
    prompt_tokens: Int[Tensor, " B"] | None = None,
    row_tokens: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """Mean over the completion tokens of each prompt, then over the prompts of the update.

        L = 1/P sum_p sum_{i in p} sum_t l_it / sum_{i in p} |o_i|       ScaleRL, arXiv:2510.13786

    ``prompt_tokens`` holds for each row the trained tokens of all rows of its prompt in the update: a group may be
    spread over microbatches, so it cannot be counted here.

    Raises ValueError without ``prompt_tokens``.
    """
    if prompt_tokens is None:
        raise ValueError("prompt_mean needs the number of trained tokens of each row's prompt in the update")
    per_row = torch.where(mask, loss, 0.0).sum(dim=1) / prompt_tokens.clamp(min=1)
    return per_row.sum() / max(of.num_prompts, 1)


def sequence_sum(
    loss: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    of: Size,
    prompt_tokens: Int[Tensor, " B"] | None = None,
    row_tokens: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """Sum over the tokens of each completion, then mean over the completions of the update.

        L = 1/N sum_i sum_t l_it                      REINFORCE on log p(o) = sum_t log p_t, arXiv:2402.14740

    The loss grows with the length of completions, and so does the step that a learning rate makes.
    """
    return torch.where(mask, loss, 0.0).sum() / max(of.num_rows, 1)


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the elements where the mask is True, over all dimensions or one; NaN where it is True nowhere.

        mean = sum(x m) / sum(m)                      CS336 (2025), assignment 5

    For statistics. A loss uses the normalizers above, whose denominators do not depend on the microbatch.

    >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])).item()
    1.5
    """
    masked = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))
    if dim is None:
        return masked.sum() / mask.sum()
    return masked.sum(dim=dim) / mask.sum(dim=dim)
