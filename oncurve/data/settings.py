"""Data sections of a recipe: which rows, and how they are written."""

from __future__ import annotations

from datetime import datetime
from pathlib import PurePath
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.section import CountsWith, Fraction, Harmless, NonNegative, Section


class DataSection(Section):
    """Prompts and how they are written."""

    path: str | None = None
    """File, folder or Hugging Face Hub name; None if the type implies it."""
    split: str = "train"
    """Split of a dataset."""
    subset: str | None = None
    """Configuration of a dataset on the Hugging Face Hub, such as main; None: its default."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Which column is which, such as {question: problem, answer: label}."""
    template: str = "think_answer"
    """think_answer, r1_zero, boxed, gsm8k, reasoning_answer, question_only, plain, as_is, tool_answer, program,
    complete_program, or a file with {question}."""
    chat: bool | Literal["auto"] | dict[str, Any] = "auto"
    """Use the model's chat template: true, false, its arguments, such as {enable_thinking: false}, or auto: where there
    is one and ``template`` is not made for base models (r1_zero, as_is)."""
    chat_template: Annotated[str | None, CountsWith("chat")] = None
    """A Jinja file in the place of the model's chat template, or adding: the model's own, made to leave earlier turns
    as they were."""
    now: Annotated[Harmless[datetime | None], CountsWith("chat")] = None
    """The time that chat templates see, such as 2026-11-25T09:00:00; None: when the run began."""
    few_shot: NonNegative = 0
    """Worked examples before the question, from the training set."""
    limit: PositiveInt | None = None
    """Use at most this many rows."""
    retire_above: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop using training prompts whose running pass rate reaches this."""
    shuffle: bool = True
    """Shuffle the training rows; false takes them in their order, such as easy ones first."""
    prefer_half_solved: bool = False
    """Draw twice as many prompts, and use those with a pass rate nearest to one half."""
    max_prompt_tokens: PositiveInt | None = None
    """Drop and count longer prompts; None: what the model's context allows."""


class JsonlData(DataSection):
    """A file of JSON lines."""

    type: Literal["jsonl"] = "jsonl"


class CsvData(DataSection):
    """A CSV or TSV file whose first line names the columns."""

    type: Literal["csv"] = "csv"


class HubData(DataSection):
    """A dataset on the Hugging Face Hub, or one in a local folder."""

    type: Literal["huggingface"] = "huggingface"


class Gsm8kData(DataSection):
    """GSM8K: openai/gsm8k, or its JSON lines at ``path``."""

    type: Literal["gsm8k"] = "gsm8k"


class MathData(DataSection):
    """MATH: problems with LaTeX answers, from ``path`` or the Hugging Face Hub."""

    type: Literal["math"] = "math"


class MadeData(DataSection):
    """Rows that are made, and stand in no file."""

    @model_validator(mode="after")
    def _check_source(self) -> MadeData:
        for name, value in (("path", self.path), ("subset", self.subset)):
            if value is not None:
                kind = FILE_TYPES.get(PurePath(value).suffix, "jsonl")
                own = self.type  # type: ignore[attr-defined]  # every section of the union has one
                raise ValueError(
                    f"{name} {value!r} would not count: the type {own} makes its rows and reads none. Leave {name} "
                    f"out, or set the type of your rows too, such as `data.type={kind}`"
                )
        return self


class WordProblemsData(MadeData):
    """Generated word problems: no file, no network."""

    type: Literal["word_problems"] = "word_problems"
    limit: PositiveInt = 4096  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many problems to make."""
    levels: tuple[PositiveInt, ...] = (1, 2)
    """Levels of difficulty."""


class ProgramProblemsData(MadeData):
    """Generated small functions to write, with tests."""

    type: Literal["program_problems"] = "program_problems"
    template: str = "program"
    limit: PositiveInt = 1000  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many problems to make."""


class EpisodeData(MadeData):
    """Generated rows for a policy with tools or an environment."""

    template: str = "tool_answer"
    limit: PositiveInt = 4096  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many to make."""


class CalculatorProblemsData(EpisodeData):
    """Generated word problems with numbers too long for mental arithmetic, for a policy with a calculator."""

    type: Literal["calculator_problems"] = "calculator_problems"


class CalculatorChainsData(EpisodeData):
    """The same with two operations; the second uses the result of the first."""

    type: Literal["calculator_chains"] = "calculator_chains"


class GeneratedData(MadeData):
    """Rows that a function of yours makes."""

    type: Literal["generated"] = "generated"
    function: str
    """A function `(split, count, seed=0)` that gives so many rows of a split, as module:name or file.py:name."""
    limit: PositiveInt = 4096  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many to make."""


class DemonstrationsData(MadeData):
    """Generated lessons and imperfect solutions of a task, for `oncurve sft`: lessons first. Those of another run.seed
    are others."""

    type: Literal["demonstrations"] = "demonstrations"
    task: str = "word_problems"
    """Their subject: word_problems, programs, calculator, calculator_chains, or a file.py with functions
    `lessons` and `demonstrations`."""
    shuffle: bool = False
    limit: PositiveInt = 12_800  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many to make."""
    lesson_fraction: Fraction = 0.56
    """Share of them that are lessons."""


class PythonData(DataSection):
    """Rows that a Python program passes to oncurve.train or oncurve.Trainer."""

    type: Literal["given"] = "given"


FILE_TYPES = {
    ".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv",
    ".parquet": "huggingface", ".arrow": "huggingface",
}  # fmt: skip


def with_type(section: object) -> object:
    """A data section whose type its path says; any other as it is."""
    if isinstance(section, dict):
        keys = cast("dict[str, object]", section)
        type_of_file = FILE_TYPES.get(PurePath(str(keys.get("path"))).suffix)
        return keys if type_of_file is None or "type" in keys else {"type": type_of_file, **keys}
    return section


Data = Annotated[
    JsonlData
    | CsvData
    | HubData
    | Gsm8kData
    | MathData
    | WordProblemsData
    | ProgramProblemsData
    | CalculatorProblemsData
    | CalculatorChainsData
    | GeneratedData
    | DemonstrationsData
    | PythonData,
    Field(discriminator="type"),
]


class SftSection(Section):
    """Supervised fine-tuning on completions in the data; `oncurve sft` sets it."""

    epochs: PositiveFloat | None = None
    """Passes over the training rows, in place of run.steps; None: run.steps counts."""
    train_on: Literal["assistant", "last"] = "assistant"
    """Rows of messages: learn all assistant messages, or only the last."""
    max_tokens: PositiveInt | None = None
    """Drop and count longer rows; None: the model's context."""
