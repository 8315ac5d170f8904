"""The table of named algorithms: one row of plain data each, naming functions of this folder. No torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

AdvantageName = Literal[
    "group_std",
    "group_mean",
    "batch_std",
    "batch_centered_std",
    "whitened",
    "leave_one_out",
    "mean_normalized",
    "length_weighted",
    "multi_objective",
    "raw",
    "none",
    "custom",
]
LossName = Literal[
    "policy_gradient",
    "importance_weighted",
    "clipped",
    "sequence_clipped",
    "sequence_clipped_token",
    "truncated_importance",
    "sequence_truncated_importance",
    "soft_gated",
    "sequence_soft_gated",
    "sequence_gated",
    "custom",
]
NormalizerName = Literal["sequence_mean", "token_mean", "constant", "prompt_mean", "sequence_sum"]
KLName = Literal["k1", "k2", "k3", "absolute", "k1_reversed"]
ReferenceName = Literal["frozen", "refreshed", "average", "old", "base", "teacher"]
KLPlacement = Literal["loss", "reward", "advantage"]
CorrectionName = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
OldName = Literal["trainer", "sampler"]


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Traits of a token loss that the rest of an algorithm depends on."""

    level: Literal["token", "geometric", "product"] | None = "token"
    """The ratio that it takes: that of each token, or one for the completion, the geometric mean or the product of its
    tokens' ratios; None: it takes none."""
    limit: Literal["clip", "cap"] | None = None
    """Whether clip_low and clip_high take gradients away, or ratio_max holds weights back."""
    is_whole: bool = False
    """The number of the whole completion stands on each of its tokens."""

    @property
    def is_of_completion(self) -> bool:
        """It takes one ratio per completion."""
        return self.level in ("geometric", "product")


LOSSES: dict[LossName, LossTraits] = {
    "policy_gradient": LossTraits(level=None),
    "importance_weighted": LossTraits(),
    "clipped": LossTraits(limit="clip"),
    "sequence_clipped": LossTraits("geometric", limit="clip", is_whole=True),
    "sequence_clipped_token": LossTraits("geometric", limit="clip"),
    "truncated_importance": LossTraits(limit="cap"),
    "sequence_truncated_importance": LossTraits("geometric", limit="cap"),
    "soft_gated": LossTraits(),
    "sequence_soft_gated": LossTraits("geometric", is_whole=True),
    "sequence_gated": LossTraits("product"),
    "custom": LossTraits(),
}
"""Every token loss; the functions of these names are in ``losses.py``."""
RATIO_CAP = 5.0
"""The cap of truncated importance where nothing else is chosen."""
COURSE_LOSSES: dict[str, tuple[LossName, AdvantageName | None]] = {
    "no_baseline": ("policy_gradient", "raw"),
    "reinforce_with_baseline": ("policy_gradient", None),
    "grpo_clip": ("clipped", None),
}
"""The three loss types of CS336's assignment 5: a loss, and the advantages it takes where those are not the row's."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The choices that make a named algorithm; a recipe can replace every one of them."""

    paper: str
    changes: str
    """Its difference from the other rows, in one sentence."""
    use_when: str
    differs: str = ""
    """Where this row leaves the paper, and which of its tricks belong to other parts of a recipe."""
    advantage: AdvantageName
    loss: LossName
    normalize: NormalizerName
    std_ddof: int = 1
    """Squares are divided by n - std_ddof."""
    std_epsilon: float = 1e-6
    clip_low: float = 0.2
    """Greatest distance of a ratio below 1."""
    clip_high: float = 0.2
    """Greatest distance of a ratio above 1."""
    ratio_max: float | None = None
    """Largest ratio, not a distance from 1: the outer bound of dual clipping, the cap of truncated importance."""
    kl_coef: float = 0.0
    kl_in: KLPlacement = "loss"
    kl_estimator: KLName = "k3"
    kl_importance: bool = True
    """Weigh the KL of a token by its ratio, which carries gradient: k1 and k3 then have the gradient of the KL."""
    reference: ReferenceName = "frozen"
    reference_every_steps: int = 1
    """refreshed, average: move the reference after every so many steps."""
    reference_share: float = 0.01
    """average: how much of the policy goes into the reference each time."""
    old_logprobs: OldName = "trainer"
    """Where log p_old comes from: recomputed by the trainer when several updates need it, or as the sampler saw it."""
    correction: CorrectionName = "none"
    correction_level: CorrectionLevel = "token"
    correction_low: float = 0.0
    correction_high: float = 2.0
    off_policy_threshold: float | None = None
    """Leave bad completions out whose mean of log p_sampler - log p over tokens is above this; None keeps all."""
    entropy_coef: float = 0.0
    entropy_target: float | None = None
    """Adapt entropy_coef so that the entropy does not fall below this, in nats; None keeps it constant."""
    entropy_coef_step: float = 0.005
    entropy_coef_max: float = 1.0
    high_entropy_share: float = 1.0
    """Train only on this fraction of the tokens, those with the highest entropy."""

    @property
    def has_kl(self) -> bool:
        """A KL to the reference counts."""
        return self.kl_coef > 0


PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        paper="DeepSeekMath, arXiv:2402.03300, equation 3",
        changes="The group's mean is the baseline, its standard deviation the scale; every completion weighs the same.",
        use_when="To compare with published GRPO. Otherwise dapo or dr_grpo, without its length and difficulty bias.",
        differs="No KL unless kl_coef is set (the paper uses 0.04), and then with the importance weight that makes its "
        "gradient right; trl_0_14 and iterative_grpo have the KL as printed.",
        advantage="group_std",
        loss="clipped",
        normalize="sequence_mean",
    ),
    "dr_grpo": Preset(
        paper="Understanding R1-Zero-like training, arXiv:2503.20783",
        changes="No standard deviation, a constant denominator: neither easy prompts nor short completions weigh more.",
        use_when="A good default, most of all when lengths vary or rewards are nearly all equal.",
        advantage="group_mean",
        loss="clipped",
        normalize="constant",
    ),
    "dapo": Preset(
        paper="DAPO, arXiv:2503.14476",
        changes="More room upward when clipping keeps entropy up; every token of the update weighs the same.",
        use_when="Long completions, several updates per batch, entropy that falls too fast.",
        differs="Refilling groups without signal and the soft penalty on overlong completions are choices of sampling "
        "and rewards, not of the loss.",
        advantage="group_std",
        loss="clipped",
        normalize="token_mean",
        clip_high=0.28,
    ),
    "rloo": Preset(
        paper="Back to basics, arXiv:2402.14740; Kool et al. 2019",
        changes="The baseline of a completion is the mean of the others: unbiased for every group size.",
        use_when="One update per batch, where the plain policy gradient is exact; small groups.",
        differs="kl_coef is 0 where the paper has a KL in the reward.",
        advantage="leave_one_out",
        loss="policy_gradient",
        normalize="sequence_sum",
        kl_in="reward",
        kl_estimator="k1",
    ),
    "reinforce_pp": Preset(
        paper="REINFORCE++, arXiv:2501.03262",
        changes="No group: rewards are centered and scaled over the whole batch, the KL is part of the reward.",
        use_when="One completion per prompt would do, or prompts of equal difficulty.",
        differs="The KL of a whole completion is subtracted from its reward, where the paper subtracts at each token "
        "the KL that is still to come; kl_coef is 0. Means are over completions; some peers take them over tokens.",
        advantage="whitened",
        loss="clipped",
        normalize="token_mean",
        kl_in="reward",
        kl_estimator="k1",
    ),
    "reinforce_pp_baseline": Preset(
        paper="REINFORCE++ with baseline, arXiv:2501.03262",
        changes="Centered in the group, scaled by the standard deviation of what is left over the whole batch.",
        use_when="As lite_ppo, with groups of unequal difficulty.",
        differs="The batch mean that the paper also subtracts is zero; kl_coef is 0.",
        advantage="batch_centered_std",
        loss="clipped",
        normalize="token_mean",
        kl_estimator="k2",
        kl_importance=False,
    ),
    "gspo": Preset(
        paper="Group sequence policy optimization, arXiv:2507.18071, equation 5",
        changes="One ratio per completion, the geometric mean of its tokens' ratios, clipped as a whole.",
        use_when="Mixture-of-experts models and several updates per batch.",
        differs="The bounds are those of its experiments, 3e-4 and 4e-4.",
        advantage="group_std",
        loss="sequence_clipped",
        normalize="sequence_mean",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    "gspo_token": Preset(
        paper="Group sequence policy optimization, arXiv:2507.18071, equation 13",
        changes="The value of the sequence ratio with the gradient of each token's own probability.",
        use_when="To give the tokens of a completion different advantages in your own loss; else it equals gspo.",
        advantage="group_std",
        loss="sequence_clipped_token",
        normalize="sequence_mean",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    "luspo": Preset(
        paper="Length-unbiased sequence policy optimization, arXiv:2602.05261",
        changes="gspo with every completion weighed by its length, so that long ones are not held back.",
        use_when="gspo whose completions grow shorter.",
        advantage="group_std",
        loss="sequence_clipped",
        normalize="sequence_sum",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    "cispo": Preset(
        paper="MiniMax-M1, arXiv:2506.13585",
        changes="The ratio is a capped weight without gradient: a token far off is held back, never dropped.",
        use_when="Several updates per batch or stale completions; the most robust choice of ScaleRL's comparison.",
        differs="The cap is 5, in the range 4 to 8 that ScaleRL found equal; the paper does not print its own.",
        advantage="group_std",
        loss="truncated_importance",
        normalize="token_mean",
        ratio_max=5.0,
    ),
    "scale_rl": Preset(
        paper="The art of scaling reinforcement learning compute, arXiv:2510.13786",
        changes="cispo, scaled by the standard deviation over the batch, every prompt weighing the same.",
        use_when="Large batches and long runs.",
        differs="Without its 32-bit head, its eight steps of staleness, and its retirement of easy prompts, which are "
        "choices of policy and data.",
        advantage="batch_centered_std",
        loss="truncated_importance",
        normalize="prompt_mean",
        ratio_max=5.0,
    ),
    "sapo": Preset(
        paper="Soft adaptive policy optimization, arXiv:2511.20347",
        changes="A smooth gate in place of clipping, narrower for bad completions.",
        use_when="Clipping that removes many tokens; mixture-of-experts models.",
        advantage="group_std",
        loss="soft_gated",
        normalize="sequence_mean",
    ),
    "vespo": Preset(
        paper="Variational sequence-level soft policy optimization, arXiv:2602.10693",
        changes="A smooth weight of the ratio of the whole completion, without gradient.",
        use_when="Completions that are several steps old.",
        advantage="group_std",
        loss="sequence_gated",
        normalize="token_mean",
    ),
    "lite_ppo": Preset(
        paper="Tricks or traps?, arXiv:2508.08221",
        changes="Mean of the group, standard deviation of the batch, every token weighing the same.",
        use_when="Groups whose standard deviation is near zero, which grpo blows up.",
        advantage="batch_std",
        loss="clipped",
        normalize="token_mean",
    ),
    "maxrl": Preset(
        paper="Maximum likelihood reinforcement learning, arXiv:2602.02710",
        changes="Divided by the group's mean: the gradient of log pass rate, which favours hard prompts.",
        use_when="Rewards of 0 and 1 and many prompts that are rarely solved.",
        differs="Clipping and token mean are ours; the paper fixes only the advantage.",
        advantage="mean_normalized",
        loss="clipped",
        normalize="token_mean",
    ),
    "opo": Preset(
        paper="On-policy RL with optimal reward baseline, arXiv:2505.23585",
        changes="The baseline weighs rewards by length, which minimizes the variance of the gradient.",
        use_when="One update per batch, lengths that vary a lot.",
        differs="Divided by the tokens of the update where the derivation has rows; both are proportional.",
        advantage="length_weighted",
        loss="policy_gradient",
        normalize="token_mean",
    ),
    "gdpo": Preset(
        paper="Group reward-decoupled normalization, arXiv:2601.05242",
        changes="Every part of the reward is normalized in its group before the parts are added.",
        use_when="Several rewards on different scales, none of which should drown the others.",
        advantage="multi_objective",
        loss="clipped",
        normalize="sequence_mean",
        std_epsilon=1e-4,
    ),
    "rft": Preset(
        paper="Rejection sampling fine-tuning, arXiv:2308.01825",
        changes="No baseline: with rewards of 0 and 1 only right completions are learned, as in supervised training.",
        use_when="As a baseline for everything else.",
        differs="Trains on the current policy's completions, repeated ones included, where the paper collects distinct "
        "ones once; the denominator counts all tokens, wrong ones too.",
        advantage="raw",
        loss="policy_gradient",
        normalize="token_mean",
    ),
    "distil": Preset(
        paper="GKD, arXiv:2306.13649; as a policy gradient: On-Policy Distillation, Thinking Machines 2025",
        changes="The advantage of a token is the negative reverse KL to a teacher, estimated from that token.",
        use_when="A model with the same tokenizer already does what yours should; see docs/sft.md.",
        differs="GKD sums the KL over the vocabulary. algorithm.advantage=group_mean adds the verified reward.",
        advantage="none",
        loss="importance_weighted",
        normalize="token_mean",
        kl_coef=1.0,
        kl_in="advantage",
        kl_estimator="k1",
        reference="teacher",
    ),
    "high_entropy": Preset(
        paper="Beyond the 80/20 rule, arXiv:2506.01939",
        changes="dapo on the fifth of the tokens where the policy was least sure; the denominator counts all of them.",
        use_when="Long completions of a model of 8B or more; the paper saw no gain below that.",
        differs="The threshold is taken over all tokens of a step, from entropies measured before its first update.",
        advantage="group_std",
        loss="clipped",
        normalize="token_mean",
        clip_high=0.28,
        high_entropy_share=0.2,
    ),
    "cs336": Preset(
        paper="CS336 (2025), assignment 5",
        changes="The course's GRPO: standard deviation with n - 1, plain policy gradient, mean of each completion.",
        use_when="Following the course or a guide built on it. loss takes its names no_baseline, "
        "reinforce_with_baseline (here) and grpo_clip.",
        advantage="group_std",
        loss="policy_gradient",
        normalize="sequence_mean",
    ),
    "sequence_reinforce": Preset(
        paper="REINFORCE, Williams 1992, on whole completions",
        changes="The sum of a completion's log-probabilities times its advantage, mean over completions.",
        use_when="To reproduce a text that writes GRPO as -mean(A log p(y|x)).",
        differs="kl_coef 0.01 adds the penalty such texts print, mean(log p_old - log p): with one update per batch "
        "its gradient is zero on average, and it never holds the policy near a reference.",
        advantage="group_std",
        loss="policy_gradient",
        normalize="sequence_sum",
        std_epsilon=1e-8,
        kl_estimator="k1_reversed",
        kl_importance=False,
        reference="old",
    ),
    "trl_0_14": Preset(
        paper="DeepSeekMath, arXiv:2402.03300, as TRL 0.14 computed it",
        changes="GRPO with its KL as printed, k3 in the loss against the first weights, and TRL's epsilon.",
        use_when="To reproduce runs with beta 0.04 of that time.",
        differs="Clips as the paper does; TRL 0.14 had one update per batch only, where nothing is ever clipped.",
        advantage="group_std",
        loss="clipped",
        normalize="sequence_mean",
        std_epsilon=1e-4,
        kl_coef=0.04,
        kl_importance=False,
    ),
    "iterative_grpo": Preset(
        paper="DeepSeekMath, arXiv:2402.03300, algorithm 1",
        changes="The outer loop of the paper: the reference becomes the policy after every 500 steps.",
        use_when="Long runs with a KL that should bound each stage, not the whole run.",
        differs="The optimizer keeps its moments when the reference moves. reference_every_steps is the length of one "
        "outer iteration.",
        advantage="group_std",
        loss="clipped",
        normalize="sequence_mean",
        std_epsilon=1e-4,
        clip_low=0.1,
        clip_high=0.1,
        kl_coef=0.04,
        kl_importance=False,
        reference="refreshed",
        reference_every_steps=500,
    ),
}
"""Every named algorithm."""

_DESCRIPTIONS = ("paper", "changes", "use_when", "differs")
CHOICES: tuple[str, ...] = tuple(field.name for field in fields(Preset) if field.name not in _DESCRIPTIONS)
"""The choices of a row that a recipe can replace."""
VALUES: dict[str, tuple[str, ...]] = {
    name: get_args(kind) for name, kind in get_type_hints(Preset).items() if get_origin(kind) is Literal
}
"""The choices that are names, and the names that there are."""


def resolve(name: str, *, scale_by_std: bool | None = None, **choices: Any) -> Preset:
    """The row of a name with some of its choices replaced; None leaves a choice as it is.

    ``scale_by_std`` turns group_std into group_mean and back. ``loss`` also takes the names of ``COURSE_LOSSES``.

    >>> resolve("dapo", clip_low=None, normalize="constant").normalize
    'constant'

    Raises ValueError for a name, a choice or a value that does not exist.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no algorithm {name!r}{_nearest(name, PRESETS)}. There are: {', '.join(PRESETS)}")
    chosen = {key: value for key, value in choices.items() if value is not None}
    for key in chosen:
        if key not in CHOICES:
            raise ValueError(f"an algorithm has no choice {key!r}{_nearest(key, CHOICES)}")
    loss, needed = COURSE_LOSSES.get(chosen.get("loss", ""), (None, None))
    if loss is not None:
        chosen["loss"] = loss
        chosen |= {} if needed is None else {"advantage": needed}
    for key, values in VALUES.items():
        if key in chosen and chosen[key] not in values:
            hint = _nearest(str(chosen[key]), values)
            raise ValueError(f"there is no {key} {chosen[key]!r}{hint}. There are: {', '.join(values)}")
    row = replace(PRESETS[name], **chosen)
    if scale_by_std is None or row.advantage == "raw":
        return row
    if row.advantage not in ("group_std", "group_mean"):
        raise ValueError(f"scale_by_std does not apply to the advantage {row.advantage}; choose another advantage")
    return replace(row, advantage="group_std" if scale_by_std else "group_mean")


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
