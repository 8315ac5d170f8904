"""The formulas of GRPO: advantages, the token loss, normalizers, the KL to a reference, and the entropy bonus.

Functions of tensors, without configuration, device or randomness inside. Further rows of each kind, and the names of
algorithms that are made of them, stand in ``oncurve/algorithm/``.

Advantages take the rewards of a step [P, G]. Completions without a reward are left out of every mean and get zero, and
so does a group without signal. Token losses take log-probabilities [B, T] and give one number per token, also on masked
ones, and, if they measure something, its value on each token by the name of the metric; w_t = exp(log p_t - log
p_old,t) is the ratio of a token, |o| the number of tokens of its completion. Normalizers turn them into a scalar; the
denominator is always an argument, never taken from a microbatch. l_it is the loss of token t of completion i, N the
number of completions of the update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oncurve.core.batch import Rewards, Size
from oncurve.core.records import EQUAL_WITHIN


def group_relative(
    rewards: Rewards, *, scale_by_std: bool = True, ddof: int = 1, epsilon: float = 1e-6
) -> Float[Tensor, "P G"]:
    """Each reward minus the mean of its group, divided by the group's standard deviation if asked for.

        A_i = (r_i - mean(r)) / (std(r) + epsilon)    DeepSeekMath, arXiv:2402.03300, section 4.1
        A_i = r_i - mean(r)                           Dr. GRPO, arXiv:2503.20783; scale_by_std=False

    DeepSeekMath does not say which standard deviation it means. ddof=1 (divide by G - 1, as torch.std does) makes the
    advantages smaller than ddof=0 (divide by G) by sqrt((G - 1) / G): 0.866 instead of 1 for rewards 1, 1, 0, 0.

    Raises ValueError for a group of one, which has no baseline.

    >>> group_relative(Rewards.of([[1.0, 1.0, 0.0, 0.0]]), ddof=0, epsilon=0.0).tolist()
    [[1.0, 1.0, -1.0, -1.0]]
    """
    refuse_groups_of_one(rewards)
    centered = center(rewards.values, rewards.graded)
    if not scale_by_std:
        return centered
    count = rewards.graded.sum(dim=1, keepdim=True)
    variance = (centered**2).sum(dim=1, keepdim=True) / (count - ddof).clamp(min=1)
    return divide(centered, variance.sqrt() + epsilon)


def center(values: Float[Tensor, "P G"], graded: Bool[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """Each reward minus the mean of the graded ones; exactly zero in a group of equal or fewer than two rewards."""
    count = graded.sum(dim=1, keepdim=True)
    mean = torch.where(graded, values, 0.0).sum(dim=1, keepdim=True) / count.clamp(min=1)
    return torch.where(graded & has_signal(values, graded)[:, None], values - mean, 0.0)


def has_signal(values: Float[Tensor, "P G"], graded: Bool[Tensor, "P G"]) -> Bool[Tensor, " P"]:
    """Groups with at least two graded rewards that differ by 1e-6 or more; the others teach nothing."""
    highest = torch.where(graded, values, -torch.inf).amax(dim=1)
    return highest - torch.where(graded, values, torch.inf).amin(dim=1) >= EQUAL_WITHIN


def refuse_groups_of_one(rewards: Rewards) -> None:
    """Raise ValueError where a group cannot have a baseline because it has one member."""
    if rewards.values.shape[1] < 2:
        raise ValueError("a group of one has no baseline; sample at least 2 completions per prompt")


def divide(values: Tensor, divisor: Tensor) -> Tensor:
    """values / divisor; zero stays zero where the divisor is zero too."""
    return values / divisor.clamp(min=torch.finfo(values.dtype).tiny)


def clipped(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_max: float | None = None,
) -> tuple[Float[Tensor, "B T"], dict[str, Bool[Tensor, "B T"]]]:
    """PPO's clipped surrogate: no gain from moving a token's ratio further than the bounds.

        l_t = -min(w_t A, clip(w_t, 1 - clip_low, 1 + clip_high) A)     PPO, arXiv:1707.06347, equation 7

    clip_high above clip_low leaves rare tokens more room to rise (DAPO, arXiv:2503.14476). ``ratio_max`` also bounds
    the loss of a bad completion's token, which min leaves unbounded: w_t becomes min(w_t, ratio_max) first (dual
    clipping, arXiv:1912.09729; INTELLECT-2, arXiv:2505.07291); below 1 + clip_high it is the upper bound of good ones,
    and 1 + clip_high that of bad ones. With one update per batch w_t is 1 and the gradient is that of the plain policy
    gradient. Its statistics are the tokens whose gradient the clipping removes.

    >>> zero = torch.zeros(1, 1)
    >>> loss, statistics = clipped(zero + 0.4, zero, torch.ones(1), zero == 0)  # exp(0.4) = 1.49 is cut to 1.2
    >>> round(loss.item(), 3), statistics["policy/clip_fraction"].item()
    (-1.2, True)
    """
    ratio, bounds = torch.exp(logprobs - old_logprobs), (clip_low, clip_high, ratio_max)
    return clip(ratio, advantages[:, None], *bounds), clip_fractions(is_clipped(ratio, advantages, *bounds), advantages)


def clip(ratio: Tensor, weight: Tensor, clip_low: float, clip_high: float, ratio_max: float | None) -> Tensor:
    """-min(w A, clip(w) A), the unclipped w bounded by ``ratio_max`` where there is one."""
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    unclipped = ratio if ratio_max is None else ratio.clamp(max=ratio_max)
    return -torch.minimum(unclipped * weight, bounded * weight)


def is_clipped(
    ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    clip_low: float,
    clip_high: float,
    ratio_max: float | None = None,
) -> Bool[Tensor, "B T"]:
    """Tokens whose gradient a clipped loss removes: the ratio left the bounds in the direction of the advantage."""
    weight = advantages[:, None]
    highest = 1 + clip_high if ratio_max is None else min(1 + clip_high, ratio_max)
    removed = ((ratio > highest) & (weight > 0)) | ((ratio < 1 - clip_low) & (weight < 0))
    return removed if ratio_max is None else removed | ((ratio > max(1 + clip_high, ratio_max)) & (weight < 0))


def clip_fractions(is_limited: Bool[Tensor, "B T"], advantages: Float[Tensor, " B"]) -> dict[str, Bool[Tensor, "B T"]]:
    """The statistics of a loss that clips or caps tokens: all of those, and those of good completions."""
    is_good = advantages[:, None] > 0
    return {"policy/clip_fraction": is_limited, "policy/clip_high_fraction": is_limited & is_good}


def sequence_ratio(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B 1"]:
    """The geometric mean of the ratios of a completion's tokens; 1 for a completion without a token."""
    total = torch.where(mask, log_ratio, 0.0).sum(dim=1, keepdim=True)
    return torch.exp(total / mask.sum(dim=1, keepdim=True).clamp(min=1))


