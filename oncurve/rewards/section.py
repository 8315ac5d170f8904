"""The common settings of every reward of a recipe: its weight in the sum, and the traits that a run depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from pydantic import PositiveInt, model_validator

from oncurve.core.grading import RewardFunction
from oncurve.section import Fraction, NonNegative, Section


class RunLength(NamedTuple):
    """The length of a run, for functions that ask for the state of the run."""

    steps: int | None = None
    """Steps of the whole run; None where nothing is trained."""
    steps_per_epoch: float | None = None
    """Steps in which every training row comes once; None where the rows are not known."""


UNKNOWN_LENGTH = RunLength()


@dataclass(frozen=True)
class Surroundings:
    """The surroundings in which rewards are made."""

    objects: Mapping[str, Any] = field(default_factory=dict)
    """Functions of a Python program by the names of their sections."""
    columns: Sequence[str] | None = None
    """Columns of the data, which functions of the user's may ask for; None checks nothing."""
    length: RunLength = UNKNOWN_LENGTH


class RewardSection(Section):
    """One term of the reward."""

    weight: float = 1.0
    """Factor of this term in the sum."""
    weight_by_step: tuple[tuple[NonNegative, Fraction], ...] | None = None
    """Pairs of step and factor of the weight, from 0 to 1 and linear between: [[0, 0], [100, 1]]. None: 1."""
    name: str | None = None
    """Name in the metrics; None: the type."""
    only_if_correct: bool = False
    """Count this term only for correct answers."""
    held_out: bool = False
    """Grade and log as ``reward/held_out/<name>``, but never train on it."""
    rotate_every_steps: PositiveInt | None = None
    """Terms with this key take turns, each for so many steps."""
    limited: bool = True
    """All terms that do not know whether an answer is right pay together at most the weight of those that do; false
    takes this term out of that limit."""

    gives_correct: ClassVar[bool] = False
    """Its rewards have a part "correct"."""
    reads_reference: ClassVar[bool] = False
    """It compares with a reference that is read as mathematics."""
    is_form: ClassVar[bool] = False
    """It looks at a completion alone, not at the answer of the row."""
    is_of_episode: ClassVar[bool] = False
    """It is what an environment or agent says that an episode is worth, whatever the row has as an answer."""
    is_sandboxed: ClassVar[bool] = False
    """It runs programs of the policy."""
    is_paid_for: ClassVar[bool] = False
    """Every completion that it grades costs a request."""
    has_any_value: ClassVar[bool] = False
    """Its values may be above 1 or below -1."""
    punishes_length: ClassVar[bool] = False
    """It takes from a completion that reaches the limit."""

    @property
    def key(self) -> str:
        """Its name in the metrics."""
        return self.name or str(self.model_dump(include={"type"})["type"])

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        raise NotImplementedError

    def says_correct(self) -> bool:
        """Its rewards have a part "correct"."""
        return self.gives_correct

    def may_say_correct(self) -> bool:
        """Some of them have."""
        return self.says_correct()

    def reads_answer(self, around: Surroundings) -> bool:
        """It looks at the answer of a row, so that there are right completions."""
        return not self.is_form

    def can_be_negative(self) -> bool:
        """It can pay less than zero."""
        return self.weight < 0

    def runs_on_main_thread(self) -> bool:
        """It calls somebody else's code here, which may count on being called from the main thread, once a step."""
        return False

    def code_file(self) -> str | None:
        """Place of the user's code that it names, as file.py:name or module:name."""
        return None

    @model_validator(mode="after")
    def _check_held_out(self) -> RewardSection:
        about_pay = ("only_if_correct", "rotate_every_steps", "weight_by_step")
        for key, value in self.model_dump(include={*about_pay}).items():
            if self.held_out and value:
                raise ValueError(
                    f"rewards: {self.name or type(self).__name__} is held_out, so it pays nothing, and "
                    f"{key} is about what it pays. Remove one of the two keys"
                )
        steps = [step for step, _ in self.weight_by_step or ()]
        if self.weight_by_step is not None and (not steps or steps != sorted(set(steps)) or self.rotate_every_steps):
            raise ValueError(
                f"rewards: {self.name or type(self).__name__} has weight_by_step {self.weight_by_step}. Write pairs of "
                f"step and factor with rising steps, and leave it out of rewards that rotate, which all pay the same"
            )
        return self

    def options(self, *besides: str) -> dict[str, Any]:
        """The keys that are its function's own arguments."""
        return self.model_dump(exclude={"type", *RewardSection.model_fields, *besides})
