"""What may a recipe say? Every key with its unit, meaning and vetted default.

A recipe holds only what differs from these defaults. Nothing below ``wiring`` ever sees these classes.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Literal, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from oncurve.algorithm.table import (
    PRESETS,
    AdvantageName,
    CorrectionLevel,
    CorrectionName,
    KLName,
    LossName,
    NormalizerName,
    OldName,
    ReferenceName,
)

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[int, Field(ge=0)]


PresetName = Annotated[str, Field(json_schema_extra={"enum": [*PRESETS, "custom"]})]


def _parts(annotation: object) -> tuple[object, ...]:
    """The members of a union type, or the type itself."""
    return get_args(annotation) or (annotation,)


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, values cannot change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, tree: object) -> object:
        """YAML's true and yes would pass as the number 1."""
        if isinstance(tree, dict):
            for key, value in cast("dict[str, object]", tree).items():
                field = cls.model_fields.get(key)
                if isinstance(value, bool) and field is not None and bool not in _parts(field.annotation):
                    raise PydanticCustomError("truth_value", "{key} takes no truth value", {"key": key})
        return cast("object", tree)


class DataSection(Section):
    """Where prompts come from and how they are written."""

    path: str | None = None
    """File, folder or hub name; None where the type says it already."""
    split: str = "train"
    columns: dict[str, str] = {}
    """Names used here to names in the data, such as {question: problem, answer: label}."""
    template: str = "think_answer"
    """think_answer, r1_zero, boxed, gsm8k, reasoning_answer or question_only."""
    chat: bool = False
    """Write the template's messages through the model's chat template: for instruct models."""
    few_shot: NonNegative = 0
    """Worked examples of the training set shown before the question."""
    limit: PositiveInt | None = None
    """Use at most this many rows; None takes all."""
    retire_above: Annotated[float, Field(gt=0, le=1)] | None = None
    """Leave out training prompts whose running pass rate reached this; None keeps all."""
    prefer_half_solved: bool = False
    """Choose the prompts whose running pass rate is nearest to one half among twice as many as a step takes."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are left out, and counted; None allows what the model's context leaves free."""


class JsonlData(DataSection):
    """A file of JSON lines."""

    type: Literal["jsonl"] = "jsonl"


class HubData(DataSection):
    """A data set of the Hugging Face hub, or one in a local folder."""

    type: Literal["huggingface"] = "huggingface"


class Gsm8kData(DataSection):
    """GSM8K: openai/gsm8k, or its JSON lines at ``path``."""

    type: Literal["gsm8k"] = "gsm8k"


class MathData(DataSection):
    """MATH: problems with LaTeX answers, from ``path`` or the hub."""

    type: Literal["math"] = "math"


class WordProblemsData(DataSection):
    """Word problems made on the spot: no file and no network."""

    type: Literal["word_problems"] = "word_problems"
    limit: PositiveInt = 4096  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many problems to make."""
    levels: tuple[PositiveInt, ...] = (1, 2)
    """Which levels of difficulty."""


class ProgramProblemsData(DataSection):
    """Small functions to write, with tests, made on the spot: no file and no network."""

    type: Literal["program_problems"] = "program_problems"
    template: str = "program"
    limit: PositiveInt = 1000  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many problems to make."""


Data = Annotated[
    JsonlData | HubData | Gsm8kData | MathData | WordProblemsData | ProgramProblemsData,
    Field(discriminator="type"),
]


class EvaluationSection(Section):
    """How the model is measured, during the run and before and after it."""

    data: Data | None = None
    """Problems that are never trained on; None holds some out of the training data."""
    num_prompts: PositiveInt = 500
    """How many problems to measure on before and after the run, and to hold out where ``data`` is None."""
    every_steps: NonNegative = 0
    """Measure after every so many steps; 0 measures only before and after the run."""
    num_prompts_during: PositiveInt = 100
    """How many problems to measure on during the run: the first of them."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy. The same for both models."""
    samples: PositiveInt = 1
    """Completions per problem; more than one needs a temperature above 0."""


