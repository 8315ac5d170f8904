"""Sections for rewards: one per type, with its settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.settings import NonNegative, Section


class RewardSection(Section):
    """One term of the reward."""

    weight: float = 1.0
    name: str | None = None
    """Name of the part in metrics; None takes the type's."""
    only_if_correct: bool = False
    """Pay this term only when the answer is correct."""
    held_out: bool = False
    """Grade and log it as ``reward/held_out/<name>``, but never train on it."""
    rotate_every_steps: PositiveInt | None = None
    """The terms with this key take turns, each rewards so many steps; None gives in every step."""

    @model_validator(mode="after")
    def _check_held_out(self) -> RewardSection:
        for key, value in (("only_if_correct", self.only_if_correct), ("rotate_every_steps", self.rotate_every_steps)):
            if self.held_out and value:
                raise ValueError(
                    f"rewards: {self.name or type(self).__name__} is held_out, so it pays nothing, and "
                    f"{key} is about what it pays. Remove one of the two keys"
                )
        return self


class R1ZeroReward(RewardSection):
    """1 for the right answer in the right format, else 0; format and answer are also logged apart."""

    type: Literal["r1_zero"] = "r1_zero"
    timeout_seconds: PositiveFloat = 3.0


class MathematicsReward(RewardSection):
    """Equality with the reference answer."""

    type: Literal["mathematics"] = "mathematics"
    answer_from: Literal["boxed", "answer_tag", "hash", "any", "choice"] = "any"
    """Where the final answer stands: the last boxed expression, the answer tag, after ####, or any of them."""
    scale: Literal["binary", "signed", "graded"] = "binary"
    """0 and 1; -1 and +1; or 0, ``partial`` and 1."""
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """graded: what the right value in the wrong place gives."""
    timeout_seconds: PositiveFloat = 3.0


class FormatReward(RewardSection):
    """The tags are there, once each, in order."""

    type: Literal["format"] = "format"
    tags: tuple[str, str] = ("think", "answer")
    per_tag: bool = False
    """Credit for each tag that stands right, instead of all or nothing."""
    scale: Literal["binary", "signed"] = "binary"
    """0 and 1; or -1 and +1, so that a weight of 0.5 gives and takes one half."""


class BoxedFormatReward(RewardSection):
    r"""Exactly one boxed expression after the thinking, not empty."""

    type: Literal["boxed_format"] = "boxed_format"


class HashFormatReward(RewardSection):
    """Exactly one ####, at the start of the last line, with an answer behind it."""

    type: Literal["hash_format"] = "hash_format"


class StepFormatReward(RewardSection):
    """Numbered steps from 1 without a gap, none of them said twice."""

    type: Literal["step_format"] = "step_format"
    min_steps: PositiveInt = 2


class ProgramsReward(RewardSection):
    """The program in the completion passes the tests of its row, run in a sandbox."""

    type: Literal["programs"] = "programs"
    scale: Literal["binary", "pass_rate"] = "binary"
    """1 only if all tests pass, or the fraction that does."""
    require_fence: bool = True
    """Only a fenced block is a program; false takes the whole completion where there is none."""
    isolation: Literal["bubblewrap", "landlock"] = "bubblewrap"
    """The weakest isolation that you accept; see docs/rewards.md."""
    cpu_seconds: PositiveInt = 3
    """Processor time for each test of a program."""


