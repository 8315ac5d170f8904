"""Batch arithmetic of TRL's trainer: prompts and completions per optimizer update, and the step here that equals it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oncurve.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlBatch:
    """TRL's own numbers, in completions.

    generation batch  = per_device * processes * steps_per_generation
    update            = per_device * processes * accumulation
    """

    per_device: int
    accumulation: int
    processes: int
    group_size: int
    iterations: int = 1
    steps_per_generation: int | None = None
    """None: as many as accumulation."""
    generation_batch: int | None = None

    @classmethod
    def requested(cls, ask: Callable[[str], Any], processes: int) -> TrlBatch:
        """The numbers of some options of GRPOConfig, each by its name, in so many processes."""
        return cls(
            per_device=ask("per_device_train_batch_size"),
            accumulation=ask("gradient_accumulation_steps"),
            processes=processes,
            group_size=ask("num_generations"),
            iterations=ask("num_iterations"),
            steps_per_generation=ask("steps_per_generation"),
            generation_batch=ask("generation_batch_size"),
        )

    @property
    def forward(self) -> int:
        """Completions in one forward pass of all processes."""
        return self.per_device * self.processes

    @property
    def passes(self) -> int:
        """Forward passes that one generation batch is cut into."""
        if self.generation_batch is not None:
            return self.generation_batch // self.forward
        return self.steps_per_generation or self.accumulation

    @property
    def generated(self) -> int:
        """Completions of one generation batch."""
        return self.forward * self.passes

    def updates(self, *, epochs: float, rows: int) -> int:
        """Optimizer updates in so many epochs: groups that fill no generation batch are dropped at the end of each.

        Raises ConfigError where there are fewer rows than one generation batch takes.
        """
        batches = rows // (self.generated // self.group_size)
        if not batches:
            raise ConfigError(
                f"{rows} rows are fewer than the {self.generated // self.group_size} prompts of one generation batch. "
                f"Give more rows, or correct the batch"
            )
        passes = batches * self.iterations * self.passes
        return math.ceil(epochs * max(math.ceil(passes / self.accumulation), 1))


@dataclass(frozen=True, slots=True)
class StepShape:
    """The same as a step here: one batch of completions and the updates on it."""

    prompts: int
    completions_per_update: int
    updates: int
    """In one pass over a batch of completions."""
    iterations: int
    """Passes over it."""
    is_exact: bool
    """Every update sees the completions that it sees in TRL; otherwise it mixes two batches, or two passes over one."""

    def count(self, trl_updates: int) -> int:
        """Steps with as many batches of completions as so many updates of TRL take, rounded up."""
        return math.ceil(trl_updates / (self.updates * self.iterations))


def step_of(batch: TrlBatch) -> StepShape:
    """The step that does what TRL does between two batches of completions.

    Raises ConfigError for numbers that TRL refuses too.
    """
    _refuse(batch)
    group, update = batch.group_size, batch.forward * batch.accumulation
    if batch.passes % batch.accumulation == 0:
        return StepShape(batch.generated // group, update, batch.passes // batch.accumulation, batch.iterations, True)
    once = batch.passes * batch.iterations
    if batch.accumulation % once == 0:  # several batches of one policy in one update, each counted alike
        rows = update // batch.iterations
        return StepShape(rows // group, rows, 1, 1, True)
    return StepShape(batch.generated // group, batch.generated, 1, 1, False)


def _refuse(batch: TrlBatch) -> None:
    if batch.steps_per_generation is not None and batch.generation_batch is not None:
        raise ConfigError("generation_batch_size and steps_per_generation exclude each other, in TRL too. Remove one")
    if batch.generation_batch is not None and batch.generation_batch % batch.forward:
        raise ConfigError(
            f"generation_batch_size is {batch.generation_batch}, which per_device_train_batch_size x processes, "
            f"{batch.forward}, does not divide. TRL refuses that too; --processes says how many there are"
        )
    if min(batch.per_device, batch.accumulation, batch.processes, batch.iterations, batch.passes) < 1:
        raise ConfigError("batch sizes, accumulation and iterations must be at least 1")
    if batch.group_size < 2 or batch.generated % batch.group_size:
        raise ConfigError(
            f"num_generations is {batch.group_size}, which does not divide the {batch.generated} completions of a "
            f"generation batch ({batch.per_device} x {batch.processes} processes x {batch.passes} passes), or is below "
            f"2. TRL refuses that too; --processes says how many processes there are"
        )
