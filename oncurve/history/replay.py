"""Steps of a past run done again: the same bits or the first difference, and the step laid open."""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch
from oncurve.core.errors import ConfigError
from oncurve.core.grading import grade
from oncurve.core.records import Group, Reward
from oncurve.core.sampler import Sampler
from oncurve.data.python_objects import NOTHING, PythonObjects
from oncurve.history.again import AgainSampler, RecordedSampler, oldest_version, samples_alike
from oncurve.history.compared import compare
from oncurve.history.opened import OpenedStep, cosine, open_step, with_advantages
from oncurve.history.past import PastRun, advantages_under
from oncurve.history.regrade import FLAT, rewards_of
from oncurve.observe.manifest import describe_run
from oncurve.observe.record import METRICS, read_manifest, write_lines
from oncurve.observe.step_record import read_step
from oncurve.policy.distributed import Processes
from oncurve.recipe.load import read_run_config
from oncurve.recipe.schema import Config
from oncurve.rewards.weighted_sum import check_any_graded
from oncurve.run.builder import Parts, make_algorithm, make_parts, make_rewards, make_sampler
from oncurve.run.checkpoint_manifest import checkpoints_in, verify
from oncurve.run.interruption import Interruption
from oncurve.run.resume import ResumeRequest, resume
from oncurve.run.training import joined, recipe_steps

CHANGEABLE = ("algorithm", "rewards", "optimizer", "run.completions_per_update")
"""Parts of a recipe that may differ while the completions stay the same."""


@dataclass(frozen=True)
class Change:
    """The same completions under another setting."""

    described: str
    step: OpenedStep
    """The step as it would have been."""
    flipped: int
    """Completions whose advantage changes its sign."""
    gained_signal: int
    lost_signal: int
    """Groups of which one setting alone learns."""
    cosine: float
    """Cosine of the two gradients before clipping; NaN if one is zero."""


@dataclass(frozen=True)
class Replay:
    """A step done again, and how it compares with the record."""

    run: Path
    number: int
    checkpoint: int
    """The step whose checkpoint it began with; 0 is the model before training."""
    step: OpenedStep
    compared: list[str] = field(default_factory=list)
    """The things that were compared and are the same."""
    differences: list[str] = field(default_factory=list)
    """The first difference from the record; empty if there is none."""
    causes: list[str] = field(default_factory=list)
    """Differences of code, data and machine from when the run was recorded."""
    is_sampled: bool = True
    """The completions were sampled again, and not taken from the record."""
    change: Change | None = None
    is_main: bool = True
    """True in the process that reports."""

    @property
    def is_same(self) -> bool:
        """Everything that could be compared has the same bits."""
        return not self.differences

    def summary(self) -> dict[str, Any]:
        """Everything but the tensors as plain data, for JSON."""
        summary: dict[str, Any] = {
            "run": str(self.run),
            "step": self.number,
            "from_checkpoint": self.checkpoint,
            "is_same": self.is_same,
            "compared": self.compared,
            "differences": self.differences,
            "causes": self.causes,
            "is_sampled": self.is_sampled,
            **self.step.summary(),
        }
        if self.change is not None:
            summary["change"] = {
                "described": self.change.described,
                "flipped": self.change.flipped,
                "gained_signal": self.change.gained_signal,
                "lost_signal": self.change.lost_signal,
                "cosine": self.change.cosine,
                **self.change.step.summary(),
            }
        return summary


