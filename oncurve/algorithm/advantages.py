"""How does a completion compare with the others of its group?"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oncurve.batch import Rewards

EQUAL_WITHIN = 1e-6
"""Rewards of a group that differ by less than this count as equal."""


def group_relative(
    rewards: Rewards, *, scale_by_std: bool = True, ddof: int = 1, epsilon: float = 1e-6
) -> Float[Tensor, "P G"]:
    """Each reward minus the mean of its group, divided by the group's standard deviation if asked for.

        A_i = (r_i - mean(r)) / (std(r) + epsilon)    DeepSeekMath, arXiv:2402.03300, section 4.1
        A_i =  r_i - mean(r)                          Dr. GRPO, arXiv:2503.20783; scale_by_std=False

    DeepSeekMath does not say which standard deviation it means. ddof=1 (divide by G - 1, as torch.std does) makes the
    advantages smaller than ddof=0 (divide by G) by sqrt((G - 1) / G): 0.866 instead of 1 for rewards 1, 1, 0, 0.

    A group whose rewards differ by less than 1e-6 counts as equal and gets exactly zero: in float32, eight rewards of
    0.7 have a standard deviation of 6e-8, and dividing by it would give every completion an advantage of 0.94.
    Completions without a reward are left out of the mean and the deviation and get zero.

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
    return centered / (variance.sqrt() + epsilon).clamp(min=torch.finfo(centered.dtype).tiny)


def center(values: Float[Tensor, "P G"], graded: Bool[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """Each reward minus the mean of the graded ones; exactly zero in a group of equal or fewer than two rewards."""
    count = graded.sum(dim=1, keepdim=True)
    mean = torch.where(graded, values, 0.0).sum(dim=1, keepdim=True) / count.clamp(min=1)
    return torch.where(graded & has_signal(values, graded)[:, None], values - mean, 0.0)


def has_signal(values: Float[Tensor, "P G"], graded: Bool[Tensor, "P G"]) -> Bool[Tensor, " P"]:
    """Groups with at least two graded rewards that differ by 1e-6 or more; the others teach nothing."""
    highest = torch.where(graded, values, -torch.inf).amax(dim=1)
    lowest = torch.where(graded, values, torch.inf).amin(dim=1)
    return (highest - lowest) >= EQUAL_WITHIN


def refuse_groups_of_one(rewards: Rewards) -> None:
    """Raise ValueError where a group cannot have a baseline because it has one member."""
    if rewards.values.shape[1] < 2:
        raise ValueError("a group of one has no baseline; sample at least 2 completions per prompt")
