"""The log of a step: its metrics, what was sampled in it, and its row in the run folder."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from torch import Tensor

from oncurve.core.errors import TrainingError
from oncurve.core.records import Group, Mean, Reward, html_table
from oncurve.doctor.diagnose import Watch
from oncurve.observe.measure import age_metrics, rollout_metrics, supervised_metrics
from oncurve.observe.progress import Progress
from oncurve.observe.record import RunFolder
from oncurve.policy.device_memory import gpu_memory, peak_gib, start_peak, together
from oncurve.policy.distributed import ALONE, Processes
from oncurve.rewards.weighted_sum import check_any_graded, check_errors, describe_failures
from oncurve.run.checkpointer import Checkpointer


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
    saver: Checkpointer | None = field(default=None, repr=False, compare=False)

    def save(self) -> Path | None:
        """Write a checkpoint of this step, before the next one begins; its folder, None where runs are not saved.

        All processes call it. Raises CheckpointError if it cannot be written.
        """
        if self.saver is None or not self.saver.save_marked():
            return None
        return self.saver.root / f"step_{self.number:06d}"

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
class StepLog:
    """The statistics of one step after the other, and where they are written and shown."""

    folder: RunFolder
    progress: Progress
    _: KW_ONLY
    processes: Processes = ALONE
    max_staleness_steps: int = 0
    max_error_fraction: float = 0.2
    watcher: Watch | None = None
    sampler_metrics: Callable[[], dict[str, float]] = dict
    """Gives the sampler's metrics on the transfer of weights."""
    is_supervised: bool = False

    def __post_init__(self) -> None:
        self.sums: dict[str, Mean] = {}
        """Sums of the step so far, over this process's microbatches and updates."""
        self._metrics: dict[str, float] = {}
        self._gpu_memory: dict[str, float] = {}
        """Memory of this process, until ``add_up`` gathers that of all."""
        self._sampled: tuple[Sequence[Group], Sequence[Sequence[Reward]]] = ((), ())
        self._has_failed = False
        """Somebody was told that grading failed."""
        self._has_graded = False
        """Some completion was graded in this run."""
        self._began = self._step_began = time.perf_counter()

    def begin(self, metrics: Mapping[str, float]) -> None:
        """Forget the step before, of which ``metrics`` became known too late for its own row."""
        self._step_began = time.perf_counter()
        self.sums, self._metrics, self._gpu_memory = {}, dict(metrics), {}
        start_peak()

    def phase(self, name: str, seconds: float) -> None:
        """Add the seconds of a phase to ``time/<phase>_seconds``, and note the memory at its end."""
        key = f"time/{name}_seconds"
        self._metrics[key] = self._metrics.get(key, 0.0) + seconds
        self._metrics[f"memory/{name}_gib"] = memory_gib()
        self._gpu_memory |= gpu_memory(name, rank=self.processes.rank if self.processes.count > 1 else None)

    def add(self, statistics: Mapping[str, Mean]) -> None:
        """Add statistics of a microbatch or an update; they are averaged when the step ends, and not before."""
        for key, mean in statistics.items():
            self.sums[key] = self.sums[key] + mean if key in self.sums else mean

    def add_up(self) -> None:
        """Add the statistics of the step over all processes, once its updates are done. All must call it."""
        if self.processes.count > 1:
            self.sums = self.processes.add_means(self.sums)
        if self._gpu_memory:
            self._metrics |= together(self.processes.all_gather(self._gpu_memory))

    def mean(self, key: str) -> float:
        """The mean of a statistic over the step so far; NaN if there is none."""
        return self.sums[key].value if key in self.sums else math.nan

    def measure(self, step: int, groups: Sequence[Group], graded: Sequence[Sequence[Reward]]) -> None:
        """Measure everything that was sampled, and refuse to go on when too much of it could not be graded."""
        self._metrics |= rollout_metrics(groups, graded)
        self._sampled = (groups, graded)
        if self.watcher is not None:
            self.watcher.see(groups, graded)
        rewards = [reward for row in graded for reward in row]
        if not self._has_graded:
            check_any_graded(rewards, where=f"step {step + 1}")
            self._has_graded = True
        failed = [reward for reward in rewards if reward.is_failure]
        if failed and not self._has_failed:
            self._has_failed = True
            self._tell_first_failure(step, failed, len(rewards))
        check_errors(rewards, max_error_fraction=self.max_error_fraction, step=step + 1)

    def _tell_first_failure(self, step: int, failed: Sequence[Reward], total: int) -> None:
        """Warn that grading fails, and keep the first traceback in the log."""
        text = f"step {step + 1}: grading failed for {len(failed)} of {total} completions, "
        text += f"{describe_failures(failed)}. They count as errors, not as wrong answers"
        trace = next((reward.trace for reward in failed if reward.trace), "")
        self.progress.note(f"WARNING {text}" + (f"; traceback in {self.folder.path / 'log.txt'}" if trace else ""))
        self.folder.log(f"{text}\n{trace}")

    def check_age(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """The age of completions that are about to be trained on.

        Raises TrainingError for weights that are older than the recipe allows, or newer than these.
        """
        ages = [step - completion.policy_version for group in groups for completion in group.completions]
        if min(ages, default=0) < 0 or max(ages, default=0) > self.max_staleness_steps:
            raise TrainingError(
                f"step {step} was given completions that are {min(ages)} to {max(ages)} steps old; at most "
                f"{self.max_staleness_steps} are allowed (rollouts.staleness). Nothing was trained on them"
            )
        metrics = {
            "completion/mean_staleness_steps": sum(ages) / max(len(ages), 1),
            "completion/max_staleness_steps": float(max(ages, default=0)),
        }
        return metrics | age_metrics(step, groups) if self.max_staleness_steps else metrics

    def measure_retained(self, step: int, groups: Sequence[Group], advantages: Tensor) -> None:
        """Measure ages and advantages of what is trained on."""
        self._metrics |= self.check_age(step, groups)
        self.add({"advantage/mean": Mean(advantages.sum().item(), advantages.numel())})
        self._metrics["advantage/std"] = advantages.std().item()

    def metrics(self) -> dict[str, float]:
        """Everything that is known of the step at the end of its last update."""
        metrics = self._metrics | {key: mean.value for key, mean in self.sums.items()}
        metrics["tokens/trained"] = self.sums["policy/entropy"].count if "policy/entropy" in self.sums else 0.0
        if self.is_supervised:
            metrics = supervised_metrics(metrics)
        return metrics | self._speeds(metrics) | self.sampler_metrics()

    def _speeds(self, metrics: Mapping[str, float]) -> dict[str, float]:
        seconds = time.perf_counter() - self._step_began
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

    def write(self, done: int, metrics: dict[str, float]) -> Step:
        """Write and show the row of a step, and what the watcher finds in it."""
        metrics["time/elapsed_seconds"] = time.perf_counter() - self._began
        self.folder.write_metrics(done, metrics)
        self.progress.step(done, metrics)
        for text in self.watcher.after_step(done, metrics) if self.watcher is not None else ():
            self.progress.alarm(done, text)
            self.folder.log(text)
        return Step(done, metrics, *self._sampled)


def memory_gib() -> float:
    """Resident memory of this process now where the system tells it, its peak elsewhere."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**30
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
