"""Sections for rewards: one per type, with its settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.section import NonNegative, Section


class RewardSection(Section):
    """One term of the reward."""

    weight: float = 1.0
    """Factor of this term in the sum."""
    name: str | None = None
    """Name in the metrics; None: the type."""
    only_if_correct: bool = False
    """Count this term only for correct answers."""
    held_out: bool = False
    """Grade and log as ``reward/held_out/<name>``, but never train on it."""
    rotate_every_steps: PositiveInt | None = None
    """Terms with this key take turns, each for so many steps."""
    limited: bool = True
    """All terms that do not know whether an answer is right pay together at most the weight of those that do; false
    takes this term out of that limit."""

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
    """Time limit of a comparison."""


class MathematicsReward(RewardSection):
    """Equality with the reference answer."""

    type: Literal["mathematics"] = "mathematics"
    answer_from: Literal["boxed", "answer_tag", "hash", "any", "choice"] = "any"
    """Where the answer is: the last box, the answer tag, after ####, or any of them; choice: the letter of an
    option."""
    scale: Literal["binary", "signed", "graded"] = "binary"
    """0 and 1; -1 and 1; or 0, ``partial`` and 1."""
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """graded: reward of the right value in the wrong place."""
    timeout_seconds: PositiveFloat = 3.0
    """Time limit of a comparison."""


class FormatReward(RewardSection):
    """The tags are there, once each, in order."""

    type: Literal["format"] = "format"
    tags: tuple[str, str] = ("think", "answer")
    """The two tags."""
    per_tag: bool = False
    """Credit for each correct tag."""
    scale: Literal["binary", "signed"] = "binary"
    """0 and 1; or -1 and 1."""


class BoxedFormatReward(RewardSection):
    r"""Exactly one boxed expression after the thinking, not empty."""

    type: Literal["boxed_format"] = "boxed_format"


class HashFormatReward(RewardSection):
    """Exactly one ####, at the start of the last line, followed by an answer."""

    type: Literal["hash_format"] = "hash_format"


class StepFormatReward(RewardSection):
    """Numbered steps from 1, without gaps or repetition."""

    type: Literal["step_format"] = "step_format"
    min_steps: PositiveInt = 2
    """Fewest steps."""


class ProgramsReward(RewardSection):
    """The program in the completion passes the tests of its row, run in a sandbox."""

    type: Literal["programs"] = "programs"
    scale: Literal["binary", "pass_rate"] = "binary"
    """1 if all tests pass; or the fraction that passes."""
    require_fence: bool = True
    """Only a fenced block is a program; false also takes plain text."""
    isolation: Literal["bubblewrap", "landlock"] = "bubblewrap"
    """The weakest isolation that you accept; see docs/rewards.md."""
    cpu_seconds: PositiveInt = 3
    """Processor time per test."""


class JsonSchemaReward(RewardSection):
    """The completion is JSON that a schema or pydantic model accepts; give exactly one of the three sources."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: str | None = None
    """The schema as JSON text."""
    model: str | None = None
    """module:name of a pydantic model."""
    schema_column: str | None = None
    """Column of the row that holds the schema as JSON text."""
    gold_column: str | None = "answer"
    """Column with the correct object, for credit by field; None: no comparison."""
    around: Literal["nothing", "fence", "text"] = "nothing"
    """What may surround the JSON: nothing, one fence, or any text."""
    answer_from: Literal["text", "answer_tag"] = "text"
    """The whole text, or the answer tag."""
    scale: Literal["binary", "graded"] = "binary"
    """1 if valid; or 0.2 for JSON, 0.5 for the right keys, up to 1 by field."""
    timeout_seconds: PositiveFloat = 2.0
    """Time limit of a comparison."""


class ToolCallsReward(RewardSection):
    """The calls in the completion fit the declared tools; nothing is executed."""

    type: Literal["tool_calls"] = "tool_calls"
    call_format: Literal["openai", "hermes"] = "openai"
    """How calls are written."""
    tools_column: str = "tools"
    """Column with the declared tools."""
    gold_column: str | None = "answer"
    """Column with the correct calls; None accepts any valid ones."""
    around: Literal["nothing", "fence", "text"] = "nothing"
    """What may surround the calls: nothing, one fence, or any text."""
    in_order: bool = True
    """The order of calls matters."""
    min_calls: NonNegative = 1
    """Fewest calls."""
    max_calls: NonNegative | None = None
    """Most calls; None: no limit."""
    scale: Literal["binary", "graded"] = "binary"
    """1 if right; or partial credit."""
    timeout_seconds: PositiveFloat = 2.0
    """Time limit of a comparison."""


class JudgeReward(RewardSection):
    """A grade from a language model behind an OpenAI-compatible endpoint; every completion costs a request."""

    type: Literal["judge"] = "judge"
    base_url: str
    """Address of the endpoint."""
    model: str
    """Name of the judging model."""
    rubric: str | None = None
    """What to judge by; None: the package's own."""
    reference_column: str | None = "answer"
    """Column shown to the judge as reference."""
    correct_from: float | None = None
    """Scores from here on count as correct; None: no part "correct"."""
    api_key_env: str | None = None
    """Environment variable with the key."""
    concurrency: PositiveInt = 8
    """Requests at the same time."""
    timeout_seconds: PositiveFloat = 60.0
    """Time limit of a request."""
    max_requests: PositiveInt | None = None
    """Stop asking after so many."""
    max_usd: PositiveFloat | None = None
    """Stop asking after this cost; the rest has no reward."""
    prompt_usd_per_million_tokens: Annotated[float, Field(ge=0)] = 0.0
    """Price, for max_usd."""
    completion_usd_per_million_tokens: Annotated[float, Field(ge=0)] = 0.0
    """Price, for max_usd."""
    cache_path: str | None = None
    """File that keeps answers of the judge."""