class RewardSection(Section):
    """One term of the reward."""

    weight: float = 1.0
    name: str | None = None
    """Name of the part in metrics; None takes the type's."""
    only_if_correct: bool = False
    """Pay this term only when the answer is correct."""


class R1ZeroReward(RewardSection):
    """1 for the right answer in the right format, else 0; format and answer are also logged apart."""

    type: Literal["r1_zero"] = "r1_zero"
    timeout_seconds: PositiveFloat = 3.0


class MathematicsReward(RewardSection):
    """Equality with the reference answer."""

    type: Literal["mathematics"] = "mathematics"
    answer_from: Literal["boxed", "answer_tag", "hash", "any"] = "any"
    """Where the final answer stands: the last boxed expression, the answer tag, after ####, or any of them."""
    scale: Literal["binary", "signed", "graded"] = "binary"
    """0 and 1; -1 and +1; or 0, ``partial`` and 1."""
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """graded: what the right value in the wrong place pays."""
    timeout_seconds: PositiveFloat = 3.0


class FormatReward(RewardSection):
    """The tags are there, once each, in order."""

    type: Literal["format"] = "format"
    tags: tuple[str, str] = ("think", "answer")
    per_tag: bool = False
    """Credit for each tag that stands right, instead of all or nothing."""


class ProgramsReward(RewardSection):
    """The program in the completion passes the tests of its row, run in a sandbox."""

    type: Literal["programs"] = "programs"
    scale: Literal["binary", "pass_rate"] = "binary"
    """1 only if all tests pass, or the share that does."""
    require_fence: bool = True
    """Only a fenced block is a program; false takes the whole completion where there is none."""
    isolation: Literal["bubblewrap", "landlock"] = "bubblewrap"
    """The weakest isolation that you accept; see docs/rewards.md."""
    cpu_seconds: PositiveInt = 3
    """Processor time for all tests of one program."""


class LengthReward(RewardSection):
    """1 while a completion has between min and max tokens, less outside."""

    type: Literal["length"] = "length"
    min_tokens: NonNegative = 0
    max_tokens: PositiveInt = 512


class OverlongReward(RewardSection):
    """DAPO's soft penalty: 0 down to -1 over the last tokens before the limit."""

    type: Literal["overlong"] = "overlong"
    max_tokens: PositiveInt = 512
    buffer_tokens: PositiveInt = 128


class RepetitionReward(RewardSection):
    """A penalty for saying the same words again."""

    type: Literal["repetition"] = "repetition"


class CustomReward(RewardSection):
    """A function of yours, TRL's signature or f(completion, answer)."""

    type: Literal["custom"] = "custom"
    function: str
    """module:name or path/to/file.py:name."""


Reward = Annotated[
    R1ZeroReward
    | MathematicsReward
    | FormatReward
    | ProgramsReward
    | LengthReward
    | OverlongReward
    | RepetitionReward
    | CustomReward,
    Field(discriminator="type"),
]


class AlgorithmSection(Section):
    """A row of the table of algorithms and what differs from it; None takes the row's."""

    type: PresetName = "grpo"
    """Name of the row, see docs/algorithms.md; "custom" is grpo with a loss of yours."""
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
    kl_in: Literal["loss", "reward"] | None = None
    kl_estimator: KLName | None = None
    kl_importance: bool | None = None
    """Weigh the KL of a token by its ratio, so that its gradient is that of the KL."""
    reference: ReferenceName | None = None
    """What the KL is taken to: frozen, refreshed, average, old or base."""
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
    entropy_coef: Annotated[float, Field(ge=0)] | None = None
    entropy_target: PositiveFloat | None = None
    """Adapt entropy_coef so that the entropy, in nats, does not fall below this."""
    entropy_coef_step: PositiveFloat | None = None
    entropy_coef_max: PositiveFloat | None = None
    high_entropy_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Train only on this share of the tokens, those with the highest entropy."""
    mask_truncated: bool = False
    """Leave completions that never ended out of the loss."""

    @model_validator(mode="after")
    def _check_group(self) -> AlgorithmSection:
        if self.group_size < 2:
            raise ValueError(
                f"algorithm.group_size is {self.group_size}; a group of one has no baseline. Use at least 2"
            )
        if self.type not in (*PRESETS, "custom"):
            near = difflib.get_close_matches(self.type, [*PRESETS, "custom"], n=1)
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


class RolloutSection(Section):
    """How completions are sampled."""

    type: Literal["engine", "transformers"] = "engine"
    """engine: in this process, fast. transformers: its generate, the slow reference."""
    temperature: PositiveFloat = 1.0
    max_completion_tokens: PositiveInt = 256
    min_completion_tokens: NonNegative = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    min_p: Fraction = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay in it."""
    max_rows: PositiveInt = 256
    """Completions sampled at the same time."""


