"""Token losses: what one token of a completion contributes to the loss.

Every loss has the same signature, so that a row of the table of algorithms can name any of them. A loss returns one
number per token, also on masked tokens, and one that clips or caps also says where; a normalizer turns the numbers into
a scalar. Beside them stands the choice of the tokens that a loss is computed on. w_t = exp(log p_t - log p_old,t) is
the ratio of a token, |o| the number of tokens of its completion, sg[.] what is taken as a constant.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oncurve.algorithm.table import RATIO_CAP
from oncurve.core.algorithm import TokenLoss
from oncurve.core.batch import Size
from oncurve.core.formulas import clip, clip_fractions, clipped, is_clipped, sequence_ratio


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


def importance_weighted(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """The ratio times the advantage, without any bound.

        l_t = -w_t A                                  PPO, arXiv:1707.06347, equation 6

    What clipping is measured against. With stale completions a few tokens of large ratio take over.
    """
    return -torch.exp(logprobs - old_logprobs) * advantages[:, None]


def sequence_clipped(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    ratio_max: float | None = None,
) -> tuple[Float[Tensor, "B T"], dict[str, Bool[Tensor, "B T"]]]:
    """The clipped surrogate of the whole completion, the same number on each of its tokens.

        s = (p(o) / p_old(o))^(1/|o|) = exp(1/|o| sum_t log w_t)
        l_t = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)         GSPO, arXiv:2507.18071, equation 5

    Take sequence_mean with it, which gives the objective of the paper; sequence_sum gives that of LUSPO,
    arXiv:2602.05261. A geometric mean moves far less than a token's ratio, hence bounds of a few 1e-4.
    """
    ratio = sequence_ratio(logprobs - old_logprobs, mask).expand_as(logprobs)
    is_limited = is_clipped(ratio, advantages, clip_low, clip_high, ratio_max)
    return clip(ratio, advantages[:, None], clip_low, clip_high, ratio_max), clip_fractions(is_limited, advantages)


def sequence_clipped_token(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    ratio_max: float | None = None,
) -> tuple[Float[Tensor, "B T"], dict[str, Bool[Tensor, "B T"]]]:
    """The ratio of the completion as the value, the token's own probability as the gradient.

        s_t = sg[s] p_t / sg[p_t], s as in sequence_clipped
        l_t = -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)     GSPO-token, arXiv:2507.18071, equation 13

    Summed over a completion, value and gradient are those of ``sequence_clipped``: it differs once the tokens of a
    completion have different advantages.
    """
    whole = sequence_ratio((logprobs - old_logprobs).detach(), mask)
    ratio = torch.exp(torch.log(whole) + logprobs - logprobs.detach())
    is_limited = is_clipped(whole.expand_as(logprobs), advantages, clip_low, clip_high, ratio_max)
    return clip(ratio, advantages[:, None], clip_low, clip_high, ratio_max), clip_fractions(is_limited, advantages)


def truncated_importance(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    ratio_max: float = RATIO_CAP,
) -> tuple[Float[Tensor, "B T"], dict[str, Bool[Tensor, "B T"]]]:
    """The policy gradient weighted by the capped ratio, which is a constant: no token loses its gradient.

        l_t = -sg[min(w_t, ratio_max)] A log p_t      CISPO, MiniMax-M1, arXiv:2506.13585

    The cap is the largest ratio itself, not its distance from 1: below 1 it would scale every token. The paper also has
    a lower bound and does not use it. ScaleRL, arXiv:2510.13786, found caps from 4 to 8 equal.
    """
    ratio = torch.exp(logprobs - old_logprobs).detach()
    loss = -ratio.clamp(max=ratio_max) * advantages[:, None] * logprobs
    return loss, clip_fractions(is_capped(ratio, advantages, ratio_max), advantages)


def sequence_truncated_importance(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    ratio_max: float = RATIO_CAP,
) -> tuple[Float[Tensor, "B T"], dict[str, Bool[Tensor, "B T"]]]:
    """Truncated importance with one ratio per completion: its tokens share a weight, which is a constant.

        s = (p(o) / p_old(o))^(1/|o|), as in sequence_clipped
        l_t = -sg[min(s, ratio_max)] A log p_t        CISPO, arXiv:2506.13585, with the ratio of arXiv:2507.18071

    The geometric mean stays close to 1, so that a usual cap rarely holds anything back.
    """
    ratio = sequence_ratio((logprobs - old_logprobs).detach(), mask).expand_as(logprobs)
    loss = -ratio.clamp(max=ratio_max) * advantages[:, None] * logprobs
    return loss, clip_fractions(is_capped(ratio, advantages, ratio_max), advantages)


def soft_gated(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    sharpness_positive: float = 1.0,
    sharpness_negative: float = 1.05,
) -> Float[Tensor, "B T"]:
    """A sigmoid of the ratio in place of clipping; bad completions get the sharper one.

        l_t = -4/k sigmoid(k (w_t - 1)) A, k = sharpness_positive if A > 0 else sharpness_negative
                                                      SAPO, arXiv:2511.20347

    At w_t = 1 its slope is 1, so that on policy the gradient is that of the plain policy gradient. Its value there is
    2/k A and not A: only gradients compare with the other losses.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    return _gate(ratio, advantages[:, None], sharpness_positive, sharpness_negative)


