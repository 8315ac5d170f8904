"""Rules for choices that do not go together, over plain data; no torch, so that recipes load fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from oncurve.algorithm.table import LOSSES, LossTraits, Preset
from oncurve.core.records import CUTS, SamplingParams

Severity = Literal["refuse", "warn"]


_NEUTRAL = ", ".join(f"rollouts.{name} {neutral:g}" for name, neutral in CUTS.items())
_UNCUT = f"Train with {_NEUTRAL}; cut the distribution in evaluation only."


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A row of the table, and what else of a recipe bears on it."""

    row: Preset
    sampling: SamplingParams
    updates_per_step: int
    """Optimizer updates on one batch of rollouts."""
    max_staleness: int
    """Greatest age of a completion in steps when it is trained on."""
    sampler_is_trainer: bool
    """Sampling and training run the same code in the same number format."""
    punishes_length: bool
    """A reward falls with the length of a completion that was cut off."""
    masks_truncated: bool
    lora: bool
    negative_rewards: bool
    """Some reward can be below zero."""
    num_reward_parts: int
    """Number of named parts that the rewards report."""

    @property
    def loss(self) -> LossTraits:
        """Traits of the token loss."""
        return LOSSES[self.row.loss]

    @property
    def is_stale(self) -> bool:
        """Some completions are trained on by a policy that did not sample them."""
        return self.updates_per_step > 1 or self.max_staleness > 0

    @property
    def kl_in_loss(self) -> bool:
        """A KL term is part of the loss."""
        return self.row.has_kl and self.row.kl_in == "loss"

    @property
    def distils(self) -> bool:
        """The KL of each token is part of its advantage."""
        return self.row.has_kl and self.row.kl_in == "advantage"

    @property
    def compares_with_sampler(self) -> bool:
        """A ratio to the sampler's own probabilities is part of the loss."""
        return self.row.correction != "none" or self.row.old_logprobs == "sampler"

    @property
    def measures_sampler(self) -> bool:
        """The sampler's own probabilities are in the loss, as a ratio or as what leaves completions out."""
        return self.compares_with_sampler or self.row.off_policy_threshold is not None


@dataclass(frozen=True, slots=True)
class Rule:
    """Choices that do not fit: when it applies, and what to do about it."""

    severity: Severity
    """A refused recipe does not run; a warning is shown and the run goes on."""
    what: str
    """The choices, in the words of a recipe."""
    applies: Callable[[Choices], bool]
    why: str
    do: str


def check_pairing(choices: Choices) -> list[Rule]:
    """The rules that these choices break, refusals first."""
    return sorted((rule for rule in RULES if rule.applies(choices)), key=lambda rule: rule.severity != "refuse")


