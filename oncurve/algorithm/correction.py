"""Importance weights for a sampler whose probabilities differ from the trainer's.

Two programs, or two number formats, never agree to the last digit, so the samples come from a policy slightly unlike
the one in training. Every function here has the same signature and gives the weight of each token, a constant. A level
says whose ratio is meant, c_t = p_trainer,t / p_sampler,t being that of a token:

    token       c_t itself
    sequence    prod_t c_t, which grows or vanishes with the length of the completion
    geometric   (prod_t c_t)^(1/|o|), which does not

Sources disagree: llmdata.com/blog/mismatch-praxis finds truncation at token level most robust, while
richardli.xyz/rl-collapse and arXiv:2512.23075 argue for masks over whole completions, the geometric one among them.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oncurve.core.formulas import sequence_ratio

Level = Literal["token", "sequence", "geometric"]


def truncate(
    trainer_logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> Float[Tensor, "B T"]:
    """The ratio, held between two bounds.

        weight = clip(c, low, high)                   truncated importance sampling, Yao et al. 2025

    Few tokens of large ratio cannot take over, at the price of a small bias.
    """
    return sampler_ratio(trainer_logprobs, sampler_logprobs, mask, level=level).clamp(low, high)


def mask_out(
    trainer_logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> Float[Tensor, "B T"]:
    """The ratio inside the bounds and 0 outside: what is too far off is not trained on.

        weight = c if low <= c <= high else 0         IcePop: token, low 0.5, high 5; Ring-1T, arXiv:2510.18855

    At sequence level a long completion is lost to noise alone: 0.01 per token drops a fifth of the completions of 16k
    tokens at high 3. The geometric level has no such bias.
    """
    ratio = sampler_ratio(trainer_logprobs, sampler_logprobs, mask, level=level)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@torch.no_grad()
def without_off_policy(
    logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    threshold: float,
) -> Float[Tensor, "B T"]:
    """0 on a completion that is worse than its baseline and far from the policy by now, 1 elsewhere.

        d = 1/|o| sum_t (log p_sampler,t - log p_t)
        weight = 0 if A < 0 and d > threshold else 1  off-policy sequence mask, DeepSeek-V3.2, arXiv:2512.02556

    The policy no longer writes such a completion, and its unbounded penalty only disturbs. ``logprobs`` are those of
    the policy now, so that the distance grows with every update on the batch and with the age of the completion.
    """
    distance = torch.where(mask, sampler_logprobs - logprobs, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    is_left_out = (advantages < 0) & (distance > threshold)
    return (~is_left_out)[:, None].expand_as(logprobs).to(logprobs.dtype)


@torch.no_grad()
def sampler_ratio(
    trainer_logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    level: Level,
) -> Float[Tensor, "B T"]:
    """c of each token at a level; 1 where there is no token."""
    log_ratio = torch.where(mask, trainer_logprobs - sampler_logprobs, 0.0)
    if level == "token":
        return torch.exp(log_ratio)
    if level == "geometric":
        return sequence_ratio(log_ratio, mask).expand_as(log_ratio)
    return torch.exp(log_ratio.sum(dim=1, keepdim=True)).expand_as(log_ratio)
