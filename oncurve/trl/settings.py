"""Settings of a script from outside: the losses it may have, its version of TRL, what to do in place of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ScriptSettings:
    """Settings of this process."""

    accepted: set[str] = field(default_factory=set)
    """Options that may be lost although that changes what is learned."""
    overrides: tuple[str, ...] = ()
    """Keys of the recipe, as ``key=value``, that take the place of what a script asks for."""
    version: str | None = None
    """The version of TRL that scripts were written for; None where their options tell."""
    processes: int | None = None
    """Number of processes that the script is converted for; None where it runs."""
    instead_of_training: Callable[[Any], None] | None = None
    """Called in the place of training, with what the script asks for."""
    has_trained: bool = False
    """A trainer of this process was told to train."""


SETTINGS = ScriptSettings()
"""The settings of this process."""


def accept_lost(*options: str) -> None:
    """Go on without these options of GRPOConfig or arguments of GRPOTrainer, although that changes what is learned.

    Example: ``accept_lost("repetition_penalty")``
    """
    SETTINGS.accepted.update(options)
