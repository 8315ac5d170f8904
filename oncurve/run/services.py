"""What is due besides training: recording, showing, evaluating, saving, stopping when asked."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from oncurve.batch import Batch
from oncurve.errors import CheckpointError, TrainingError
from oncurve.model.out_of_memory import memory_error_as
from oncurve.observe.measure import rollout_metrics, supervised_metrics
from oncurve.observe.progress import Progress
from oncurve.observe.record import RunFolder
from oncurve.observe.tokens import TokenRecord
from oncurve.policy.distributed import ALONE, Processes
from oncurve.policy.gpu_memory import gpu_memory, peak_gib, start_peak, together
from oncurve.policy.policy import TrainedPolicy
from oncurve.records import Group, Mean, Reward, html_table
from oncurve.rewards.base import check_any_graded, check_errors, describe_failures
from oncurve.run.checkpointer import Checkpointer
from oncurve.run.guards import Guards, attempts
from oncurve.run.interruption import Interrupted, Interruption
from oncurve.run.profiling import Profiler

Due = Callable[[int], Mapping[str, float]]
"""Something that happens after so many steps; metrics to record with the step."""


class Watcher(Protocol):
    """Somebody who looks at every step and may have something to say."""

    def see(self, groups: Sequence[Group], graded: Sequence[Sequence[Reward]]) -> None:
        """What was sampled and graded."""
        ...

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Sequence[str]:
        """What to tell a person after the step."""
        ...


@dataclass(frozen=True)
class Step:
    """A step that is whole: what was sampled and graded in it, and its metrics."""

    number: int
    """Steps done, this one included."""
    metrics: Mapping[str, float]
    """As in metrics.jsonl."""
    groups: Sequence[Group]
    """Everything that was sampled, before any filter."""
    rewards: Sequence[Sequence[Reward]]
    """A reward, or an error, for every completion of every group."""

    def __repr__(self) -> str:
        return f"<Step {self.number}: mean reward {self.metrics.get('reward/mean', math.nan):.3f}>"

    def _repr_html_(self) -> str:
        """The best and the worst completion of every group, for a notebook."""
        rows: list[tuple[object, ...]] = []
        for group, graded in zip(self.groups, self.rewards, strict=True):
            pairs = [(r.value, c.text) for r, c in zip(graded, group.completions, strict=True) if r.value is not None]
            if pairs:
                best, worst = max(pairs, key=lambda pair: pair[0]), min(pairs, key=lambda pair: pair[0])
                rows.append((group.prompt.text, f"{best[0]:g}", best[1], f"{worst[0]:g}", worst[1]))
        return html_table((f"step {self.number}", "best", "", "worst", ""), rows)


@dataclass(eq=False)
class Run:
    """The services around the loop. Steps are counted from 0 in the loop and as steps done in files and displays.

    A service is born in two lines: its field here, and its value where a run is made (``run.session.make_run``).
    """

    folder: RunFolder
    progress: Progress
    _: KW_ONLY
    total_steps: int
    completions_per_step: int
    completions_per_update: int
    passes_per_step: int = 1
    mask_truncated: bool = False
    refill_rounds: int = 0
    max_staleness_steps: int = 0
    max_error_fraction: float = 0.2
    rollouts_every_steps: int = 10
    seed: int = 0
    processes: Processes = ALONE
    guards: Guards = field(default_factory=Guards)
    interruption: Interruption = field(default_factory=Interruption)
    tokens: TokenRecord | None = None
    every: Sequence[tuple[int, Due]] = ()
    """(n, what to do after every n steps; 0: never)."""
    saver: Checkpointer | None = None
    watcher: Watcher | None = None
    profiler: Profiler | None = None
    sampler_metrics: Callable[[], dict[str, float]] = dict
    """What is known of how the sampler got the weights of a step."""
    is_supervised: bool = False
    steps_done: int = 0

    def __post_init__(self) -> None:
        self.guards.notify = self.guards.notify or self.progress.note
        self.interruption.notify = self.interruption.notify or self.progress.note
        self.last: Step | None = None
        """The newest step that is whole."""
        self._sums: dict[str, Mean] = {}
        self._metrics: dict[str, float] = {}
        self._has_moved = False
        self._has_failed = False
        """Somebody was told that grading failed."""
        self._has_graded = False
        """Some completion was graded in this run."""
        self._sampled: tuple[Sequence[Group], Sequence[Sequence[Reward]]] = ((), ())
        self._later: dict[str, float] = {}
        self._gpu_memory: dict[str, float] = {}
        """Of this process, until ``add_up`` puts all processes' together."""
        self._started = self._step_started = time.perf_counter()

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates on one batch of rollouts."""
        return self.completions_per_step // self.completions_per_update * self.passes_per_step

    def steps(self) -> Iterator[int]:
        """The steps that are left.

        Every random number that no stream of its own covers, such as the dropout of an adapter, is a function of
        (seed, step), so that a step that is done again is the same step.
        """
        for step in range(self.steps_done, self.total_steps):
            self.interruption.check()
            self._step_started = time.perf_counter()
            self._sums, self._metrics, self._later = {}, self._later, {}
            self._gpu_memory = {}
            self._has_moved = False
            start_peak()
            if self.profiler is not None:
                self.profiler.begin(step)
            torch.manual_seed((self.seed * 1_000_003 + step) % 2**63)
            yield step
            self.steps_done = step + 1

    def finish_pending(self, metrics: Mapping[str, float]) -> None:
        """Measure and record the last step of a run that was left between training and measuring."""
        self._finish_step(self.steps_done, dict(metrics))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a phase to ``time/<phase>_seconds``."""
        started = time.perf_counter()
        self.progress.status(phase)
        self.folder.write_status(self.steps_done, phase)
        if phase == "train":
            self.interruption.check()
            yield
        else:
            with self.interruption.interruptible():
                yield
        key = f"time/{phase}_seconds"
        self._metrics[key] = self._metrics.get(key, 0.0) + time.perf_counter() - started
        self._metrics[f"memory/{phase}_gib"] = memory_gib()
        self._gpu_memory |= gpu_memory(phase, rank=self.processes.rank if self.processes.count > 1 else None)

    def record(self, statistics: Mapping[str, Mean]) -> None:
        """Add statistics of a microbatch or an update; they are averaged when the step ends, and not before."""
        for key, mean in statistics.items():
            self._sums[key] = self._sums[key] + mean if key in self._sums else mean
        if "policy/skipped_updates" in statistics:  # this was an update; before the first one the step may be left
            self._has_moved = True
            self.guards.after_update(statistics)
        if not self._has_moved:
            self.interruption.check_alone()

    def updates(self, batch: Batch) -> Iterator[Batch]:
        """The rows of every optimizer update on a batch of rollouts: all rows in parts, as often as passes are made."""
        for _ in range(self.passes_per_step):
            yield from batch.split(self.completions_per_update)

    def accumulate(
        self, policy: TrainedPolicy, update: Batch, add_gradient: Callable[[Batch], Mapping[str, Mean]]
    ) -> None:
        """Add up the gradient of an update over microbatches, again over smaller ones where memory runs out."""
        if not self._has_moved:
            self.interruption.check()
        for attempt in attempts(policy, update, self._sums, self.progress.note):
            with attempt:
                for microbatch in policy.microbatches(update):
                    self.record(add_gradient(microbatch))

    def add_up(self) -> None:
        """Add the statistics of the step over all processes, once its updates are done. All must call it."""
        if self.processes.count > 1:
            self._sums = self.processes.add_means(self._sums)
        if self._gpu_memory:
            self._metrics |= together(self.processes.all_gather(self._gpu_memory))

    def mean(self, key: str) -> float:
        """The mean of a statistic over the step so far; NaN if there is none."""
        return self._sums[key].value if key in self._sums else math.nan

    def measure(self, groups: Sequence[Group], graded: Sequence[Sequence[Reward]]) -> None:
        """Measure everything that was sampled, and refuse to go on when too much of it could not be graded."""
        self._metrics |= rollout_metrics(groups, graded)
        self._sampled = (groups, graded)
        if self.watcher is not None:
            self.watcher.see(groups, graded)
        rewards = [reward for row in graded for reward in row]
        if not self._has_graded:
            check_any_graded(rewards, where=f"step {self.steps_done + 1}")
            self._has_graded = True
        self._tell_first_failure([reward for reward in rewards if reward.is_failure], len(rewards))
        check_errors(rewards, max_error_fraction=self.max_error_fraction, step=self.steps_done + 1)

    def _tell_first_failure(self, failed: Sequence[Reward], total: int) -> None:
        """Say once that grading fails, and keep the first traceback in the log."""
        if not failed or self._has_failed:
            return
        self._has_failed = True
        text = f"step {self.steps_done + 1}: grading failed for {len(failed)} of {total} completions, "
        text += f"{describe_failures(failed)}. They count as errors, not as wrong answers"
        trace = next((reward.trace for reward in failed if reward.trace), "")
        self.progress.note(f"WARNING {text}" + (f"; traceback in {self.folder.path / 'log.txt'}" if trace else ""))
        self.folder.log(f"{text}\n{trace}")

    def check_age(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """How old completions are that are about to be trained on.

        Raises TrainingError for weights that are older than the recipe allows, or newer than these.
        """
        ages = [step - completion.policy_version for group in groups for completion in group.completions]
        if min(ages, default=0) < 0 or max(ages, default=0) > self.max_staleness_steps:
            raise TrainingError(
                f"step {step} was given completions that are {min(ages)} to {max(ages)} steps old; at most "
                f"{self.max_staleness_steps} are allowed (rollouts.staleness). Nothing was trained on them"
            )
        return {
            "completion/mean_staleness_steps": sum(ages) / max(len(ages), 1),
            "completion/max_staleness_steps": float(max(ages, default=0)),
        }

    def keep(self, step: int, groups: Sequence[Group], graded: Sequence[Sequence[Reward]], advantages: Tensor) -> None:
        """Measure ages and advantages and, when it is due, write down what is trained on."""
        self._metrics |= self.check_age(step, groups)
        self.record({"advantage/mean": Mean(advantages.sum().item(), advantages.numel())})
        self._metrics["advantage/std"] = advantages.std().item()
        done = step + 1
        if done == 1 or done % self.rollouts_every_steps == 0 or done == self.total_steps:
            self.folder.write_rollouts(done, groups, graded, advantages.tolist(), tokens=self.tokens)

    def end_step(self, step: int) -> None:
        """Write and show the step's metrics and do what is due after it."""
        metrics = self._metrics | {key: mean.value for key, mean in self._sums.items()}
        metrics["tokens/trained"] = self._sums["policy/entropy"].count if "policy/entropy" in self._sums else 0.0
        if self.is_supervised:
            metrics = supervised_metrics(metrics)
        metrics |= self._speeds(metrics)
        metrics |= self.sampler_metrics()
        if self.profiler is not None:
            self.profiler.end()
        self._finish_step(step + 1, metrics)

    def _finish_step(self, done: int, metrics: dict[str, float]) -> None:
        """What comes after the last update of a step; a signal may leave it in the middle of a measurement."""
        trained = dict(metrics)
        for interval, due in self.every:
            if interval and done % interval == 0:
                self.folder.write_status(done - 1, "evaluate")
                try:
                    with self.interruption.interruptible():
                        metrics |= due(done)
                except Interrupted:
                    self._mark(done, pending=trained)
                    raise
        self.folder.write_status(done - 1, "record")
        metrics["time/elapsed_seconds"] = time.perf_counter() - self._started
        self.folder.write_metrics(done, metrics)
        self.progress.step(done, metrics)
        for text in self.watcher.after_step(done, metrics) if self.watcher is not None else ():
            self.progress.alarm(done, text)
            self.folder.log(text)
        self.steps_done = done
        self.last = Step(done, metrics, *self._sampled)
        self.guards.after_step(done, metrics)
        self._mark(done)
        if self.saver is not None:
            self.folder.write_status(done, "save")
            self.folder.sync()
            with memory_error_as(
                CheckpointError, f"there is not enough memory to copy what the checkpoint of step {done} holds"
            ):
                self._later = self.saver.after_step(done, metrics)

    def _mark(self, done: int, *, pending: Mapping[str, float] | None = None) -> None:
        if self.saver is not None:
            self.saver.mark(done, pending=pending)

    def _speeds(self, metrics: Mapping[str, float]) -> dict[str, float]:
        seconds = time.perf_counter() - self._step_started
        trained = metrics.get("tokens/trained", 0.0)
        sampled = metrics.get("tokens/sampled", trained)
        speeds = {"time/step_seconds": seconds, "memory/process_gib": memory_gib()}
        speeds["speed/tokens_per_second"] = sampled / seconds
        for phase, name, tokens in (("sample", "sampled", sampled), ("train", "trained", trained)):
            spent = metrics.get(f"time/{phase}_seconds")
            if spent and f"tokens/{name}" in metrics:
                speeds[f"speed/{name}_tokens_per_second"] = tokens / spent
        if (peak := peak_gib()) is not None:
            speeds["memory/gpu_gib"] = peak
        return speeds


def memory_gib() -> float:
    """Resident memory of this process now where the system tells it, its peak elsewhere."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**30
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