class PolicySection(Section):
    """The model in training."""

    compute_type: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Type of the arithmetic; weights and optimizer stay in float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """auto takes a GPU if there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    tokens_per_microbatch: PositiveInt = 8192
    """Prompt and completion tokens in one forward and backward pass."""
    packing: bool = True
    """Compute without padding and each prompt once for its group, where the model allows; false pads every row."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose authors you trust."""
    revision: str | None = None
    """Branch, tag or commit of a model of the hub."""


class OptimizerSection(Section):
    """AdamW and its schedule."""

    learning_rate: PositiveFloat = 1e-6
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    epsilon: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_gradient_norm: Annotated[float, Field(ge=0)] = 1.0
    """The gradient is scaled down to this norm; 0 leaves it alone."""
    warmup_updates: NonNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


class RunSection(Section):
    """How long, how much, where to."""

    steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 16
    """Prompts sampled in one step; times algorithm.group_size gives the completions of the step."""
    refill_rounds: NonNegative = 0
    """Replace groups without a signal by groups of other prompts, at most so many times a step (dynamic sampling)."""
    completions_per_update: PositiveInt | None = None
    """Completions in one optimizer update; None makes one update of all of them. Must divide them."""
    seed: NonNegative = 0
    folder: str = "runs"
    """The run gets a folder of its own inside this one."""
    name: str | None = None
    """Name of that folder; None makes one from the recipe and the time."""
    save_every_steps: NonNegative = 0
    """Save a checkpoint after every so many steps; 0 saves only the final model."""
    keep_checkpoints: PositiveInt = 2
    """How many checkpoints to keep, besides the final model."""
    rollouts_every_steps: PositiveInt = 10
    """Write the completions of every so many steps to the run folder."""
    max_error_fraction: Fraction = 0.2
    """Stop when grading fails for more than this share of a step's completions."""


class Config(Section):
    """A whole recipe."""

    model: str
    """Folder or hub name of a causal language model; "embedded" is the small one inside this package."""
    data: Data
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)] = (R1ZeroReward(),)
    algorithm: AlgorithmSection = AlgorithmSection()
    rollouts: RolloutSection = RolloutSection()
    policy: PolicySection = PolicySection()
    optimizer: OptimizerSection = OptimizerSection()
    evaluation: EvaluationSection = EvaluationSection()
    run: RunSection = RunSection()

    @property
    def completions_per_step(self) -> int:
        """Prompts times group size."""
        return self.run.prompts_per_step * self.algorithm.group_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates on one batch of rollouts."""
        return self.completions_per_step // (self.run.completions_per_update or self.completions_per_step)

    @model_validator(mode="after")
    def _check_batch(self) -> Config:
        size = self.run.completions_per_update
        if size and self.completions_per_step % size:
            fitting = [n for n in range(1, self.completions_per_step + 1) if self.completions_per_step % n == 0]
            nearest = min(fitting, key=lambda n: abs(n - size))
            raise ValueError(
                f"run.completions_per_update is {size}, which does not divide the {self.completions_per_step} "
                f"completions of a step (run.prompts_per_step {self.run.prompts_per_step} x algorithm.group_size "
                f"{self.algorithm.group_size}). The nearest that does is {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> Config:
        if self.evaluation.samples > 1 and self.evaluation.temperature == 0:
            raise ValueError(
                f"evaluation.samples is {self.evaluation.samples} at evaluation.temperature 0, which would sample the "
                f"same completion each time. Set the temperature above 0 or the samples to 1"
            )
        return self
