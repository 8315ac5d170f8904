"""The base of all sections of a recipe. Each stands in the ``settings.py`` of the room that is given it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[int, Field(ge=0)]


def _parts(annotation: object) -> tuple[object, ...]:
    """The members of a union type, or the type itself."""
    return get_args(annotation) or (annotation,)


class NoNumber:
    """Marks a key that changes no number of a run: a run is resumed with another value of it."""


Value = TypeVar("Value")
Harmless = Annotated[Value, NoNumber()]
"""The type of a key that changes no number of a run, as in ``name: Harmless[str | None]``."""


def harmless_keys(section: type[BaseModel], prefix: str = "") -> set[str]:
    """The keys of a section that change no number, with those of the sections in it: ``run.folder``."""
    keys: set[str] = set()
    for name, field in section.model_fields.items():
        if any(isinstance(mark, NoNumber) for mark in field.metadata):
            keys.add(prefix + name)
        for kind in _parts(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys |= harmless_keys(kind, f"{prefix}{name}.")
    return keys


@dataclass(frozen=True, slots=True)
class CountsWith:
    """Marks a key that is read only where another key of its section has one of ``values``, or, without them, where
    that key is neither 0, false, null nor one of ``unless``."""

    key: str
    values: tuple[object, ...] = ()
    unless: tuple[object, ...] = ()

    def holds(self, value: object) -> bool:
        """The other key has such a value."""
        return value in self.values if self.values else value not in (None, 0, *self.unless)

    def described(self) -> str:
        """The values of the other key with which this one is read, in words behind its name."""
        return f" to {' or '.join(map(str, self.values))}" if self.values else ""


def unread_keys(
    section: BaseModel, values: Mapping[str, object], defaults: Mapping[str, object]
) -> Iterator[tuple[str, CountsWith]]:
    """The keys of a section that differ from their defaults and are not read, by the values of all of its keys."""
    for name, field in type(section).model_fields.items():
        if values.get(name) in (None, defaults.get(name)):
            continue
        for mark in field.metadata:
            if isinstance(mark, CountsWith) and not mark.holds(values[mark.key]):
                yield name, mark


def typed(value: object) -> str:
    """A value as it is typed behind a key."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    return value if isinstance(value, str) else json.dumps(value, default=str)


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
                    raise PydanticCustomError("truth_value", "", {"key": key, "value": value})
        return cast("object", tree)
