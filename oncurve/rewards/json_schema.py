"""Reward for JSON: readable, valid under a schema, and with the right contents."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from oncurve.core.errors import ConfigError, Failure, attempt
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.strict_json import (
    Around,
    JsonSource,
    fields_fraction,
    json_of,
    json_text,
    parse_json,
    without_nulls,
)
from oncurve.rewards.thinking import spoken_text
from oncurve.rewards.validation import SchemaCheck, SchemaChecker, SchemaVerdict, compile_schema, judge, load_model

logger = logging.getLogger(__name__)

JsonScale = Literal["binary", "graded"]
"""Its values: 1 or 0; or 0.2 for JSON, 0.5 for the right keys, from there to 1 for valid and right contents."""

PARSED_PAYS = 0.2
KEYS_PAY = 0.5


@dataclass(frozen=True, slots=True)
class _Task:
    """One completion: what it is measured by, and what it says."""

    check: SchemaCheck | None
    """None if the completion holds no JSON, or if its row is at fault."""
    value: Any = None
    gold: Any = None
    gold_check: SchemaCheck | None = None
    """None if the row has no reference."""
    filled_check: SchemaCheck | None = None
    """Check of the reference without its nulls, which a data set may have filled in; None if it has none."""
    is_struct: bool = False
    """The reference is no text but a value, in which nulls may stand for keys that are not there."""
    problem: str = ""
    error: str | None = None


class JsonSchema:
    """Whether a completion is JSON that is valid under a schema, and equal to the row's reference if there is one.

    The schema is one of ``schema`` (an object or its JSON text), ``model`` (a pydantic model as ``module:name``) and
    ``schema_column`` (a column with the row's own). Models are strict and refuse keys that they do not declare, inside
    as well; where the outer model sets ``extra``, every model follows its own setting. Equality with ``gold_column`` is
    asked of every row that has a value there.

    Parts: ``correct``, 1.0 if valid and, with a reference, equal to it; ``format``, 1.0 if valid; ``fields_fraction``,
    the share of fields as in the reference (valid or not, without one); ``over_limit``, 1.0 if validation took too
    long, which pays as invalid. A schema that accepts ``{}`` pays for ``{}``: give rows a reference, or require keys.
    """

    def __init__(
        self,
        *,
        schema: Mapping[str, Any] | str | None = None,
        model: str | None = None,
        schema_column: str | None = None,
        gold_column: str | None = "answer",
        around: Around = "nothing",
        answer_from: JsonSource = "text",
        scale: JsonScale = "binary",
        timeout_seconds: float = 2.0,
        workers: int | None = None,
        name: str = "json_schema",
        checker: SchemaChecker | None = None,
    ) -> None:
        if sum(source is not None for source in (schema, model, schema_column)) != 1:
            raise ConfigError("rewards: json_schema needs exactly one of json_schema, model and schema_column.")
        self.name = name
        self.model = model
        self.schema_column = schema_column
        self.gold_column = gold_column
        self.around: Around = around
        self.answer_from: JsonSource = answer_from
        self.scale: JsonScale = scale
        self._schema = _usable(schema, model)
        self.checker = checker or SchemaChecker(timeout_seconds=timeout_seconds, workers=workers)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        tasks = [
            self._task(prompt.row, spoken_text(prompt, completion))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        checks = (check for task in tasks for check in (task.check, task.gold_check, task.filled_check))
        distinct = list(dict.fromkeys(check for check in checks if check is not None))
        verdicts = dict(zip(distinct, self.checker.check(distinct), strict=True))
        return [self._reward(task, verdicts) for task in tasks]

    def close(self) -> None:
        """Ends the checker's processes."""
        self.checker.close()

    def _task(self, row: Mapping[str, Any], text: str) -> _Task:
        try:
            schema = self._schema
            if self.schema_column is not None:
                schema = _row_schema(row.get(self.schema_column))
            gold = None if self.gold_column is None else row.get(self.gold_column)
            gold_value = None if gold is None else json_of(gold)
        except ValueError as error:
            return _Task(None, problem=str(error)[:200], error="unparsable_reference")
        task = _Task(None)
        if gold is not None:
            bare = without_nulls(gold_value)
            task = _Task(
                None,
                gold=gold_value,
                gold_check=SchemaCheck(json.dumps(gold_value), schema, self.model),
                filled_check=None if bare == gold_value else SchemaCheck(json.dumps(bare), schema, self.model),
                is_struct=not isinstance(gold, str),
            )
        json_part = json_text(text, around=self.around, source=self.answer_from)
        if json_part is None:
            return replace(task, problem="text where only JSON may stand")
        try:
            value = parse_json(json_part)
        except (ValueError, RecursionError) as error:
            return replace(task, problem=f"no JSON: {str(error)[:150]}")
        return replace(task, check=SchemaCheck(json.dumps(value), schema, self.model), value=value)

    def _reward(self, task: _Task, verdicts: Mapping[SchemaCheck, SchemaVerdict]) -> Reward:
        if task.error is not None:
            return Reward(value=None, error=task.error, detail=task.problem)
        failure = None if task.gold_check is None else gold_failure(verdicts[task.gold_check])
        is_filled = (
            failure is not None and task.filled_check is not None and verdicts[task.filled_check].level == "valid"
        )
        if failure is not None and not is_filled:
            return failure
        if task.check is None:
            return paid(0.0, SchemaVerdict("invalid", task.problem), 0.0)
        verdict = verdicts[task.check]
        if verdict.is_failure:
            return failure_of(verdict)
        is_valid = verdict.level == "valid"
        value, gold = task.value, task.gold
        if is_filled or task.is_struct:
            value, gold = without_nulls(value) if task.is_struct else value, without_nulls(gold)
        fraction = float(is_valid) if task.gold_check is None else fields_fraction(value, gold)
        return paid(value_of(verdict, fraction, self.scale), verdict, fraction)


def value_of(verdict: SchemaVerdict, fraction: float, scale: JsonScale) -> float:
    """The value of JSON that was read, on a scale."""
    return float(verdict.level == "valid" and fraction == 1.0) if scale == "binary" else graded(verdict, fraction)


def graded(verdict: SchemaVerdict, fraction: float) -> float:
    """0.2 for JSON, 0.5 for the right keys; valid JSON earns from there to 1 by the share of right fields."""
    match verdict.level:
        case "valid":
            return KEYS_PAY + (1.0 - KEYS_PAY) * fraction
        case "keys":
            return KEYS_PAY
        case "invalid":
            return PARSED_PAYS
        case _:
            return 0.0


def paid(value: float, verdict: SchemaVerdict, fraction: float) -> Reward:
    """The reward of a completion with what a validator says of it, and the share of right fields."""
    is_valid = verdict.level == "valid"
    parts = {
        "correct": float(is_valid and fraction == 1.0),
        "format": float(is_valid),
        "fields_fraction": fraction,
        "over_limit": float(verdict.level == "over_limit"),
    }
    return Reward(value=value, parts=parts, detail=verdict.detail)


def failure_of(verdict: SchemaVerdict) -> Reward:
    """The reward where validation failed through no fault of the completion."""
    error = "unparsable_reference" if verdict.level == "unusable" else verdict.level
    return Reward(value=None, error=error, detail=verdict.detail)


def gold_failure(verdict: SchemaVerdict) -> Reward | None:
    """The error of a row whose own reference is not valid; None if it is."""
    if verdict.level == "valid":
        return None
    if verdict.is_failure:
        return failure_of(verdict)
    return Reward(value=None, error="unparsable_reference", detail=f"the reference is not valid: {verdict.detail}")


def _row_schema(value: object) -> str:
    if value is None:
        raise ValueError("the row has no schema")
    return json.dumps(json_of(value if isinstance(value, str) else without_nulls(value)))


def _usable(schema: Mapping[str, Any] | str | None, model: str | None) -> str | None:
    """The text of a fixed schema, after a trial; a problem is told before the run."""
    if schema is None and model is None:
        return None
    try:
        if model is not None:
            load_model(model)
            text = None
        else:
            text = json.dumps(json_of(schema if isinstance(schema, str) else dict(schema or {})))
            compile_schema(json.loads(text))
    except ValueError as error:  # UnusableSchemaError is one
        kind = "model" if model is not None else "schema"
        raise ConfigError(f"rewards: json_schema.{kind} cannot be used: {error}.") from None
    trial = attempt(lambda: judge({"value": "{}", "schema": text, "model": model}))
    if not isinstance(trial, Failure) and trial["level"] == "valid":
        logger.warning("rewards: json_schema accepts {}, which then pays in full where a row has no reference.")
    return text