def replay(
    path: str | os.PathLike[str],
    step: int,
    *,
    changes: Sequence[str] = (),
    reward: str | Callable[..., Any] | None = None,
    recorded: bool = False,
    is_change: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Replay:
    """Do the steps of a run up to ``step`` again, compare them with the record, and lay the last one open.

    It resumes from the newest checkpoint before the step, in a folder of its own: nothing in the run is changed.
    ``changes`` (``key=value``) and ``reward`` show the same completions under another setting. With ``recorded`` the
    completions are those of the record and only the training is done again, as it must be where a sampler cannot
    repeat itself. ``is_change`` grades again also where ``reward`` is None: with the run's own, as it is now.

    Raises ConfigError, DataError, CheckpointError.
    """
    run = PastRun(path)
    last = run.metrics[-1]["step"] if run.metrics else 0
    if not 1 <= step <= last:
        raise ConfigError(f"{run.path}: step {step} was not done; the run has the steps 1 to {last}")
    changed = _changed_config(run, changes)
    is_recorded = recorded or not _samples_again(run.config)
    is_served = not recorded and run.config.rollouts.type == "servers"
    with joined(run.config.policy) as processes, _shared_folder(processes) as parent, _same_threads():
        folder = parent / run.path.resolve().name
        output = io.StringIO()
        console = Console(file=output, width=1000, force_terminal=False)
        opener = _Opener(
            run,
            folder,
            step,
            changed=changed,
            changes=changes,
            reward=reward,
            is_recorded=is_recorded,
            grades_again=is_change or reward is not None,
            samples_again=is_served,
        )
        before = oldest_version(run, step) + 1 if is_served else step
        start = processes.broadcast_from_main(lambda: _copy_beginning(run, folder, before))
        if start is None:
            start, steps = 0, _from_the_start(run, folder, opener, console, processes)
        else:
            request = ResumeRequest(folder, (), False, True, console, None, owns_process=False, load=opener.load)
            steps = resume(request, processes)
        _advance(steps, start, step, opener, on_progress if processes.is_main else None)
        assert opener.opened is not None
        compared, differences = processes.broadcast_from_main(lambda: compare(run, folder, start, step))
        if (again := opener.again) is not None:
            is_recorded = False
            from_record = f", {again.num_recorded} taken from the record" if again.num_recorded else ""
            compared += [] if differences else [f"{again.num_again} of them sampled again{from_record}"]
        causes = [line.removeprefix("WARNING ") for line in output.getvalue().splitlines() if _is_cause(line)]
    return Replay(
        run.path, step, start, opener.opened, compared, differences, causes, not is_recorded, opener.change,
        processes.is_main,
    )  # fmt: skip


def _changed_config(run: PastRun, changes: Sequence[str]) -> Config:
    """The run's recipe with the changes. Raises ConfigError for keys on which its completions depend."""
    keys = [change.partition("=")[0] for change in changes]
    others = [key for key in keys if not any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE)]
    text = (run.path / "config.yaml").read_text(encoding="utf-8")
    config = read_run_config(text, () if others else changes, source="the run's recipe")
    own_size = run.config.algorithm.group_size
    if config.algorithm.group_size != own_size and any("group_size" in change for change in changes):
        others.append("algorithm.group_size")
    if others:
        raise ConfigError(
            f"{others[0]}: with another value the run would have sampled other completions. Replay changes "
            f"{', '.join(CHANGEABLE)}, but not algorithm.group_size; for anything else train again"
        )
    algorithm = config.algorithm.model_copy(update={"group_size": own_size})  # another type may have another default
    return config.model_copy(update={"algorithm": algorithm})


def _samples_again(config: Config) -> bool:
    """Whether the run's sampler gives the same tokens a second time."""
    return config.rollouts.type != "servers"


@contextmanager
def _same_threads() -> Iterator[None]:
    """Give back the number of threads that a resumed run takes over from its checkpoint."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _shared_folder(processes: Processes) -> Iterator[Path]:
    """A temporary folder that all processes of this machine use."""
    folder = processes.broadcast_from_main(lambda: Path(tempfile.mkdtemp(prefix="oncurve-replay-")))
    try:
        yield folder
    finally:
        if processes.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def _machine(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that can change last bits: versions and the processor."""
    return {**manifest.get("packages", {}), "processor": manifest.get("hardware", {}).get("cpu")}


