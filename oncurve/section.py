"""The base of all sections of a recipe. Each stands in the ``settings.py`` of the room that is given it."""

from __future__ import annotations

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