def sequence_soft_gated(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    sharpness_positive: float = 1.0,
    sharpness_negative: float = 1.05,
) -> Float[Tensor, "B T"]:
    """The soft gate on one ratio per completion, the same number on each of its tokens.

        s = (p(o) / p_old(o))^(1/|o|), as in sequence_clipped
        l_t = -4/k sigmoid(k (s - 1)) A, k as in soft_gated        SAPO, arXiv:2511.20347, on sequences

    Take sequence_mean with it, as with sequence_clipped.
    """
    ratio = sequence_ratio(logprobs - old_logprobs, mask)
    return _gate(ratio, advantages[:, None], sharpness_positive, sharpness_negative).expand_as(logprobs)


def sequence_gated(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> Float[Tensor, "B T"]:
    """The policy gradient weighted by a smooth bump of the whole completion's ratio, which is a constant.

        W = p(o) / p_old(o), kept in [1e-8, e^20]; phi = W^k e^(d (1 - W)), k and d by the sign of A
        l_t = -sg[phi] A log p_t                      VESPO, arXiv:2602.10693

    phi is 1 on policy. W is the product over tokens, not a mean: long completions leave 1 quickly.
    """
    weight = advantages[:, None]
    total = torch.where(mask, (logprobs - old_logprobs).detach(), 0.0).clamp(-20, 20).sum(dim=1, keepdim=True)
    log_ratio = total.clamp(math.log(1e-8), 20)
    power = torch.full_like(weight, power_negative).masked_fill(weight >= 0, power_positive)
    decay = torch.full_like(weight, decay_negative).masked_fill(weight >= 0, decay_positive)
    phi = torch.exp(decay + power * log_ratio - decay * torch.exp(log_ratio))
    return -phi * weight * logprobs


LOSSES: dict[str, TokenLoss] = {
    function.__name__: function
    for function in (
        policy_gradient,
        importance_weighted,
        clipped,
        sequence_clipped,
        sequence_clipped_token,
        truncated_importance,
        sequence_truncated_importance,
        soft_gated,
        sequence_soft_gated,
        sequence_gated,
    )
}
"""The functions by the names of the table, which says of each whose ratio it takes and what limits it."""


def is_capped(ratio: Float[Tensor, "B T"], advantages: Float[Tensor, " B"], ratio_max: float) -> Bool[Tensor, "B T"]:
    """Tokens whose weight truncated importance holds back; their gradient is smaller, not gone."""
    return (ratio > ratio_max) & (advantages[:, None] != 0)


def high_entropy(entropy: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, share: float) -> Bool[Tensor, "B T"]:
    """The given fraction of the tokens under the mask, those of highest entropy; ties may add some.

        H_t >= quantile(H, 1 - share)                 Beyond the 80/20 rule, arXiv:2506.01939

    Give it all tokens of a step: over a microbatch the threshold would depend on how rows were put together.
    """
    values = entropy[mask]
    if not len(values):
        return torch.zeros_like(mask)
    ordered = values.sort().values  # torch.quantile takes at most 2^24 values
    rank = (1 - share) * (len(values) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    threshold = low + (high - low) * (rank - math.floor(rank))
    return mask & (entropy >= threshold)


def _gate(ratio: Tensor, weight: Tensor, sharpness_positive: float, sharpness_negative: float) -> Tensor:
    """-4/k sigmoid(k (w - 1)) A, k by the sign of A."""
    sharpness = torch.full_like(weight, sharpness_negative).masked_fill(weight > 0, sharpness_positive)
    return -4 / sharpness * torch.sigmoid(sharpness * (ratio - 1)) * weight


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
