"""The parameters of a reward function, checked against the columns of the data before anything is sampled."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.core.grading import Failure, RewardFunction, attempt

STATE_NAMES = ("step", "trainer_state", "log_metric", "log_extra")
"""Parameters for the state of the run and for what is logged beside a reward, where no column has the name."""
COMPLETION_NAMES = ("completion", "solution_str")
"""Names of the parameter that gets the completion, wherever it stands; the second is verl's. Else the first gets it."""
OPTIONAL_COLUMNS = ("data_source", "extra_info")
"""Columns that verl's functions ask for; None where the data do not have them."""
ANSWER_NAMES = (
    "answer", "ground_truth", "gold", "gold_answer", "reference", "reference_answer", "correct_answer",
    "expected", "expected_answer", "solution", "target", "label", "truth",
)  # fmt: skip
"""Parameter names that mean the reference answer, where no column has that name."""
ROW_NAMES = ("prompt", "row", *OPTIONAL_COLUMNS, *STATE_NAMES)
"""Further names that a function of one completion may ask for."""
BATCH_NAMES = ("prompts", "completions", "completion_ids", "environments", *STATE_NAMES)
"""Names that a function in TRL's style gets besides the columns."""


def completion_parameter(names: Sequence[str]) -> str | None:
    """The parameter that gets the completion of a function of one: by its name, else the first; None without any.

    >>> completion_parameter(["prompt", "completion"]), completion_parameter(["text", "answer"])
    ('completion', 'text')
    """
    return next((name for name in COMPLETION_NAMES if name in names), names[0] if names else None)


def check_parameters(function: Any, columns: Collection[str], *, location: str) -> None:
    """Refuse a reward function that asks for something no row has.

    ``columns`` are those of the data. Raises ConfigError for a parameter without a default that is neither the answer
    nor a column, and for one with a default whose name reads like a misspelled column.
    """
    if isinstance(function, RewardFunction) and not inspect.isfunction(function):
        return  # an object that gets prompts and completions as they are
    signature = attempt(lambda: inspect.signature(function))
    if isinstance(signature, Failure):
        raise ConfigError(f"rewards: the parameters of {location} cannot be read: {signature.detail}")
    parameters = signature.parameters
    is_batched = "completions" in parameters
    known = {*columns, *(BATCH_NAMES if is_batched else (*ANSWER_NAMES, *ROW_NAMES))}
    completion_name = None if is_batched else completion_parameter(list(parameters))
    if not parameters:
        raise ConfigError(
            f"rewards: {location} takes no parameter. Write def {location.rpartition(':')[2]}(completion, answer)"
        )
    for name, parameter in parameters.items():
        if (
            name == completion_name
            or parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            or name in known
        ):
            continue
        close = difflib.get_close_matches(name, [*columns, *known], n=1, cutoff=0.8)
        if parameter.default is inspect.Parameter.empty or close:
            hint = f" Did you mean {close[0]!r}?" if close else ""
            needs = "the columns" if is_batched else "`completion`, `answer`, `prompt`, `row` and the columns"
            raise ConfigError(
                f"rewards: {location} has a parameter {name!r}, which the data do not have.{hint} "
                f"It can ask for {needs} {', '.join(columns)}"
            )


def columns_of(*tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Columns that every table has, in their order; tables without rows count as having all.

    >>> columns_of([{"question": "2+3?", "answer": "5", "steps": 1}], [{"question": "4?", "answer": "4"}])
    ['question', 'answer']
    """
    columns = [dict.fromkeys(key for row in table for key in row) for table in tables if table]
    return [name for name in columns[0] if all(name in other for other in columns[1:])] if columns else []