def _from_the_start(run: PastRun, folder: Path, opener: _Opener, console: Console, processes: Processes) -> Any:
    """The steps of the run, begun anew in another folder, with as many threads; says what is not as it was."""
    facts = read_manifest(run.path) if (run.path / "manifest.json").is_file() else {}
    torch.set_num_threads(facts.get("threads") or torch.get_num_threads())
    if "threads" not in facts:
        console.print("WARNING threads: the run does not say how many it had", markup=False)
    then, here = _machine(facts), _machine(describe_run())
    for name in then:
        if then[name] != here.get(name):
            console.print(f"WARNING {name}: {then[name]} then, {here.get(name)} now", markup=False)
    section = run.config.run.model_copy(update={"folder": str(folder.parent), "name": folder.name, "record": "all"})
    config = run.config.model_copy(update={"run": section})
    return recipe_steps(
        config, "", console=console, objects=NOTHING, owns_process=False, load=opener.load, processes=processes
    )


def _copy_beginning(run: PastRun, folder: Path, step: int) -> int | None:
    """A run folder that ends at the newest checkpoint before a step; the number of steps done there.

    None, and no folder, where no checkpoint is left from before the step: the run has to begin anew.
    """
    checkpoints = [(done, checkpoint) for done, checkpoint in checkpoints_in(run.path / "checkpoints") if done < step]
    if not checkpoints:
        return None
    start, checkpoint = checkpoints[-1]
    verify(checkpoint)
    shutil.copytree(checkpoint, folder / "checkpoints" / checkpoint.name, copy_function=_linked)
    for name in ("config.yaml", "manifest.json", "recipe.yaml"):
        if (run.path / name).is_file():
            shutil.copy(run.path / name, folder / name)
    write_lines(folder / METRICS, (row for row in run.metrics if row["step"] <= start))
    if (run.path / "evaluations").is_dir():
        for file in (run.path / "evaluations").glob("base.*"):
            (folder / "evaluations").mkdir(exist_ok=True)
            shutil.copy(file, folder / "evaluations" / file.name)
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    text, count = re.subn(r"(?m)^(  record: ).*$", r"\1all", config)
    (folder / "config.yaml").write_text(
        text if count else config.replace("\nrun:\n", "\nrun:\n  record: all\n"), "utf-8"
    )
    return start


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _is_cause(line: str) -> bool:
    return line.startswith("WARNING ") or line.startswith("  ")


def _advance(
    steps: Any, start: int, last: int, opener: _Opener, on_progress: Callable[[int, int], None] | None
) -> None:  # fmt: skip
    """Take the steps up to ``last``; the opener looks into the last one."""
    done = start
    opener.is_armed = done == last - 1
    try:
        for step in steps:
            done = step.number
            if on_progress is not None:
                on_progress(done - start, last - start)
            if done >= last:
                break
            opener.is_armed = done == last - 1
    finally:
        steps.close()


