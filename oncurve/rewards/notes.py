"""The state of the run for a function of the user's, and the metrics and texts that the function logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oncurve.core.records import Completion, Mean, Reward
from oncurve.rewards.section import RunLength
from oncurve.rewards.weighted_sum import FIXED_PARTS
from oncurve.wording import shortened

MAX_LOGGED_CHARACTERS = 120
"""Letters of a value of ``log_extra`` that a completion shows."""


@dataclass(frozen=True)
class TrainerState:
    """The state of the run at a completion, under the names of transformers' ``TrainerState``."""

    global_step: int
    """Steps that the policy had been trained when it sampled: 0 in the first step."""
    max_steps: int | None
    """Steps of the whole run; None where a function grades outside of one."""
    epoch: float | None = None
    """Passes over the training rows until then; None where the rows are not known."""


def state_at(completions: Sequence[Completion], length: RunLength) -> TrainerState:
    """The state at the first of some completions that are graded together."""
    step = completions[0].policy_version if completions else 0
    epoch = None if length.steps_per_epoch is None else step / length.steps_per_epoch
    return TrainerState(step, length.steps, epoch)


@dataclass
class Notes:
    """Metrics and values of single completions that one call logged."""

    metrics: dict[str, Mean] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget what a call said that is made again."""
        self.metrics.clear()
        self.extras.clear()

    def log_metric(self, name: str, value: float) -> None:
        """Log a number as ``reward/<name>``: the mean over all calls of the step."""
        if name in (*FIXED_PARTS, "reward"):
            raise ValueError(f"log_metric: {name!r} has a fixed meaning among a reward's parts; take another name")
        self.metrics[name] = self.metrics.get(name, Mean(0.0, 0.0)) + Mean(float(value), 1.0)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Show a value beside each completion."""
        self.extras[column] = [values] if isinstance(values, str) else list(values)

    def log_extra_of_sample(self, column: str, value: Any) -> None:
        """The same, of a function of one completion."""
        self.extras[column] = [value]

    def noted(self, rewards: list[Reward]) -> list[Reward]:
        """The rewards with the metrics among the parts of the first that is there, and the values in their details."""
        for column, values in self.extras.items():
            if len(values) != len(rewards):
                raise ValueError(f"log_extra({column!r}) got {len(values)} values for {len(rewards)} completions")
            rewards = [
                replace(reward, detail="; ".join(filter(None, (reward.detail, f"{column}: {_text(value)}"))))
                for reward, value in zip(rewards, values, strict=True)
            ]
        first = next((index for index, reward in enumerate(rewards) if reward.value is not None), None)
        if first is not None and self.metrics:
            parts = {name: mean.value for name, mean in self.metrics.items()}
            rewards[first] = replace(rewards[first], parts={**rewards[first].parts, **parts})
        return rewards


def _text(value: Any) -> str:
    return shortened(value if isinstance(value, str) else repr(value), MAX_LOGGED_CHARACTERS)
