"""Advantages: how a completion compares with the others of its group.

Every function takes the rewards of a step and gives one advantage per completion. Completions without a reward are left
out of every mean and standard deviation and get zero, and so does a group without signal: fewer than two rewards, or
rewards that differ by less than 1e-6. In float32, eight rewards of 0.7 have a standard deviation of 6e-8, and dividing
by it would give every completion an advantage of 0.94.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from oncurve.core.batch import Rewards
from oncurve.core.formulas import center, divide, group_relative, has_signal, refuse_groups_of_one


def batch_std(rewards: Rewards, *, ddof: int = 1, epsilon: float = 1e-6) -> Float[Tensor, "P G"]:
    """Each reward minus the mean of its group, divided by the standard deviation of all rewards of the batch.

        A_i = (r_i - mean(r)) / (std_batch(r) + epsilon)      Tricks or traps?, arXiv:2508.08221

    A group of nearly equal rewards is not blown up, as it is when divided by its own standard deviation.

    Raises ValueError for a group of one, which has no baseline.
    """
    refuse_groups_of_one(rewards)
    centered = center(rewards.values, rewards.graded)
    return divide(centered, _batch_deviation(rewards.values, rewards.graded, ddof) + epsilon)


def batch_centered_std(rewards: Rewards, *, ddof: int = 1, epsilon: float = 1e-6) -> Float[Tensor, "P G"]:
    """Each reward minus the mean of its group, divided by the standard deviation over the batch of what is left.

        A_i = (r_i - mean(r)) / (std_batch(r - mean(r)) + epsilon)
                                                              REINFORCE++ with baseline, arXiv:2501.03262
                                                              ScaleRL, arXiv:2510.13786

    Differences between prompts do not enter the standard deviation, as they do in ``batch_std``. REINFORCE++ also
    subtracts the mean over the batch, which is zero here.

    Raises ValueError for a group of one, which has no baseline.
    """
    refuse_groups_of_one(rewards)
    centered = center(rewards.values, rewards.graded)
    return divide(centered, _batch_deviation(centered, rewards.graded, ddof) + epsilon)


def whitened(rewards: Rewards, *, ddof: int = 1, epsilon: float = 1e-6) -> Float[Tensor, "P G"]:
    """Each reward minus the mean of the batch, divided by the standard deviation of the batch. Groups play no part.

        A_i = (r_i - mean_batch(r)) / (std_batch(r) + epsilon)        REINFORCE++, arXiv:2501.03262, equation 10

    A prompt that is solved by every completion still gets positive advantages: the baseline does not know how hard a
    prompt is. Mean and standard deviation are over completions; OpenRLHF and verl weigh each completion by its tokens.
    """
    values, graded = rewards.values.reshape(1, -1), rewards.graded.reshape(1, -1)
    centered = center(values, graded)
    deviation = _batch_deviation(values, graded, ddof)
    return divide(centered, deviation + epsilon).reshape(rewards.values.shape)


def leave_one_out(rewards: Rewards) -> Float[Tensor, "P G"]:
    """Each reward minus the mean of the others of its group.

        A_i = r_i - 1/(G-1) sum_{j != i} r_j = G/(G-1) (r_i - mean(r))
                                                              RLOO, arXiv:2402.14740; Kool et al. 2019

    The baseline does not depend on the completion itself, so the gradient is unbiased; ``group_mean`` is this times
    (G - 1) / G.

    Raises ValueError for a group of one, which has no baseline.
    """
    refuse_groups_of_one(rewards)
    count = rewards.graded.sum(dim=1, keepdim=True)
    return center(rewards.values, rewards.graded) * count / (count - 1).clamp(min=1)


def mean_normalized(rewards: Rewards) -> Float[Tensor, "P G"]:
    """Each reward minus the mean of its group, divided by that mean.

        A_i = (r_i - mean(r)) / mean(r)                       MaxRL, arXiv:2602.02710

    For rewards of 0 and 1 this is the gradient of the logarithm of the pass rate, where the plain difference is that of
    the pass rate: the one right completion of eight gets 7 in place of 7/8.

    Raises ValueError for a group of one, and for a negative reward, of which the mean is no scale.
    """
    refuse_groups_of_one(rewards)
    lowest = float(torch.where(rewards.graded, rewards.values, 0.0).min())
    if lowest < 0:
        raise ValueError(f"mean_normalized needs rewards of 0 or more, and there is one of {lowest:g}")
    count = rewards.graded.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(rewards.graded, rewards.values, 0.0).sum(dim=1, keepdim=True) / count
    return divide(center(rewards.values, rewards.graded), mean)


def length_weighted(rewards: Rewards) -> Float[Tensor, "P G"]:
    """Each reward minus the mean of its group weighed by length.

        A_i = r_i - sum_j |o_j| r_j / sum_j |o_j|             OPO, arXiv:2505.23585

    The baseline of least variance when the squared norm of a completion's gradient grows with its length. Right for one
    update per batch only.

    Raises ValueError for a group of one, which has no baseline.
    """
    refuse_groups_of_one(rewards)
    values = torch.where(rewards.graded, rewards.values, 0.0)
    weights = torch.where(rewards.graded, rewards.num_tokens, 0).to(values.dtype)
    total = weights.sum(dim=1, keepdim=True)
    even = rewards.graded.to(values.dtype)
    weights = torch.where(total > 0, weights, even)  # completions without a single token weigh the same
    baseline = (weights * values).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp(min=1)
    teaches = rewards.graded & has_signal(rewards.values, rewards.graded)[:, None]
    return torch.where(teaches, values - baseline, 0.0)


def multi_objective(
    rewards: Rewards, *, weights: Mapping[str, float] | None = None, ddof: int = 1, epsilon: float = 1e-4
) -> Float[Tensor, "P G"]:
    """Each part of the reward is normalized in its group; their weighted sum is normalized over the batch.

        s_i = sum_k weight_k (r_ki - mean(r_k)) / (std(r_k) + epsilon)
        A_i = (s_i - mean_batch(s)) / (std_batch(s) + epsilon)        GDPO, arXiv:2601.05242

    A part of small range counts as much as one of large range. Where parts nearly cancel in a whole batch, the second
    division blows up what is left. A completion to which a part does not apply is left out of that part's mean and
    standard deviation and gets nothing from it. ``weights`` names the parts that count; None takes every part once.
    The reward itself is not used.

    Raises ValueError for a group of one, for rewards without parts, and for a weight whose part does not exist.
    """
    refuse_groups_of_one(rewards)
    chosen = dict.fromkeys(rewards.parts, 1.0) if weights is None else weights
    if not chosen:
        raise ValueError("the advantage multi_objective needs rewards with named parts, and these have none")
    if missing := sorted(set(chosen) - set(rewards.parts)):
        raise ValueError(f"the reward has no part {missing[0]!r}; its parts are {', '.join(sorted(rewards.parts))}")
    total = torch.zeros_like(rewards.values)
    for name, weight in chosen.items():
        is_graded = rewards.graded & rewards.parts_graded.get(name, rewards.graded)
        part = Rewards(rewards.parts[name], is_graded, rewards.num_tokens, rewards.is_truncated)
        total = total + weight * group_relative(part, ddof=ddof, epsilon=epsilon)
    summed = Rewards(total, rewards.graded, rewards.num_tokens, rewards.is_truncated)
    return whitened(summed, ddof=ddof, epsilon=epsilon)


def raw(rewards: Rewards) -> Float[Tensor, "P G"]:
    """The reward itself, without a baseline.

        A_i = r_i                                             REINFORCE, Williams 1992

    With rewards of 0 and 1 this is rejection sampling: supervised training on the right completions. There may be one
    completion per prompt.
    """
    return torch.where(rewards.graded, rewards.values, 0.0)


def none(rewards: Rewards) -> Float[Tensor, "P G"]:
    """Zero for every completion: rewards only measure, and what is learned comes from a KL in the advantages.

    A_i = 0
    """
    return torch.zeros_like(rewards.values)


def _batch_deviation(values: Tensor, graded: Tensor, ddof: int) -> Tensor:
    """Standard deviation over every graded completion of the batch, as a scalar."""
    count = graded.sum()
    mean = torch.where(graded, values, 0.0).sum() / count.clamp(min=1)
    squares = torch.where(graded, values - mean, 0.0) ** 2
    return (squares.sum() / (count - ddof).clamp(min=1)).sqrt()
