"""Settings of the rewards whose graders are loaded when one is made: programs, JSON, tool calls, a judge, length."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction
from oncurve.extensions import imported
from oncurve.rewards.mathematics import MathematicsReward
from oncurve.rewards.r1_zero import R1ZeroReward
from oncurve.rewards.section import RewardSection, Surroundings
from oncurve.section import NonNegative, Section


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
    checker: str | None = None
    """File with a function check(input, output, expected) that decides whether an output is right; None: equality."""
    checker_column: str = "checker"
    """Column with the code of such a function; it goes before the file's."""
    packages: tuple[str, ...] = ()
    """Installed packages that programs may import, such as numpy; without any, the standard library only."""
    workers: PositiveInt | None = None
    """Programs that run at the same time; None: two per processor, at most 32."""

    is_sandboxed: ClassVar[bool] = True
    gives_correct: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return imported("oncurve.rewards.programs:Programs")(self)


class JsonSchemaReward(RewardSection):
    """The completion is JSON that a schema or pydantic model accepts; give exactly one of the three sources."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: str | dict[str, Any] | None = None
    """The schema, as a mapping or as JSON text."""
    model: str | None = None
    """module:name of a pydantic model."""
    schema_column: str | None = None
    """Column of the row that holds the schema as JSON text."""
    gold_column: str | None = "answer"
    """Column with the correct object, for credit by field; None: no comparison."""
    around: Literal["nothing", "fence", "text"] = "nothing"
    """Text allowed around the JSON: nothing, one fence, or any text."""
    answer_from: Literal["text", "answer_tag"] = "text"
    """The whole text, or the answer tag."""
    scale: Literal["binary", "graded"] = "binary"
    """1 if valid; or 0.2 for JSON, 0.5 for the right keys, up to 1 by field."""
    timeout_seconds: PositiveFloat = 2.0
    """Time limit of a comparison."""
    workers: PositiveInt | None = None
    """Processes that compare; None: one per processor, at most 16."""

    gives_correct: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        grader = imported("oncurve.rewards.json_schema:JsonSchema")
        return grader(schema=self.json_schema, **self.options("json_schema"))


class ToolCallsReward(RewardSection):
    """The calls in the completion fit the declared tools; nothing is executed."""

    type: Literal["tool_calls"] = "tool_calls"
    call_format: Literal["openai", "hermes", "qwen_coder"] = "openai"
    """How calls are written: a list in JSON; JSON in <tool_call> tags; or tags alone, as Qwen3-Coder writes."""
    tools_column: str = "tools"
    """Column with the declared tools."""
    gold_column: str | None = "answer"
    """Column with the correct calls; None accepts any valid ones."""
    around: Literal["nothing", "fence", "text"] = "nothing"
    """Text allowed around the calls: nothing, one fence, or any text."""
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
    workers: PositiveInt | None = None
    """Processes that compare; None: one per processor, at most 16."""

    gives_correct: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return imported("oncurve.rewards.tool_calls:ToolCalls")(self)


class InstructionsReward(RewardSection):
    """The completion meets the verifiable constraints that its row lists, such as those of IFEval."""

    type: Literal["instructions"] = "instructions"
    names_column: str = "instruction_id_list"
    """Column with the names of the constraints."""
    arguments_column: str = "kwargs"
    """Column with the arguments of each, in the same order."""
    scale: Literal["binary", "graded"] = "binary"
    """1 if all are met; or the fraction that is met."""

    gives_correct: ClassVar[bool] = True
    is_form: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        for column in (self.names_column, self.arguments_column):
            if around.columns is not None and column not in around.columns:
                known = ", ".join(around.columns)
                raise ConfigError(f"rewards: {self.key} reads column {column!r}, and the data has {known}.")
        return imported("oncurve.rewards.instructions:Instructions")(self)


class Criterion(Section):
    """One thing to judge by, with its weight in the score."""

    name: str
    """Name of its part in the metrics."""
    text: str
    """The criterion for the judge."""
    weight: PositiveFloat = 1.0
    """Share in the score, relative to the other weights."""


class JudgeReward(RewardSection):
    """A grade from a language model behind an OpenAI-compatible endpoint; every completion costs a request."""

    type: Literal["judge"] = "judge"
    base_url: str
    """Address of the endpoint."""
    model: str
    """Name of the judging model."""
    rubric: str | None = None
    """Criteria of the judge; None: the package's own."""
    criteria: tuple[Criterion, ...] = ()
    """Criteria that are scored by themselves in one request, each with ``name``, ``text`` and ``weight``."""
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

    is_paid_for: ClassVar[bool] = True
    has_any_value: ClassVar[bool] = True

    def says_correct(self) -> bool:
        """Whether scores from a number on count as correct."""
        return self.correct_from is not None

    def reads_answer(self, around: Surroundings) -> bool:
        """The package's own rubric does."""
        return self.rubric is None or "answer" in self.rubric

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return imported("oncurve.rewards.llm_judge:Judge")(self)


class LengthReward(RewardSection):
    """1 while a completion has between min and max tokens, less outside."""

    type: Literal["length"] = "length"
    min_tokens: NonNegative = 0
    """Shortest length with full reward."""
    max_tokens: PositiveInt = 512
    """Longest length with full reward."""

    is_form: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return imported("oncurve.rewards.shaping:LengthWindow")(self.min_tokens, self.max_tokens)


class OverlongReward(RewardSection):
    """DAPO's soft penalty: 0 down to -1 over the last tokens before the limit."""

    type: Literal["overlong"] = "overlong"
    max_tokens: PositiveInt = 512
    """The limit."""
    buffer_tokens: PositiveInt = 128
    """Tokens before the limit over which the reward falls to -1."""

    punishes_length: ClassVar[bool] = True
    is_form: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return imported("oncurve.rewards.shaping:Overlong")(self.max_tokens, self.buffer_tokens)


class RepetitionReward(RewardSection):
    """A penalty for repeated passages."""

    type: Literal["repetition"] = "repetition"

    is_form: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return imported("oncurve.rewards.shaping:Repetition")()


class CosineLengthReward(RewardSection):
    """Correctness and length together (arXiv:2502.03373); it replaces the term for correctness."""

    type: Literal["cosine_length"] = "cosine_length"
    correctness: Literal["mathematics", "r1_zero", "programs"] = "mathematics"
    """The type that decides what is correct, with its defaults."""
    answer_from: Literal["marked", "boxed", "answer_tag", "hash", "prose"] = "marked"
    """correctness mathematics: where the answer is."""
    max_tokens: PositiveInt = 512
    """A completion of this length gets ``exceeded``."""
    correct: tuple[float, float] = (1.0, 0.5)
    """Reward of a correct answer at length 0 and at max_tokens."""
    wrong: tuple[float, float] = (-1.0, -0.5)
    """Reward of a wrong answer at length 0 and at max_tokens."""
    exceeded: float = -1.0
    """Reward at the limit."""

    gives_correct: ClassVar[bool] = True

    def can_be_negative(self) -> bool:
        """Whether a wrong or a long completion may earn less than zero."""
        return min(*self.wrong, self.exceeded) < 0 or super().can_be_negative()

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades, around one that says whether the answer is right."""
        inner = {
            "mathematics": MathematicsReward(answer_from=self.answer_from),
            "r1_zero": R1ZeroReward(),
            "programs": ProgramsReward(),
        }[self.correctness]
        return imported("oncurve.rewards.shaping:CosineLength")(
            inner.make(around), **self.options("correctness", "answer_from")
        )
