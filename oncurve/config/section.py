"""Base class of all sections of a recipe."""

from __future__ import annotations

from typing import Annotated, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[int, Field(ge=0)]


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
