"""Settings that are sections of a recipe as they are: what reads them needs no other class, and no recipe."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
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
    found: set[str] = set()
    for name, field in section.model_fields.items():
        if any(isinstance(mark, NoNumber) for mark in field.metadata):
            found.add(prefix + name)
        for kind in _parts(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= harmless_keys(kind, f"{prefix}{name}.")
    return found


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


class OptimizerSettings(Section):
    """The optimizer and its schedule."""

    type: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw_8bit keeps the moments in 8 bits, through bitsandbytes. muon: Muon for the matrices of the layers, AdamW
    for the rest; for training from random weights."""
    learning_rate: PositiveFloat = 1e-6
    """About how much an update moves each weight."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the mean of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the mean square."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_gradient_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip the gradient to this norm; 0 is off."""
    warmup_updates: NonNegative = 0
    """Updates of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to 0."""

    @property
    def betas(self) -> tuple[float, float]:
        """Both as torch takes them."""
        return self.beta1, self.beta2

    def rate(self, update: int, total_updates: int) -> float:
        """The learning rate of an update, counted from 0: warm-up, then the schedule down to zero at the last."""
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / (self.warmup_updates + 1)
        if self.schedule == "constant":
            return self.learning_rate
        span = max(total_updates - self.warmup_updates, 1)
        done = min((update - self.warmup_updates) / span, 1.0)
        share = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * share


class LoraSettings(Section):
    """A product of two thin matrices beside each chosen linear layer, W x + alpha / rank B A x (arXiv:2106.09685): a
    hundredth of the weights is trained, and the model under them is frozen."""

    rank: PositiveInt = 16
    """Width of the two matrices."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the adapter's inputs dropped in training passes."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Endings of layer names, such as [q_proj, v_proj]; all-linear is every linear layer but the head."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained too; only none leaves the base unchanged."""


class DeltaSettings(Section):
    """How servers get weights as differences from the version before."""

    anchor_every: Harmless[PositiveInt] = 20
    """Versions after which one is written whole as well, for servers that join."""
    relay: Harmless[bool] = False
    """One of our servers fetches from the trainer, and gives to the others."""
    mbit: Harmless[PositiveFloat | None] = None
    """Megabits per second that the trainer sends over rollouts.weights_address, to all servers together; None: no
    limit."""


class Deadlines(Section):
    """Timeouts of rollout servers, in seconds."""

    connect_seconds: Harmless[PositiveFloat] = 5.0
    """To open a connection."""
    request_seconds: Harmless[PositiveFloat] = 600.0
    """For the completions of one prompt."""
    push_seconds: Harmless[PositiveFloat] = 300.0
    """For each part of a weight transfer: fetching, loading."""
    silent_seconds: Harmless[PositiveFloat] = 10.0
    """Without a heartbeat, before a server is dropped and its prompts go to others."""
    gone_seconds: Harmless[PositiveFloat] = 300.0
    """Without any server, before the run saves and stops."""

    @property
    def heartbeat_seconds(self) -> float:
        """Between two questions to a server that is well."""
        return self.silent_seconds / 4
