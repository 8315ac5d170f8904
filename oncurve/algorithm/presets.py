"""Algorithms by name: each choice of a preset is looked up among the functions beside this file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from oncurve.algorithm import advantages, correction, losses
from oncurve.algorithm.table import LOSSES, PRESETS, RATIO_CAP, Preset, resolve
from oncurve.core import formulas
from oncurve.core.algorithm import Algorithm, KLTerm, Normalizer, TokenLoss, Weights
from oncurve.core.batch import Rewards
from oncurve.core.errors import ConfigError
from oncurve.core.formulas import EntropyBonus

__all__ = ["PRESETS", "build"]

Advantage = Callable[[Rewards], Float[Tensor, "P G"]]

ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": losses.k1,
    "k2": losses.k2,
    "k3": formulas.k3,
    "absolute": losses.absolute,
    "k1_reversed": losses.k1_reversed,
}
NUM_ARGUMENTS = 4
"""Arguments that every token loss has: logprobs, old_logprobs, advantages and mask."""


def build(
    name: str,
    *,
    group_size: int,
    max_completion_tokens: int,
    loss: str | TokenLoss | None = None,
    loss_options: Mapping[str, Any] | None = None,
    advantage: str | Advantage | None = None,
    part_weights: Mapping[str, float] | None = None,
    **choices: Any,
) -> Algorithm:
    """The algorithm of a name, with the choices that are given in place of its row's.

    ``loss`` and ``advantage`` are names, or functions of your own with the same signature; ``loss_options`` are further
    parameters of the loss. ``part_weights`` says which parts of the reward count for multi_objective. The other choices
    are the fields of ``table.Preset``; None takes the row's.

    >>> build("dapo", group_size=8, max_completion_tokens=512, clip_low=0.1).name
    'dapo'

    Raises ValueError for a name, choice or value that does not exist, ConfigError for such an option of the loss.
    """
    named_loss = "custom" if callable(loss) else loss
    named_advantage = "custom" if callable(advantage) else advantage
    row = resolve(name, loss=named_loss, advantage=named_advantage, **choices)
    return Algorithm(
        name=name,
        advantage=advantage if callable(advantage) else find_advantage(row, part_weights),
        token_loss=with_options(loss if callable(loss) else find_loss(row), loss_options or {}),
        normalize=find_normalizer(row, max_completion_tokens),
        group_size=group_size,
        kl=KLTerm(
            coefficient=row.kl_coef,
            estimator=ESTIMATORS[row.kl_estimator],
            placement=row.kl_in,
            importance=row.kl_importance,
            reference=row.reference,
            every_steps=row.reference_every_steps,
            share=row.reference_share if row.reference == "average" else 1.0,
        ),
        correction=find_correction(row),
        leave_out=None
        if row.off_policy_threshold is None
        else partial(correction.without_off_policy, threshold=row.off_policy_threshold),
        entropy=EntropyBonus(row.entropy_coef, row.entropy_target, row.entropy_coef_step, row.entropy_coef_max),
        choose=partial(losses.high_entropy, share=row.high_entropy_share) if row.high_entropy_share < 1 else None,
        old_logprobs=row.old_logprobs,
        uses_ratio=LOSSES[row.loss].level is not None,
        is_custom=row.loss == "custom",
        ratio_level="sequence" if LOSSES[row.loss].level == "geometric" else "token",
    )


def advantage_of(
    name: str,
    *,
    advantage: str | Advantage | None = None,
    part_weights: Mapping[str, float] | None = None,
    **choices: Any,
) -> Advantage:
    """The advantage function of a name, with the choices that are given in place of its row's. Raises ValueError."""
    if callable(advantage):
        return advantage
    return find_advantage(resolve(name, advantage=advantage, **choices), part_weights)


def find_advantage(row: Preset, part_weights: Mapping[str, float] | None = None) -> Advantage:
    """The advantage function of a row, its constants bound."""
    constants: dict[str, Any] = {"ddof": row.std_ddof, "epsilon": row.std_epsilon}
    functions: dict[str, Advantage] = {
        "group_std": partial(formulas.group_relative, scale_by_std=True, **constants),
        "group_mean": partial(formulas.group_relative, scale_by_std=False),
        "batch_std": partial(advantages.batch_std, **constants),
        "batch_centered_std": partial(advantages.batch_centered_std, **constants),
        "whitened": partial(advantages.whitened, **constants),
        "leave_one_out": advantages.leave_one_out,
        "mean_normalized": advantages.mean_normalized,
        "length_weighted": advantages.length_weighted,
        "multi_objective": partial(advantages.multi_objective, weights=part_weights, **constants),
        "raw": advantages.raw,
        "none": advantages.none,
    }
    return functions[row.advantage]


def find_loss(row: Preset) -> TokenLoss:
    """The token loss of a row, its constants bound."""
    match LOSSES[row.loss].limit:
        case "clip":
            bounds = {"clip_low": row.clip_low, "clip_high": row.clip_high, "ratio_max": row.ratio_max}
            return partial(losses.LOSSES[row.loss], **bounds)
        case "cap":
            return partial(losses.LOSSES[row.loss], ratio_max=row.ratio_max or RATIO_CAP)
        case None:
            return losses.LOSSES[row.loss]


def with_options(loss: TokenLoss, options: Mapping[str, Any]) -> TokenLoss:
    """A token loss with further parameters bound, those behind the four that every loss has.

    Raises ConfigError for a parameter that it does not have, or that has a key of its own.
    """
    if not options:
        return loss
    bound = {*loss.keywords} if isinstance(loss, partial) else set()
    free = [name for name in [*inspect.signature(loss).parameters][NUM_ARGUMENTS:] if name not in bound]
    if unknown := [name for name in options if name not in free]:
        why = "has a key of its own" if unknown[0] in bound else "is no parameter of the loss"
        raise ConfigError(
            f"algorithm.loss_options: {unknown[0]} {why}. Parameters of the loss: {', '.join(free) or 'none'}"
        )
    return partial(loss, **options)


def find_normalizer(row: Preset, max_completion_tokens: int) -> Normalizer:
    """The normalizer of a row, its constants bound."""
    functions: dict[str, Normalizer] = {
        "sequence_mean": formulas.sequence_mean,
        "token_mean": formulas.token_mean,
        "constant": partial(losses.constant, tokens_per_row=max_completion_tokens),
        "prompt_mean": losses.prompt_mean,
        "sequence_sum": losses.sequence_sum,
    }
    return functions[row.normalize]


def find_correction(row: Preset) -> Weights | None:
    """The correction of a row, its constants bound; None where the gap is only measured."""
    constants: dict[str, Any] = {"level": row.correction_level, "low": row.correction_low, "high": row.correction_high}
    functions: dict[str, Weights | None] = {
        "none": None,
        "truncate": partial(correction.truncate, **constants),
        "mask": partial(correction.mask_out, **constants),
    }
    return functions[row.correction]
