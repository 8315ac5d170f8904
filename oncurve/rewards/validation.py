"""Validation under a JSON Schema or a pydantic model, in processes that can be killed.

A schema can hold a regular expression that takes years on a text made for it, and a model can run any validator.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ValidationError

from oncurve.core.errors import Failure, attempt
from oncurve.rewards.worker_pool import QUICK_SECONDS, Outcome, WorkerPool

if TYPE_CHECKING:
    import jsonschema  # takes as long as the rest of a recipe, and few recipes need it

Level = Literal["valid", "keys", "invalid", "over_limit", "unusable", "timeout", "crashed"]
"""Level of a value: "keys" is an object with the right keys and wrong contents; "over_limit" took too long or too much
memory, which counts as invalid.

The last three are failures of ours: the schema cannot be used, the batch ran out of time, a validator broke.
"""

RECURSION_LIMIT = 5000


class UnusableSchemaError(ValueError):
    """No schema, a reference to elsewhere, or a model that is none."""


@dataclass(frozen=True, slots=True)
class SchemaCheck:
    """One value to be validated; exactly one of ``schema`` and ``model`` is given."""

    value: str
    """The value as JSON text."""
    schema: str | None = None
    """The JSON Schema as JSON text."""
    model: str | None = None
    """The pydantic model as ``module:name``."""


@dataclass(frozen=True, slots=True)
class SchemaVerdict:
    """A validator's verdict on one value."""

    level: Level
    detail: str = ""
    """The first problem, in one line."""

    @property
    def is_failure(self) -> bool:
        """The fault is not the value's."""
        return self.level in ("unusable", "timeout", "crashed")


class SchemaChecker:
    """Validates values in grading processes; equal checks of one batch are made once.

    The processes start with the first check and belong to this object until ``close()``. A checker is shared by
    giving it to several rewards.
    """

    def __init__(self, *, timeout_seconds: float = 2.0, workers: int | None = None) -> None:
        self._pool = WorkerPool(
            "oncurve.rewards.validation:judge",
            workers=workers,
            timeout_seconds=timeout_seconds,
            quick_seconds=QUICK_SECONDS,
        )

    def check(self, checks: Sequence[SchemaCheck]) -> list[SchemaVerdict]:
        """One verdict per check, in order."""
        distinct = list(dict.fromkeys(checks))
        outcomes = self._pool.map(
            {"value": check.value, "schema": check.schema, "model": check.model} for check in distinct
        )
        verdicts = {check: _verdict_of(outcome) for check, outcome in zip(distinct, outcomes, strict=True)}
        return [verdicts[check] for check in checks]

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()


def _verdict_of(outcome: Outcome) -> SchemaVerdict:
    match outcome.error:
        case None:
            return SchemaVerdict(outcome.result["level"], outcome.result["detail"])
        case "timeout" | "memory":
            return SchemaVerdict("over_limit", outcome.detail)
        case "not_run":
            return SchemaVerdict("timeout", outcome.detail)
        case _:
            return SchemaVerdict("crashed", outcome.detail)


def judge(payload: dict[str, Any]) -> dict[str, str]:
    """The level and the first problem of ``{"value": ..., "schema": ..., "model": ...}``; runs in a grading process."""
    from referencing.exceptions import Unresolvable

    sys.setrecursionlimit(max(sys.getrecursionlimit(), RECURSION_LIMIT))
    value = json.loads(payload["value"])
    try:
        if payload["model"] is not None:
            level, detail = _level_by_model(load_model(payload["model"]), value)
        else:
            level, detail = _level_by_schema(_compiled(payload["schema"]), value)
    except (UnusableSchemaError, Unresolvable) as error:
        level, detail = "unusable", str(error)
    return {"level": level, "detail": " ".join(ascii(detail).split())[:200]}


class _Validator(Protocol):
    """The part of jsonschema's validators that is used."""

    def iter_errors(self, instance: object) -> Iterator[jsonschema.ValidationError]: ...


@lru_cache(maxsize=256)
def _compiled(schema: str) -> _Validator:
    return compile_schema(json.loads(schema))


def compile_schema(schema: object) -> _Validator:
    """A validator of a schema: Draft 2020-12, or the draft that ``$schema`` names. Nothing is ever fetched.

    Formats that jsonschema can check without further packages, such as date, email and uuid, are asserted.

    Raises UnusableSchemaError.
    """
    if not isinstance(schema, (dict, bool)):
        raise UnusableSchemaError(f"a schema is an object, not {type(schema).__name__}")
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind: Any = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except jsonschema.SchemaError as error:
        raise UnusableSchemaError(f"no JSON Schema: {error.message[:200]} at {error.json_path}") from None
    _check_references(schema)
    return kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)


def _check_references(schema: dict[str, Any] | bool) -> None:
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resolver = Registry().with_resource("", Resource.from_contents(schema, DRAFT202012)).resolver()
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise UnusableSchemaError(f"$ref {reference!r} leads out of the schema; use #/$defs/...")
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise UnusableSchemaError(f"$ref {reference!r} leads nowhere") from None


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (node[key] for key in ("$ref", "$dynamicRef") if isinstance(node.get(key), str))
        for child in node.values():
            yield from _references(child)
    elif isinstance(node, list):
        for child in node:
            yield from _references(child)


def _level_by_schema(validator: _Validator, value: object) -> tuple[Level, str]:
    first: jsonschema.ValidationError | None = None
    has_keys = isinstance(value, dict)
    try:
        for error in validator.iter_errors(value):
            first = first or error
            has_keys = has_keys and bool(error.absolute_path)
            if not has_keys:
                break
    except RecursionError:
        if _recurses_forever(validator):
            raise UnusableSchemaError("a $ref of the schema leads back to itself") from None
        return "over_limit", "the value is nested too deeply for the schema"
    if first is None:
        return "valid", ""
    return "keys" if has_keys else "invalid", f"{first.json_path}: {first.message[:150]}"


def _recurses_forever(validator: _Validator) -> bool:
    try:
        for value in ({}, [], None):
            list(validator.iter_errors(value))
    except RecursionError:
        return True
    return False


def load_model(location: str) -> type[BaseModel]:
    """The pydantic model that ``module:name`` names.

    Raises UnusableSchemaError.
    """
    name, colon, attribute = location.partition(":")
    if not (name and colon and attribute):
        raise UnusableSchemaError(f"the model is {location!r}; write module:name")
    if str(Path.cwd()) not in sys.path:  # as `python script.py` would have it; grading processes get the same path
        sys.path.append(str(Path.cwd()))
    module = attempt(lambda: importlib.import_module(name))
    if isinstance(module, Failure):
        raise UnusableSchemaError(f"module {name!r} cannot be imported: {module.detail}")
    model = vars(module).get(attribute)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise UnusableSchemaError(f"{location} is no pydantic model")
    return model


def _level_by_model(model: type[BaseModel], value: object) -> tuple[Level, str]:
    extra = None if "extra" in model.model_config else "forbid"  # None lets every model inside speak for itself
    try:
        model.model_validate_json(json.dumps(value), strict=True, extra=extra)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        at_root = any(p["type"] in ("missing", "extra_forbidden") and len(p["loc"]) == 1 for p in problems)
        location = ".".join(map(str, problems[0]["loc"]))
        has_keys = isinstance(value, dict) and not at_root
        return "keys" if has_keys else "invalid", f"{location}: {problems[0]['msg']}"
    return "valid", ""
