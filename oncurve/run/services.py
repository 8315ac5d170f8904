"""Services around the loop, and when each is due: updates, evaluations, checkpoints, a stop that is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from oncurve.core.batch import Batch
from oncurve.core.loop import StepSchedule
from oncurve.core.policy import DevicePolicy
from oncurve.core.records import Group, Mean, Reward
from oncurve.observe.tokens import TokenRecord
from oncurve.run.checkpointer import Checkpointer
from oncurve.run.guards import Guards, attempts
from oncurve.run.interruption import Interrupted, Interruption
from oncurve.run_errors import memory_error_as

if TYPE_CHECKING:
    from oncurve.run.profiling import Profiler
from oncurve.run.step_log import Step, StepLog
from oncurve.run_errors import CheckpointError

Due = Callable[[int], Mapping[str, float]]
"""Something that happens after so many steps; metrics to record with the step."""


@dataclass(eq=False)
class Run(StepSchedule):
    """The services around the loop. Steps are counted from 0 in the loop and as steps done in files and displays.

    A service is born in two lines: its field here, or in ``StepLog`` if it only looks, and its value where a run is
    made (``run.session.make_session``).
    """

    log: StepLog
    _: KW_ONLY
    rollouts_every_steps: int = 10
    tokens: TokenRecord | None = None
    records_all: bool = False
    """Write the tokens of every step as well."""
    guards: Guards = field(default_factory=Guards)
    interruption: Interruption = field(default_factory=Interruption)
    every: Sequence[tuple[int, Due]] = ()
    """(n, what to do after every n steps; 0: never)."""
    saver: Checkpointer | None = None
    profiler: Profiler | None = None
    compare: Callable[[DevicePolicy, Batch], None] | None = None
    """A comparison of the policy with its model's own forward pass on the rows of the first update."""
    try_longest: Callable[[Batch, Callable[[str], None]], None] | None = None
    """A try at the longest rows that may come, made of those of an update, behind the first step that had one."""

    def __post_init__(self) -> None:
        self.guards.notify = self.guards.notify or self.log.progress.note
        self.interruption.notify = self.interruption.notify or self.log.progress.note
        self._trained: Batch | None = None
        """Rows of an update of this step, while the longest have not been tried."""
        self.last: Step | None = None
        """The newest step that is whole."""
        self._has_moved = False
        """The weights of the step's end are no longer those of its beginning."""
        self._later: Mapping[str, float] = {}
        """Metrics of saving, which is over when the step's row is written."""

    @property
    def schedule(self) -> StepSchedule:
        """The steps of this run: its own."""
        return self

    def steps(self) -> Iterator[int]:
        """The steps that are left."""
        for step in range(self.steps_done, self.total_steps):
            self.interruption.check()
            self.log.begin(self._later)
            self._later, self._has_moved = {}, False
            if self.profiler is not None:
                self.profiler.begin(step)
            yield step
            self.steps_done = step + 1

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Show a phase of the step, and log its seconds. A signal ends it at once, but only between updates."""
        started = time.perf_counter()
        self.log.progress.status(phase)
        self.log.folder.write_status(self.steps_done, phase)
        if phase == "train":
            self.interruption.check()
            yield
        else:
            with self.interruption.interruptible():
                yield
        self.log.phase(phase, time.perf_counter() - started)

    def observe(
        self,
        step: int,
        groups: Sequence[Group],
        graded: Sequence[Sequence[Reward]],
        advantages: Float[Tensor, "P G"] | None = None,
    ) -> None:
        """Measure everything that was sampled; with advantages measure what is trained on, and write it down when that
        is due."""
        if advantages is None:
            self.log.measure(step, groups, graded)
            return
        self.log.measure_retained(step, groups, advantages)
        done = step + 1
        if done == 1 or done % self.rollouts_every_steps == 0 or done == self.total_steps:
            self.log.folder.write_rollouts(done, groups, graded, advantages.tolist(), tokens=self.tokens)
        if self.records_all and self.log.processes.is_main:
            from oncurve.observe.step_record import step_path, write_step  # lazy

            write_step(step_path(self.log.folder.path, done), groups, graded, advantages.tolist())

    def add_up(self) -> Mapping[str, Mean]:
        """The statistics of the step over all processes, which must all call it."""
        self.log.add_up()
        return self.log.sums

    def update(self, policy: DevicePolicy, rows: Batch, add_gradient: Callable[[Batch], Mapping[str, Mean]]) -> None:
        """Add up the gradient over microbatches, again over smaller ones where memory runs out, and move the policy."""
        if not self._has_moved:
            self.interruption.check()
        if self.compare is not None:
            self.compare(policy, rows)
            self.compare = None
        for attempt in attempts(policy, rows, self.log.sums, self.log.progress.note):
            with attempt:
                for microbatch in policy.microbatches(rows):
                    self.record(add_gradient(microbatch))
        if not self._has_moved and self.guards.watches_mismatch:
            mismatch = self.log.mean("mismatch/kl")
            self.guards.before_first_update(policy.processes.all_gather(mismatch))
        self.end_update(policy.update())
        if self.try_longest is not None and len(rows):
            self._trained = rows

    def record(self, statistics: Mapping[str, Mean]) -> None:
        """Log a microbatch; before the first update of a step, the step may be left here."""
        self.log.add(statistics)
        if not self._has_moved:
            self.interruption.check_alone()

    def end_update(self, statistics: Mapping[str, Mean]) -> None:
        """Log an update that was made, and stop where too many in a row had no finite gradient."""
        self.log.add(statistics)
        self._has_moved = True
        self.guards.after_update(statistics)

    def end_step(self, step: int) -> None:
        """Write and show the step's metrics and do what is due after it."""
        metrics = self.log.metrics()
        if self.profiler is not None:
            self.profiler.end()
        self.finish(step + 1, metrics)
        if self.try_longest is not None and self._trained is not None:
            self.try_longest(self._trained, self.log.progress.note)
            self.try_longest = self._trained = None

    def finish(self, done: int, metrics: dict[str, float]) -> None:
        """Do what is due after the last update of a step; a signal may leave it in the middle of a measurement."""
        trained, folder = dict(metrics), self.log.folder
        for interval, due in self.every:
            if interval and done % interval == 0:
                folder.write_status(done - 1, "evaluate")
                try:
                    with self.interruption.interruptible():
                        metrics |= due(done)
                except Interrupted:
                    self._mark(done, pending=trained)
                    raise
        folder.write_status(done - 1, "record")
        self.last = replace(self.log.write(done, metrics), saver=self.saver)
        self.steps_done = done
        self.guards.after_step(done, metrics)
        self._mark(done)
        if self.saver is not None:
            folder.write_status(done, "save")
            folder.sync()
            with memory_error_as(
                CheckpointError, f"there is not enough memory to copy what the checkpoint of step {done} holds"
            ):
                self._later = self.saver.after_step(done, metrics)

    def _mark(self, done: int, *, pending: Mapping[str, float] | None = None) -> None:
        if self.saver is not None:
            self.saver.mark(done, pending=pending)
