"""Keys that replace choices of a preset in the table of algorithms."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.algorithm.table import (
    LOSSES,
    PRESETS,
    AdvantageName,
    CorrectionLevel,
    CorrectionName,
    KLName,
    KLPlacement,
    LossName,
    NormalizerName,
    OldName,
    Preset,
    ReferenceName,
    resolve,
)
from oncurve.core.errors import ConfigError
from oncurve.core.records import SamplingParams
from oncurve.section import CountsWith, Section

if TYPE_CHECKING:
    from oncurve.algorithm.presets import Advantage
    from oncurve.core.algorithm import Algorithm, TokenLoss

KL_RAISED = "Raise algorithm.kl_coef"
"""Advice where the policy drifts away from the reference."""
PresetName = Annotated[str, Field(json_schema_extra={"enum": [*PRESETS, "custom"]})]


_CLIPS = CountsWith("loss", tuple(name for name, loss in LOSSES.items() if loss.limit == "clip"))
_LIMITS = CountsWith("loss", tuple(name for name, loss in LOSSES.items() if loss.limit is not None))
_CORRECTS = CountsWith("correction", unless=("none",))


class AlgorithmSection(Section):
    """A row of the table of algorithms, and what differs from it; None: the row's value."""

    type: PresetName = "grpo"
    """Row of the table in docs/algorithms.md; "custom" is grpo with your loss."""
    group_size: int = 8
    """Completions per prompt, G: at least 2, unless the row has no baseline."""
    function: str | None = None
    """With type custom: module:name or file.py:name of (logprobs, old_logprobs, advantages, mask) -> loss [B, T]."""
    advantage_function: str | None = None
    """module:name or path/to/file.py:name of (rewards) -> advantages [P, G], in place of ``advantage``."""
    advantage: AdvantageName | None = None
    """How rewards become advantages."""
    loss: LossName | Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"] | None = None
    """The loss of a token."""
    loss_options: dict[str, float | bool | str] = Field(default_factory=dict)
    """Further parameters of the loss by name, of ``function`` too: {sharpness_negative: 1.2} of soft_gated."""
    scale_by_std: bool | None = None
    """Divide advantages by the standard deviation of the group."""
    std_ddof: Literal[0, 1] | None = None
    """Standard deviation with n (0) or n - 1 (1)."""
    std_epsilon: PositiveFloat | None = None
    """Added to the standard deviation."""
    normalize: NormalizerName | None = None
    """The denominator of the loss."""
    clip_low: Annotated[PositiveFloat | None, _CLIPS] = None
    """How far below 1 a ratio may fall."""
    clip_high: Annotated[PositiveFloat | None, _CLIPS] = None
    """How far above 1 a ratio may rise."""
    ratio_max: Annotated[PositiveFloat | None, _LIMITS] = None
    """Largest ratio itself, not a distance from 1."""
    kl_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the KL to the reference; at 0 no reference is kept in memory."""
    kl_in: Annotated[KLPlacement | None, CountsWith("kl_coef")] = None
    """Where the KL counts: in the loss, in the reward of a completion, or in the advantage of each token."""
    kl_estimator: Annotated[KLName | None, CountsWith("kl_coef")] = None
    """How the KL of a token is estimated."""
    kl_importance: Annotated[bool | None, CountsWith("kl_coef")] = None
    """Weigh the KL of a token by its ratio, which gives it the gradient of the KL."""
    reference: Annotated[ReferenceName | None, CountsWith("kl_coef")] = None
    """The model to which the KL is measured."""
    teacher: str | None = None
    """For reference teacher: a run, folder or Hugging Face Hub name with the policy's tokenizer, or the URL of a
    server."""
    teacher_hint: str | None = None
    """Text after the question that only the reference reads, with columns of the row in braces."""
    reference_every_steps: Annotated[PositiveInt | None, CountsWith("reference", ("refreshed", "average"))] = None
    """refreshed, average: steps between moves of the reference."""
    reference_share: Annotated[Annotated[float, Field(gt=0, le=1)] | None, CountsWith("reference", ("average",))] = None
    """average: how much of the policy enters the reference each time."""
    old_logprobs: OldName | None = None
    """Source of the old log-probabilities: the trainer or the sampler."""
    correction: CorrectionName | None = None
    """Weights for the gap between sampler and trainer, which is logged in any case."""
    correction_level: Annotated[CorrectionLevel | None, _CORRECTS] = None
    """Ratio per token, per completion, or its geometric mean."""
    correction_low: Annotated[Annotated[float, Field(ge=0)] | None, _CORRECTS] = None
    """Lower bound of the ratio."""
    correction_high: Annotated[PositiveFloat | None, _CORRECTS] = None
    """Upper bound of the ratio."""
    off_policy_threshold: PositiveFloat | None = None
    """Drop worse-than-average completions whose mean of log p_sampler - log p is above this."""
    entropy_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the entropy bonus."""
    entropy_target: PositiveFloat | None = None
    """Adapt entropy_coef to keep the entropy above this, in nats."""
    entropy_coef_step: Annotated[PositiveFloat | None, CountsWith("entropy_target")] = None
    """How fast entropy_coef adapts, per step."""
    entropy_coef_max: Annotated[PositiveFloat | None, CountsWith("entropy_target")] = None
    """Upper bound of entropy_coef."""
    high_entropy_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Train only on this fraction of the tokens, the most uncertain ones."""
    mask_truncated: bool = False
    """Leave truncated completions out of the loss."""

    def num_rows(self, prompts: int) -> int:
        """Completions of so many prompts."""
        return prompts * self.group_size

    def num_groups(self, rows: int) -> int:
        """Whole groups among so many completions."""
        return rows // self.group_size

    def choices(self) -> dict[str, Any]:
        """The columns that it replaces in its row of the table, by name."""
        chosen = self.model_dump(
            exclude={
                "type",
                "group_size",
                "function",
                "advantage_function",
                "loss_options",
                "mask_truncated",
                "teacher",
                "teacher_hint",
            }
        )
        return {key: value for key, value in chosen.items() if value is not None}

    @property
    def row_name(self) -> str:
        """The row of the table; a loss of the user's own stands in the row of grpo."""
        return "grpo" if self.type == "custom" else self.type

    def make(
        self,
        sampling: SamplingParams,
        *,
        loss: TokenLoss | None = None,
        advantage: Advantage | None = None,
        part_weights: Mapping[str, float] | None = None,
    ) -> Algorithm:
        """The algorithm for completions that are sampled so; functions of the user's own take the place of names.

        Raises what ``presets.build`` raises.
        """
        from oncurve.algorithm.presets import build  # lazy: it loads torch

        functions = {"loss": loss, "advantage": advantage}
        return build(
            self.row_name,
            group_size=self.group_size,
            max_completion_tokens=sampling.max_completion_tokens,
            loss_options=self.loss_options,
            part_weights=part_weights,
            **{**self.choices(), **{name: function for name, function in functions.items() if function is not None}},
        )

    def row(self) -> Preset:
        """That row with what is replaced in it. Raises ValueError for what does not exist."""
        return resolve(self.row_name, **self.choices())

    @property
    def measures_kl(self) -> bool:
        """There is a KL term, whose other side is not the policy that sampled; of a resolved recipe."""
        return bool(self.kl_coef) and self.reference != "old"

    def with_doubled_kl(self) -> str:
        """The override of a recipe that doubles the weight of its KL term."""
        return f"algorithm.kl_coef={2 * self.row().kl_coef!r}"

    def with_row(self, name: str) -> AlgorithmSection:
        """Another row of the table as it is, for groups of this size. Nothing is checked."""
        return AlgorithmSection.model_construct(type=name, group_size=self.group_size)

    def check_baseline(self, row: Preset) -> None:
        """Raises ConfigError for groups of one, unless no advantage is taken."""
        if self.group_size < 2 and row.advantage != "none":
            raise ConfigError(
                "algorithm: group_size below 2. A group of one has no baseline. Set algorithm.group_size to at least 2."
            )

    def check_teacher(self, row: Preset) -> None:
        """Raises ConfigError for a teacher without a KL to it, and for a KL to a teacher that is not named."""
        if (row.reference == "teacher" and row.has_kl) != (self.teacher is not None):
            raise ConfigError(
                f"algorithm.reference is {row.reference}, algorithm.kl_coef {row.kl_coef:g} and algorithm.teacher "
                f"{self.teacher}: a teacher belongs to reference teacher with kl_coef above 0, and they need it. Set "
                f"algorithm.teacher to a run, a folder or a Hugging Face Hub name, or leave it out"
            )

    def check_hint(self, row: Preset) -> None:
        """Raises ConfigError for a hint to a reference that does not teach."""
        is_taught = row.kl_in == "advantage" and row.has_kl and row.reference != "old"
        if self.teacher_hint is not None and not is_taught:
            raise ConfigError(
                "algorithm.teacher_hint is a text for a reference that teaches, and this one does not. Use "
                "algorithm.type distil, with reference teacher, base or frozen"
            )

    @property
    def has_served_teacher(self) -> bool:
        """The teacher is the address of a server."""
        return self.teacher is not None and self.teacher.startswith(("http://", "https://"))

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
                "give both, such as {type: custom, function: losses.py:mine}; an advantage_function goes with any type"
            )
        return self