RULES: tuple[Rule, ...] = (
    Rule(
        "warn",
        "loss truncated_importance with ratio_max below 1",
        lambda c: c.loss.limit == "cap" and c.row.ratio_max is not None and c.row.ratio_max < 1,
        "ratio_max is the largest ratio itself, not its distance from 1: below 1 every token of an on-policy batch is "
        "scaled down.",
        "Leave algorithm.ratio_max out for 5, or add 1 to it, unless that is meant.",
    ),
    Rule(
        "refuse",
        "a clipped loss with ratio_max of 1 or less",
        lambda c: c.loss.limit == "clip" and c.row.ratio_max is not None and c.row.ratio_max <= 1,
        "ratio_max is the largest ratio itself, not its distance from 1: the ratio of a token starts at 1, so that "
        "such a bound takes its gradient away before it has moved.",
        "Set algorithm.ratio_max above 1; 3 is usual.",
    ),
    Rule(
        "warn",
        "a clipped loss with ratio_max inside clip_high",
        lambda c: c.loss.limit == "clip" and c.row.ratio_max is not None and 1 < c.row.ratio_max <= 1 + c.row.clip_high,
        "The two change places: ratio_max is then the upper bound of good completions' tokens, and 1 + clip_high the "
        "outer bound of bad ones.",
        "Set algorithm.ratio_max above 1 + clip_high, such as 3, unless that is meant.",
    ),
    Rule(
        "refuse",
        "kl_in advantage with a loss that has one ratio per completion",
        lambda c: c.distils and c.loss.is_of_completion,
        "The tokens of a completion then have different advantages, and such a loss has room for one.",
        "Set algorithm.loss to importance_weighted, clipped or truncated_importance.",
    ),
    Rule(
        "refuse",
        "kl_in advantage with another estimator than k1",
        lambda c: c.distils and c.row.kl_estimator != "k1",
        "In an advantage only k1, the log-ratio, has the gradient of the reverse KL.",
        "Set algorithm.kl_estimator to k1.",
    ),
    Rule(
        "refuse",
        "advantage none without a KL in the advantages",
        lambda c: c.row.advantage == "none" and not c.distils,
        "Every advantage is zero, so that nothing is learned.",
        "Set algorithm.kl_in to advantage and algorithm.kl_coef above 0, or choose another algorithm.advantage.",
    ),
    Rule(
        "warn",
        "a sequence_clipped loss with clip_low or clip_high above 0.05",
        lambda c: c.loss.limit == "clip" and c.loss.is_of_completion and max(c.row.clip_low, c.row.clip_high) > 0.05,
        "The ratio of a whole completion is a geometric mean and moves by a few 1e-4: such bounds never clip.",
        "Leave algorithm.clip_low and clip_high out for 3e-4 and 4e-4.",
    ),
    Rule(
        "warn",
        "loss clipped with clip_low and clip_high below 0.01",
        lambda c: c.row.loss == "clipped" and max(c.row.clip_low, c.row.clip_high) < 0.01,
        "The ratio of a token moves by more than that in a single update: nearly every token would be clipped.",
        "Use 0.2, or the loss sequence_clipped, for which such bounds are meant.",
    ),
    Rule(
        "warn",
        "loss sequence_clipped or sequence_soft_gated with a normalizer other than sequence_mean or sequence_sum",
        lambda c: c.loss.is_whole and c.row.normalize not in ("sequence_mean", "sequence_sum"),
        "Every token carries the loss of its whole completion, so a long completion counts once per token.",
        "Set algorithm.normalize to sequence_mean (GSPO), or to sequence_sum if that is meant (LUSPO).",
    ),
    Rule(
        "refuse",
        "a loss with one ratio per completion with a correction at token level",
        lambda c: c.loss.is_of_completion and c.row.correction != "none" and c.row.correction_level == "token",
        "Weights that differ between the tokens of a completion undo what its single ratio is for.",
        "Set algorithm.correction_level to geometric or sequence, or algorithm.correction to none.",
    ),
    Rule(
        "refuse",
        "loss sequence_gated with a correction",
        lambda c: c.row.loss == "sequence_gated" and c.row.correction != "none",
        "Its gate is already a weight of the whole completion's ratio.",
        "Set algorithm.correction to none and algorithm.old_logprobs to sampler: the gate then covers both gaps.",
    ),
    Rule(
        "refuse",
        "old_logprobs sampler with a correction",
        lambda c: c.row.old_logprobs == "sampler" and c.row.correction != "none",
        "The ratio to the sampler is already in the loss; a correction would count it twice.",
        "Set algorithm.correction to none, or algorithm.old_logprobs to trainer.",
    ),
    Rule(
        "refuse",
        "a correction whose bounds do not hold 1",
        lambda c: c.row.correction != "none" and not c.row.correction_low <= 1 <= c.row.correction_high,
        "The bounds are of the ratio itself, and 1 is the ratio of a token on which sampler and trainer agree.",
        "Set algorithm.correction_low below 1 and algorithm.correction_high above 1.",
    ),
    Rule(
        "warn",
        "correction_level sequence with completions of 2048 tokens or more",
        lambda c: (
            c.row.correction != "none"
            and c.row.correction_level == "sequence"
            and c.sampling.max_completion_tokens >= 2048
        ),
        "The product over that many tokens leaves every band by rounding noise alone: long completions are lost first.",
        "Set algorithm.correction_level to geometric or token.",
    ),
    Rule(
        "warn",
        "a sampler that is not the trainer, without correction",
        lambda c: not c.sampler_is_trainer and not c.compares_with_sampler,
        "Its probabilities differ from the trainer's, and the difference grows during a run.",
        "Set algorithm.correction to truncate, and watch mismatch/kl.",
    ),
    Rule(
        "warn",
        "completions of older weights (staleness), without correction",
        lambda c: c.max_staleness > 0 and not c.compares_with_sampler and c.row.loss != "policy_gradient",
        "The ratio in the loss is to the weights at the beginning of the step, so that nothing sees how far those that "
        "sampled are from them.",
        "Set algorithm.correction to truncate, or rollouts.staleness to 0.",
    ),
    Rule(
        "refuse",
        f"{', '.join(CUTS)} that leave tokens out where the loss compares with the sampler",
        lambda c: c.sampling.cuts and c.measures_sampler,
        "Tokens were drawn from the top of the distribution and are compared with the whole of it: every ratio is off "
        "by the share that was kept.",
        _UNCUT,
    ),
    Rule(
        "warn",
        f"{', '.join(CUTS)} that leave tokens out in training",
        lambda c: c.sampling.cuts and not c.measures_sampler,
        "The gradient is that of the whole distribution, the samples are from its top: tokens below the cut change "
        "without ever being sampled.",
        _UNCUT,
    ),
    Rule(
        "warn",
        "loss policy_gradient with several updates per step",
        lambda c: c.row.loss == "policy_gradient" and c.updates_per_step > 1 and c.max_staleness == 0,
        "From the second update on the completions are those of an older policy, and nothing in this loss knows.",
        "Set algorithm.loss to clipped, or make one update per step (leave run.completions_per_update out).",
    ),
    Rule(
        "refuse",
        "loss policy_gradient with stale completions",
        lambda c: c.row.loss == "policy_gradient" and c.max_staleness > 0,
        "The completions are those of an older policy, and nothing in this loss knows.",
        "Set algorithm.loss to clipped or truncated_importance.",
    ),
    Rule(
        "warn",
        "loss importance_weighted with completions two or more steps old",
        lambda c: c.row.loss == "importance_weighted" and c.max_staleness > 1,
        "Without a bound a few tokens of large ratio take over; runs have collapsed at three steps of staleness.",
        "Set algorithm.loss to clipped or truncated_importance.",
    ),
    Rule(
        "warn",
        "advantage length_weighted with several updates per step or stale completions",
        lambda c: c.row.advantage == "length_weighted" and c.is_stale,
        "Its baseline is the best one only for samples of the current policy.",
        "Make one update per step (leave run.completions_per_update out), or use group_mean.",
    ),
    Rule(
        "refuse",
        "kl_estimator k1 in the loss without kl_importance",
        lambda c: c.kl_in_loss and c.row.kl_estimator == "k1" and not c.row.kl_importance,
        "On the policy's own samples its gradient is zero on average: it adds noise and holds nothing back.",
        "Set algorithm.kl_estimator to k2, algorithm.kl_importance to true, or algorithm.kl_in to reward.",
    ),
    Rule(
        "warn",
        "kl_estimator k1_reversed",
        lambda c: c.row.has_kl and c.row.kl_estimator == "k1_reversed",
        "It is there to reproduce a formula that holds nothing back: its mean gradient is zero on policy.",
        "Set algorithm.kl_estimator to k3 and algorithm.reference to frozen.",
    ),
    Rule(
        "warn",
        "kl_estimator k3 in the loss without kl_importance",
        lambda c: c.kl_in_loss and c.row.kl_estimator == "k3" and not c.row.kl_importance,
        "Its value is that of KL(policy || reference), its gradient that of KL(reference || policy).",
        "Set algorithm.kl_importance to true unless an older result is to be reproduced.",
    ),
    Rule(
        "warn",
        "kl_in reward with an estimator other than k1",
        lambda c: c.row.has_kl and c.row.kl_in == "reward" and c.row.kl_estimator != "k1",
        "Only k1 as a reward has the gradient of KL(policy || reference).",
        "Set algorithm.kl_estimator to k1.",
    ),
    Rule(
        "warn",
        "reference old with one update per step",
        lambda c: c.row.has_kl and c.row.reference == "old" and not c.is_stale,
        "The policy is compared with itself: value and mean gradient are zero.",
        "Set algorithm.reference to frozen, or leave algorithm.kl_coef out.",
    ),
    Rule(
        "refuse",
        "reference base without LoRA",
        lambda c: c.row.has_kl and c.row.reference == "base" and not c.lora,
        "The base weights are those under an adapter, and there is none.",
        "Set algorithm.reference to frozen, or train an adapter.",
    ),
    Rule(
        "warn",
        "reference frozen with LoRA",
        lambda c: c.row.has_kl and c.row.reference == "frozen" and c.lora,
        "The frozen copy equals the base weights under the adapter and doubles the memory for weights.",
        "Set algorithm.reference to base.",
    ),
    Rule(
        "refuse",
        "advantage mean_normalized with rewards below zero",
        lambda c: c.row.advantage == "mean_normalized" and c.negative_rewards,
        "It divides by the mean reward of a group, which is no scale once it can be zero or negative.",
        "Use rewards of 0 and 1, or another advantage.",
    ),
    Rule(
        "refuse",
        "advantage multi_objective with fewer than two reward parts",
        lambda c: c.row.advantage == "multi_objective" and c.num_reward_parts < 2,
        "It normalizes each part of the reward apart, and there are not two of them.",
        "Give more than one reward, or use group_std.",
    ),
    Rule(
        "warn",
        "mask_truncated with a penalty on overlong completions",
        lambda c: c.masks_truncated and c.punishes_length,
        "The completions that are punished most are left out of the loss: only their group's baseline feels it.",
        "Turn one of the two off.",
    ),
)
"""Every rule that is checked: a new one costs one entry, and the page of algorithms lists it."""
