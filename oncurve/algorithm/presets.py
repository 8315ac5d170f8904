"""Which algorithms have a name? A table: one row each, composed of the functions beside this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from oncurve.algorithm.advantages import group_relative, refuse_groups_of_one
from oncurve.algorithm.algorithm import Algorithm, Normalizer, TokenLoss
from oncurve.algorithm.losses import clipped, policy_gradient
from oncurve.algorithm.normalize import constant, sequence_mean, token_mean
from oncurve.batch import Rewards

LossName = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]
NormalizerName = Literal["sequence_mean", "token_mean", "constant"]


@dataclass(frozen=True)
class Preset:
    """The choices that make a named algorithm; every one can be overridden in a recipe."""

    loss: LossName
    scale_by_std: bool
    normalize: NormalizerName
    paper: str


PRESETS: dict[str, Preset] = {
    "grpo": Preset("grpo_clip", True, "sequence_mean", "DeepSeekMath, arXiv:2402.03300"),
    "dr_grpo": Preset("grpo_clip", False, "constant", "Understanding R1-Zero-like training, arXiv:2503.20783"),
}


def build(
    name: str,
    *,
    group_size: int,
    max_completion_tokens: int,
    loss: LossName | None = None,
    scale_by_std: bool | None = None,
    std_ddof: int = 1,
    std_epsilon: float = 1e-6,
    normalize: NormalizerName | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
) -> Algorithm:
    """The algorithm of a name, with the choices that are given in place of the preset's."""
    preset = PRESETS[name]
    loss = loss or preset.loss
    scaled = preset.scale_by_std if scale_by_std is None else scale_by_std
    advantage: Callable[[Rewards], Float[Tensor, "P G"]] = partial(
        group_relative, scale_by_std=scaled, ddof=std_ddof, epsilon=std_epsilon
    )
    if loss == "no_baseline":
        advantage = raw_rewards
    token_losses: dict[str, TokenLoss] = {
        "no_baseline": policy_gradient,
        "reinforce_with_baseline": policy_gradient,
        "grpo_clip": partial(clipped, clip_low=clip_low, clip_high=clip_high),
    }
    normalizers: dict[str, Normalizer] = {
        "sequence_mean": sequence_mean,
        "token_mean": token_mean,
        "constant": partial(constant, tokens_per_row=max_completion_tokens),
    }
    return Algorithm(
        name=name,
        advantage=advantage,
        token_loss=token_losses[loss],
        normalize=normalizers[normalize or preset.normalize],
        group_size=group_size,
        kl_coef=kl_coef,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def raw_rewards(rewards: Rewards) -> Float[Tensor, "P G"]:
    """The reward itself, without a baseline: the loss ``no_baseline``. Ungraded completions get zero."""
    refuse_groups_of_one(rewards)
    return rewards.values * rewards.graded