class JsonSchemaReward(RewardSection):
    """The completion is JSON that a schema or a pydantic model accepts; exactly one of the three sources is given."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: str | None = None
    """The schema as JSON text."""
    model: str | None = None
    """module:name of a pydantic model."""
    schema_column: str | None = None
    """Column of the row that holds the schema as JSON text."""
    gold_column: str | None = "answer"
    """Column with the right object, for credit by field; None compares with nothing."""
    around: Literal["nothing", "fence", "text"] = "nothing"
    """What may stand around the JSON: nothing, one fence, or any text."""
    answer_from: Literal["text", "answer_tag"] = "text"
    scale: Literal["binary", "graded"] = "binary"
    """1 if valid; or 0.2 for JSON, 0.5 for the right keys, up to 1 by field."""
    timeout_seconds: PositiveFloat = 2.0


class ToolCallsReward(RewardSection):
    """The calls in the completion fit the declared tools; nothing is executed."""

    type: Literal["tool_calls"] = "tool_calls"
    call_format: Literal["openai", "hermes"] = "openai"
    tools_column: str = "tools"
    gold_column: str | None = "answer"
    """Column with the right calls; None accepts any valid ones."""
    around: Literal["nothing", "fence", "text"] = "nothing"
    in_order: bool = True
    min_calls: NonNegative = 1
    max_calls: NonNegative | None = None
    scale: Literal["binary", "graded"] = "binary"
    timeout_seconds: PositiveFloat = 2.0


class JudgeReward(RewardSection):
    """A language model's opinion, asked over an OpenAI-compatible endpoint. It costs money for every completion."""

    type: Literal["judge"] = "judge"
    base_url: str
    model: str
    rubric: str | None = None
    """What to judge by; None takes the package's."""
    reference_column: str | None = "answer"
    correct_from: float | None = None
    """Scores from here on count as correct; None has no part "correct"."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; the key itself never is in a recipe."""
    concurrency: PositiveInt = 8
    timeout_seconds: PositiveFloat = 60.0
    max_requests: PositiveInt | None = None
    max_usd: PositiveFloat | None = None
    """Stop asking when this much may have been spent; what is left has no reward."""
    prompt_usd_per_million_tokens: Annotated[float, Field(ge=0)] = 0.0
    completion_usd_per_million_tokens: Annotated[float, Field(ge=0)] = 0.0
    cache_path: str | None = None


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


class CosineLengthReward(RewardSection):
    """Correctness that gives more for a short right answer and less against a long wrong one; it replaces the term
    that it grades with."""

    type: Literal["cosine_length"] = "cosine_length"
    correctness: Literal["mathematics", "r1_zero", "programs"] = "mathematics"
    """Which type decides whether the answer is right, with that type's defaults."""
    answer_from: Literal["boxed", "answer_tag", "hash", "any"] = "any"
    """correctness mathematics: where the final answer stands."""
    max_tokens: PositiveInt = 512
    """A completion that reaches this length gets ``exceeded``."""
    correct: tuple[float, float] = (1.0, 0.5)
    """Right answers: what length 0 and what max_tokens pay."""
    wrong: tuple[float, float] = (-1.0, -0.5)
    """Wrong answers: what length 0 and what max_tokens pay."""
    exceeded: float = -1.0


class CustomReward(RewardSection):
    """Your function, TRL's signature or f(completion, answer)."""

    type: Literal["custom"] = "custom"
    function: str
    """module:name or path/to/file.py:name."""
    isolate: bool = False
    """Run it in a process of its own with limits on time and memory; it must then be importable by name."""
    timeout_seconds: PositiveFloat = 60.0
    """isolate: time for the completions of one prompt. Otherwise it bounds async functions only."""


class GivenReward(RewardSection):
    """A function or object that a Python program passes to oncurve.train or oncurve.Trainer, known by its name."""

    type: Literal["given"] = "given"
    timeout_seconds: PositiveFloat = 60.0
    """Bounds async functions."""


class EnvironmentSection(RewardSection):
    """What the episode's own environment says that it is worth (``get_reward``, or the rewards of its steps)."""

    type: Literal["environment"] = "environment"


Reward = Annotated[
    R1ZeroReward
    | MathematicsReward
    | FormatReward
    | BoxedFormatReward
    | HashFormatReward
    | StepFormatReward
    | ProgramsReward
    | JsonSchemaReward
    | ToolCallsReward
    | JudgeReward
    | LengthReward
    | OverlongReward
    | RepetitionReward
    | CosineLengthReward
    | CustomReward
    | GivenReward
    | EnvironmentSection,
    Field(discriminator="type"),
]