def sequence_mean(
    loss: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    of: Size,
    prompt_tokens: Int[Tensor, " B"] | None = None,
    row_tokens: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """Mean over the tokens of each completion, then over the completions of the update.

        L = 1/N sum_i 1/|o_i| sum_t l_it              DeepSeekMath, arXiv:2402.03300, equation 3

    A token of a short completion weighs more than one of a long completion. A completion without a token counts in N.
    ``row_tokens`` holds for each row the tokens of all rows of its completion, where one has several.
    """
    tokens = (mask.sum(dim=1) if row_tokens is None else row_tokens).clamp(min=1)
    return (torch.where(mask, loss, 0.0).sum(dim=1) / tokens).sum() / max(of.num_rows, 1)


def token_mean(
    loss: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    of: Size,
    prompt_tokens: Int[Tensor, " B"] | None = None,
    row_tokens: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """Mean over all completion tokens of the update.

        L = sum_it l_it / sum_i |o_i|                 DAPO, arXiv:2503.14476, equation 8

    Every token weighs the same, so that a long completion weighs more than a short one.
    """
    return torch.where(mask, loss, 0.0).sum() / max(of.num_tokens, 1)


def k3(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """An estimate of KL(policy || reference) that is never negative.

        k3 = exp(log p_ref - log p) - (log p_ref - log p) - 1   Schulman 2020, "Approximating KL divergence"

    Its mean over tokens of the policy is the KL. As a loss, its gradient is that of the forward KL(ref || policy).

    >>> k3(torch.zeros(1, 1), torch.zeros(1, 1)).item()
    0.0
    """
    difference = ref_logprobs - logprobs
    return torch.exp(difference) - difference - 1


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


@dataclass
class EntropyBonus:
    """The coefficient of the mean entropy in the loss; the only thing in an algorithm that changes.

        L = L_policy - c H,  H the mean entropy over the tokens of the update
        c_{k+1} = c_k + step if H_k <= target else c_k - step, kept in [0, highest]; used only while H_k <= target
                                                      Skywork-OR1, arXiv:2505.22312

    Without a target the coefficient stays what it is. The entropy that decides is that of the last step.
    """

    coefficient: float = 0.0
    target: float | None = None
    """In nats; None keeps the coefficient constant."""
    step: float = 0.005
    highest: float = 1.0
    measured: float = math.inf
    """Mean entropy of the last step; infinite before the first, so that nothing is added yet."""

    @property
    def applied(self) -> float:
        """The coefficient that the loss uses now."""
        if self.target is None:
            return self.coefficient
        return self.coefficient if self.measured <= self.target else 0.0

    def adapt(self, entropy: float) -> None:
        """Take note of the mean entropy of a step, and move the coefficient if there is a target.

        NaN, from a step that trained on nothing, changes nothing.
        """
        if math.isnan(entropy):
            return
        self.measured = entropy
        if self.target is not None:
            moved = self.coefficient + (self.step if entropy <= self.target else -self.step)
            self.coefficient = min(max(moved, 0.0), self.highest)

    def state_dict(self) -> dict[str, float]:
        """The state that a checkpoint must hold."""
        return {"coefficient": self.coefficient, "measured": self.measured}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what a checkpoint holds."""
        self.coefficient, self.measured = float(state["coefficient"]), float(state["measured"])