class LengthReward(RewardSection):
    """1 while a completion has between min and max tokens, less outside."""

    type: Literal["length"] = "length"
    min_tokens: NonNegative = 0
    """Shortest length with full reward."""
    max_tokens: PositiveInt = 512
    """Longest length with full reward."""


class OverlongReward(RewardSection):
    """DAPO's soft penalty: 0 down to -1 over the last tokens before the limit."""

    type: Literal["overlong"] = "overlong"
    max_tokens: PositiveInt = 512
    """The limit."""
    buffer_tokens: PositiveInt = 128
    """Tokens before the limit over which the reward falls to -1."""


class RepetitionReward(RewardSection):
    """A penalty for repeated passages."""

    type: Literal["repetition"] = "repetition"


class CosineLengthReward(RewardSection):
    """Correctness and length together (arXiv:2502.03373); it replaces the term for correctness."""

    type: Literal["cosine_length"] = "cosine_length"
    correctness: Literal["mathematics", "r1_zero", "programs"] = "mathematics"
    """The type that decides what is correct, with its defaults."""
    answer_from: Literal["boxed", "answer_tag", "hash", "any"] = "any"
    """correctness mathematics: where the answer is."""
    max_tokens: PositiveInt = 512
    """A completion of this length gets ``exceeded``."""
    correct: tuple[float, float] = (1.0, 0.5)
    """Reward of a correct answer at length 0 and at max_tokens."""
    wrong: tuple[float, float] = (-1.0, -0.5)
    """Reward of a wrong answer at length 0 and at max_tokens."""
    exceeded: float = -1.0
    """Reward at the limit."""


class CustomReward(RewardSection):
    """Your function, TRL's signature or f(completion, answer)."""

    type: Literal["custom"] = "custom"
    function: str
    """module:name or path/to/file.py:name."""
    isolate: bool = False
    """Run it in a process with limits; it must be importable by name."""
    timeout_seconds: PositiveFloat = 60.0
    """Time limit per completion; isolate: for the completions of one prompt."""
    nan_is_none: bool = False
    """NaN means None, no opinion; false: it is an error."""
    correct_at: float | None = None
    """Rewards from here on count as correct. None: 1 if all rewards are 0 or 1; otherwise nothing is called correct."""


class GivenReward(RewardSection):
    """A function or object passed to oncurve.train or oncurve.Trainer, by its name."""

    type: Literal["given"] = "given"
    timeout_seconds: PositiveFloat = 60.0
    """Time limit per completion."""
    nan_is_none: bool = False
    """NaN means None, no opinion; false: it is an error."""
    correct_at: float | None = None
    """Rewards from here on count as correct. None: 1 if all rewards are 0 or 1; otherwise nothing is called correct."""


class EnvironmentSection(RewardSection):
    """The reward of the episode's environment: ``get_reward``, or the rewards of its steps."""

    type: Literal["environment"] = "environment"
    correct_at: float | None = None
    """As of custom."""


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
