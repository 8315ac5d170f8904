"""Keys that replace choices of a preset in the table of algorithms."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.algorithm.table import (
    PRESETS,
    AdvantageName,
    CorrectionLevel,
    CorrectionName,
    KLName,
    KLPlace,
    LossName,
    NormalizerName,
    OldName,
    ReferenceName,
)
from oncurve.settings import Section

PresetName = Annotated[str, Field(json_schema_extra={"enum": [*PRESETS, "custom"]})]


class AlgorithmSection(Section):
    """A row of the table of algorithms and what differs from it; None takes the row's."""

    type: PresetName = "grpo"
    """Name of the row, see docs/algorithms.md; "custom" is grpo with your loss."""
    group_size: int = 8
    """Completions per prompt, G."""
    function: str | None = None
    """With type custom: module:name or file.py:name of (logprobs, old_logprobs, advantages, mask) -> loss [B, T]."""
    advantage_function: str | None = None
    """module:name or path/to/file.py:name of (rewards) -> advantages [P, G], in place of ``advantage``."""
    advantage: AdvantageName | None = None
    loss: LossName | Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"] | None = None
    scale_by_std: bool | None = None
    """Divide advantages by the standard deviation of the group."""
    std_ddof: Literal[0, 1] | None = None
    """Divide squares by n (0) or by n - 1 (1)."""
    std_epsilon: PositiveFloat | None = None
    normalize: NormalizerName | None = None
    """Which denominator the loss has."""
    clip_low: PositiveFloat | None = None
    """How far below 1 a ratio may fall."""
    clip_high: PositiveFloat | None = None
    """How far above 1 a ratio may rise."""
    ratio_max: PositiveFloat | None = None
    """Largest ratio, not a distance from 1."""
    kl_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the KL to the reference; 0 keeps no reference in memory."""
    kl_in: KLPlace | None = None
    """Part of the loss, of the reward of a completion, or of the advantage of each token."""
    kl_estimator: KLName | None = None
    kl_importance: bool | None = None
    """Weigh the KL of a token by its ratio, so that its gradient is that of the KL."""
    reference: ReferenceName | None = None
    """What the KL is taken to: frozen, refreshed, average, old, base or teacher."""
    teacher: str | None = None
    """reference teacher: folder, run or Hugging Face Hub name of a model with the tokenizer of the policy, or the URL
    of one behind oncurve serve or vLLM."""
    teacher_hint: str | None = None
    """Text behind the question that only the reference reads, with columns of the row: "The answer is {answer}." """
    reference_every_steps: PositiveInt | None = None
    reference_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """average: how much of the policy goes into the reference each time."""
    old_logprobs: OldName | None = None
    """Who says how probable a token was when it was sampled: the trainer or the sampler."""
    correction: CorrectionName | None = None
    """Weights for the gap between sampler and trainer; it is measured either way."""
    correction_level: CorrectionLevel | None = None
    correction_low: Annotated[float, Field(ge=0)] | None = None
    correction_high: PositiveFloat | None = None
    off_policy_threshold: PositiveFloat | None = None
    """Leave bad completions out whose mean of log p_sampler - log p over tokens is above this."""
    entropy_coef: Annotated[float, Field(ge=0)] | None = None
    entropy_target: PositiveFloat | None = None
    """Adapt entropy_coef so that the entropy, in nats, does not fall below this."""
    entropy_coef_step: PositiveFloat | None = None
    entropy_coef_max: PositiveFloat | None = None
    high_entropy_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Train only on this fraction of the tokens, those with the highest entropy."""
    mask_truncated: bool = False
    """Leave completions that never ended out of the loss."""

    @model_validator(mode="after")
    def _check_group(self) -> AlgorithmSection:
        if self.group_size < (1 if self.type in ("rft", "distil") else 2):
            raise ValueError(
                f"algorithm.group_size is {self.group_size}; a group of one has no baseline. Use at least 2"
            )
        if self.type not in (*PRESETS, "custom"):
            near = difflib.get_close_matches(self.type, [*PRESETS, "custom"], n=3)
            near.sort(key=lambda name: sorted(name) != sorted(self.type))  # letters that changed places first
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"algorithm.type is {self.type!r}, which no row of the table has.{hint} "
                f"There are: {', '.join(PRESETS)}, custom"
            )
        if (self.type == "custom") != (self.function is not None):
            raise ValueError(
                "algorithm.function belongs to algorithm.type custom, and custom needs it: "
                "give both, such as {type: custom, function: losses.py:mine}"
            )
        return self