@dataclass
class _Opener:
    """Loads the parts of a run that is done again, and looks into one step of it."""

    run: PastRun
    folder: Path
    step: int
    changed: Config
    changes: Sequence[str]
    reward: str | Callable[..., Any] | None
    is_recorded: bool
    grades_again: bool
    samples_again: bool
    is_armed: bool = False
    opened: OpenedStep | None = None
    change: Change | None = None
    again: AgainSampler | None = None
    """Samples again the completions that servers of the run had sampled."""

    def load(
        self,
        config: Config,
        processes: Processes,
        interruption: Interruption | None = None,
        objects: PythonObjects = NOTHING,
    ) -> Parts:
        """The parts of the recipe; the policy tells when a step begins to train."""
        if self.is_recorded:
            alone = config.model_copy(update={"rollouts": config.rollouts.in_process()})
            made = make_parts(alone, processes, interruption, objects)
            made.sampler.close()
            parts = replace(made, config=config, sampler=self._known(made), servers=None, ahead=None)
        else:
            parts = make_parts(config, processes, interruption, objects)
        annotate = parts.policy.annotate

        def annotated(batch: Batch, *, old: bool, entropy: bool, reference: bool) -> Batch:
            annotated_batch = annotate(batch, old=old, entropy=entropy, reference=reference)
            if self.is_armed:
                self.is_armed = False
                self._look(parts, batch, annotated_batch)
            return annotated_batch

        parts.policy.annotate = annotated  # type: ignore[method-assign]
        return parts

    def _known(self, made: Parts) -> Sampler:
        """A sampler of the run's completions, sampled again where its servers were ours and can be followed."""
        measuring = make_sampler(made.config)
        if not self.samples_again or not samples_alike(self.run.config, made.policy):
            return RecordedSampler(self.run, measuring)
        done = [number for number, _ in checkpoints_in(self.folder / "checkpoints")]
        first, last = max(done, default=0), self.step - 1
        self.again = AgainSampler(self.run, made.config.sampling(), measuring, first=first, last=last)
        return self.again

    def _look(self, parts: Parts, plain: Batch, batch: Batch) -> None:
        record = parts.policy.processes.broadcast_from_main(lambda: read_step(self.folder, self.step))
        weights = torch.tensor(record.advantages)
        rows = self.run.config.run.completions_per_update or parts.config.completions_per_step
        self.opened = open_step(
            parts.policy, parts.algorithm, batch, record.groups, record.rewards, weights,
            number=self.step, rows_per_update=rows,
        )  # fmt: skip
        if self.changes or self.grades_again:
            self.change = self._under_change(parts, plain, record.groups, record.rewards)

    def _under_change(
        self, parts: Parts, plain: Batch, groups: Sequence[Group], rewards: Sequence[Sequence[Reward]]
    ) -> Change:
        config, changes = self.changed, list(self.changes)
        if self.grades_again or any(change.startswith("rewards") for change in self.changes):
            if self.grades_again:
                function, graded_by, described = rewards_of(self.run, self.reward)
                config = config.model_copy(update={"rewards": graded_by.rewards})
                changes.append(f"reward {described}")
            else:
                function = make_rewards(config)
            prompts = [group.prompt for group in groups for _ in group.completions]
            completions = [completion for group in groups for completion in group.completions]
            graded = parts.policy.processes.broadcast_from_main(lambda: grade(function, prompts, completions))
            function.close()
            check_any_graded(graded, where=changes[-1])
            flat = iter(graded)
            rewards = [[next(flat) for _ in group.completions] for group in groups]
        algorithm = make_algorithm(config)
        _check_reference(parts, algorithm)
        advantages = advantages_under(config, groups, rewards)
        rows = config.run.completions_per_update or parts.config.completions_per_step
        updates = parts.config.completions_per_step // rows * config.run.passes_per_step
        annotated = parts.policy.annotate(
            with_advantages(plain, advantages),
            old=algorithm.needs_old(updates),
            entropy=algorithm.needs_entropy,
            reference=algorithm.needs_reference,
        )
        other = open_step(
            parts.policy, algorithm, annotated, groups, rewards, advantages, number=self.step, rows_per_update=rows
        )
        assert self.opened is not None
        return _difference(", ".join(changes), self.opened, replace(other, max_norm=config.optimizer.max_gradient_norm))


def _check_reference(parts: Parts, algorithm: Algorithm) -> None:
    policy = parts.policy
    has_reference = policy.reference is not None or policy.adapter is not None or policy.teacher is not None
    if algorithm.needs_reference and not has_reference:
        raise ConfigError(
            "algorithm.kl_coef: this run kept no reference model, so its KL is not known. Replay another change"
        )


def _difference(described: str, was: OpenedStep, now: OpenedStep) -> Change:
    signs = [torch.where(step.advantages.abs() < FLAT, 0.0, step.advantages.sign()) for step in (was, now)]
    learns = [(sign != 0).any(dim=1) for sign in signs]
    return Change(
        described,
        now,
        flipped=int((signs[0] * signs[1] < 0).sum()),
        gained_signal=int((~learns[0] & learns[1]).sum()),
        lost_signal=int((learns[0] & ~learns[1]).sum()),
        cosine=cosine(was.gradient(), now.gradient()),
    )
