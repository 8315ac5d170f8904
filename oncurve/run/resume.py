"""Resuming a run from a checkpoint, and the conditions under which it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from oncurve.core.errors import ConfigError, DataError
from oncurve.data.python_objects import NOTHING, PythonObjects
from oncurve.evaluate.evaluation import Evaluation, read_evaluation
from oncurve.observe.lock import RunLock
from oncurve.observe.record import METRICS, NullRunFolder, RunFolder, lock_run, read_rows, to_yaml, write_text
from oncurve.observe.run_model import is_run
from oncurve.policy.distributed import Processes
from oncurve.recipe.load import flat, read_run_config, resolved, validate_tree
from oncurve.recipe.schema import Config
from oncurve.run.builder import Parts, make_parts, settle
from oncurve.run.checkpoint_manifest import checkpoints_in, newest_good, quarantine, read_manifest, sweep, verify
from oncurve.run.extension import extended, rate_differences
from oncurve.run.guards import KL_LIMIT, KlAlarm
from oncurve.run.identity import identity, recorded
from oncurve.run.interruption import Interrupted, Interruption
from oncurve.run.model_paths import describe_paths
from oncurve.run.rendered import with_epochs
from oncurve.run.result import Steps
from oncurve.run.session import Session, keep_evaluation, make_session
from oncurve.run.state import read_ahead
from oncurve.run_errors import CheckpointError, Stopped
from oncurve.section import harmless_keys
from oncurve.wording import counted

Load = Callable[[Config, Processes, Interruption | None, PythonObjects], Parts]
"""Loads the parts of a run; see ``make_parts``."""


@dataclass(frozen=True)
class ResumeRequest:
    """A request to resume a run, and who hears of it."""

    path: Path
    overrides: Sequence[str]
    strict: bool
    allow_change: bool
    console: Console
    new_config: Config | None = None
    """A recipe that came along; the run's own counts."""
    objects: PythonObjects = NOTHING
    """Objects that a Python program passes: the same as when the run began."""
    owns_process: bool = True
    load: Load = make_parts
    after: int | None = None
    """Go on from the checkpoint of this step, and put later ones aside; None for the newest."""
    extends: bool = False
    """More steps than the run had are no change that has to be allowed."""

    @property
    def how_to_change(self) -> str:
        """The option that allows a change."""
        return (
            "--allow-change" if self.owns_process else "resume(allow_change=True) or `oncurve trl --accept changed_run`"
        )

    def warn(self, text: str) -> None:
        """Say something that is not as it should be."""
        self.console.print(Text(f"WARNING {text}", style="bold red"), soft_wrap=True)

    def judge(self, differences: Sequence[str]) -> None:
        """Refuse what is otherwise than in the run that was saved, or warn of it. Raises ConfigError."""
        if not differences:
            return
        listed = "\n  ".join(differences)
        if not self.allow_change:
            raise ConfigError(
                f"this run was saved with other settings:\n  {listed}\n"
                f"Resume it unchanged, or use {self.how_to_change} to continue with the new settings"
            )
        self.warn(f"the run continues with other settings:\n  {listed}")


OF_EXTENSION = ("run.steps:", "optimizer.extension:", "optimizer.planned_updates:")
"""Keys that a program changes when it extends its run."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint and the recipe with which a run goes on."""

    checkpoint: Path
    manifest: Mapping[str, Any]
    config: Config
    changed: list[str]
    """Keys whose values differ from the run's."""


def run_and_step(path: Path) -> tuple[Path, int | None]:
    """The run that a path names, by itself or by one of its checkpoints, and the step of that; None for the newest."""
    root = path.resolve().parent
    if not is_run(path) and root.name == "checkpoints" and is_run(root.parent):
        for step, folder in checkpoints_in(root):
            if folder.name == path.resolve().name:
                return root.parent, step
    return path, None


def resume(request: ResumeRequest, processes: Processes) -> Steps:
    """Everything from the lock to the measurement of the model at the end. All processes call it."""
    path, lock = request.path, processes.on_main(lambda: lock_run(request.path))
    interruption = Interruption(is_alone=processes.count == 1, owns_process=request.owns_process)
    try:
        with interruption.listen():
            interruption.join(processes)
            point = processes.broadcast_from_main(lambda: _find(request, lock))
            interruption.grace_seconds = point.config.run.grace_seconds
            session, base = _prepare(request, point, lock, processes, interruption)
            with session.folder:
                return (yield from session.steps(base))
    except Interrupted:
        how = f"`oncurve resume {path}`" if request.owns_process else "resume() again"
        raise Stopped(f"stopped; resume with {how}", exit_code=interruption.exit_code) from None
    finally:
        if lock is not None:
            lock.close()


def _find(request: ResumeRequest, lock: RunLock | None) -> ResumePoint:
    """The newest good checkpoint, and the recipe to go on with. Done by process 0."""
    path, root = request.path, request.path / "checkpoints"
    if lock is not None and lock.previous_owner:
        request.console.print(
            Text(f"Previous {lock.previous_owner} is no longer running; taking over."), soft_wrap=True
        )
    sweep(path)
    sweep(root)
    if request.after is not None:
        _go_back(root, request.after)
    checkpoint, manifest = newest_good(root, strict=request.strict, warn=request.warn)
    config = with_epochs(requested_config(path, manifest, request.overrides, warn=request.warn), request.objects)
    requested = None if request.new_config is None else settle(with_epochs(request.new_config, request.objects))[0]
    if requested is not None and not request.owns_process:  # a program says what it resumes, and means it
        location = {"folder": config.run.folder, "name": config.run.name}
        data = requested.data.model_copy(update={"now": requested.data.now or config.data.now})
        config, requested = (
            requested.model_copy(update={"run": requested.run.model_copy(update=location), "data": data}),
            None,
        )
    _check_step(request, config, manifest)
    config = extended(config, manifest, decides=request.owns_process)
    changed = config_differences(manifest["config"], config)
    longer = config.run.steps > manifest["config"]["run"]["steps"]
    extends = request.extends and longer
    rates = rate_differences(config, manifest)
    others = [line for line in changed if not (extends and line.startswith(OF_EXTENSION))]
    request.judge([*others, *(rates if others else ())])
    if rates and not others:
        request.warn(f"{path} is extended: {rates[0]}")
    if requested is not None and (other := config_differences(recorded(config), requested)):
        lines = "\n  ".join(other)
        request.warn(
            f"{path} goes on with its own recipe; the given one says otherwise, and is not followed (own -> given):"
            f"\n  {lines}"
        )
    return ResumePoint(checkpoint, manifest, config, changed)


def _go_back(root: Path, step: int) -> None:
    """Put checkpoints after the one of a step aside. Raises CheckpointError if that one is missing or broken."""
    there = dict(checkpoints_in(root))
    if step not in there:
        steps = ", ".join(map(str, there)) or "none"
        raise CheckpointError(f"{root}: has no checkpoint of step {step}. Checkpoints are there of steps: {steps}")
    verify(there[step])
    quarantine(root, after=step)


def _prepare(
    request: ResumeRequest, point: ResumePoint, lock: RunLock | None, processes: Processes, interruption: Interruption
) -> tuple[Session, Evaluation | None]:
    """The run as it was at its newest good checkpoint, and its first measurement if that is done."""
    path, manifest, config = request.path, point.manifest, point.config
    if manifest["device"] == "cpu":
        torch.set_num_threads(int(manifest["threads"]))  # the order of sums depends on it
    with interruption.interruptible():
        parts = request.load(config, processes, interruption, request.objects)
        facts = identity(parts)
        more = fact_differences(manifest, facts)
        processes.on_main(lambda: request.judge(more))
        warn_of_machine(manifest, facts, warn=request.warn)
    step = int(manifest["step"])
    processes.on_main(lambda: quarantine(path / "checkpoints", after=step))
    folder = processes.on_main(lambda: RunFolder(path, resume_step=step, lock=lock)) or NullRunFolder(path)
    session = make_session(parts, folder, facts, interruption, request.console, first_step=step)
    base = _base_measurement(session, step)
    state = session.saver.load(point.checkpoint, manifest, fresh=_fresh(point.changed, more))
    _restore_ahead(session, point.checkpoint, is_other=bool(point.changed or more))
    processes.all_gather(None)  # all have read it
    if (pending := state.get("pending")) is not None:
        session.pending = pending
        folder.forget_row(step)
    processes.on_main(lambda: _check_rows(path, step if pending is None else step - 1, warn=request.warn))
    if point.changed or more:
        processes.on_main(lambda: write_text(path / "config.yaml", to_yaml(recorded(config))))
        session.saver.mark(step, pending=session.pending)
        session.saver.save()
        session.saver.wait()
    folder.log(f"resumed after step {step} from {point.checkpoint.name}")
    folder.log(description := describe_paths(parts.policy, config.rollouts))
    request.console.print(description, markup=False, highlight=False, soft_wrap=True)
    notice = f"resuming after step {step} of {config.run.steps}, from {point.checkpoint}"
    request.console.print(notice, highlight=False, soft_wrap=True)
    return session, base


def _restore_ahead(session: Session, checkpoint: Path, *, is_other: bool) -> None:
    """Take the groups of coming steps that were finished when the checkpoint was written; the others are begun again.
    Of a run that goes on with other settings, all are."""
    ahead = session.parts.ahead
    if ahead is None or not (groups := read_ahead(checkpoint)):
        return
    steps, count = f"{min(groups) + 1} to {max(groups) + 1}", counted(sum(map(len, groups.values())), "group")
    if is_other:
        session.note(f"look-ahead: {count} of the steps {steps} are sampled again, since the settings are others")
        return
    ahead.restore(groups)
    session.note(
        f"look-ahead: {count} of the steps {steps} were finished and are kept; what else was under way for these steps "
        f"is begun again, from the weights of now"
    )


def requested_config(
    path: Path, manifest: Mapping[str, Any], overrides: Sequence[str], *, warn: Callable[[str], None]
) -> Config:
    """The recipe of the run's folder with the overrides; that of the checkpoint if the folder's cannot be read."""
    try:
        text = (path / "config.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        warn(f"{path / 'config.yaml'} cannot be read ({error}); the recipe in the checkpoint is taken")
        text = to_yaml(manifest["config"])
    config = read_run_config(text, overrides, source=str(path / "config.yaml"))
    location = {"folder": str(path.parent), "name": path.name}
    return config.model_copy(update={"run": config.run.model_copy(update=location)})


def go_below_limit(path: Path, alarm: KlAlarm) -> tuple[int, str]:
    """Put checkpoints of a KL above the limit aside; the step to go back to, and the override that doubles the KL.

    Raises the alarm again if there is no checkpoint below it.
    """
    with lock_run(path):
        root = path / "checkpoints"
        good = [
            (step, manifest)
            for step, folder in checkpoints_in(root)
            if ((manifest := read_manifest(folder)).get("kl") or 0.0) <= KL_LIMIT and step > 0
        ]
        if not good:
            raise alarm
        step, manifest = good[-1]
        quarantine(root, after=step)
        return step, Config.model_validate(manifest["config"]).algorithm.with_doubled_kl()


def finished(path: Path, step: int, *, requested_steps: int = 0, is_of_program: bool = False) -> str:
    """Advice for a run that is finished, after so many steps: in a shell, or in the program that made it.

    ``requested_steps`` is the number of steps that was asked for, if any: it is proposed where it is more.
    """
    more = requested_steps if requested_steps > step else 2 * step
    how = f"oncurve resume {path} run.steps={more} --allow-change"
    if is_of_program:
        how = (
            f"run={{'name': {path.name!r}, 'steps': {more}}} and resume(extends=True) in the program that made it, "
            f"or a larger max_steps and train(resume_from_checkpoint=True) in its script for TRL"
        )
    return f"{path}: this run is finished. To train it further, set more steps: {how}"


def _check_step(request: ResumeRequest, config: Config, manifest: Mapping[str, Any]) -> None:
    """Refuse to go back further than a failure can explain, and to go on where nothing is left to do."""
    path, step = request.path, int(manifest["step"])
    if step > config.run.steps:
        raise ConfigError(f"run.steps is {config.run.steps}, but {step} steps are done already. Set more steps")
    is_measured = (path / "evaluations" / "trained.json").is_file() and (path / "model").is_dir()
    if step == config.run.steps and is_measured:
        is_of_program = not request.owns_process or bool(manifest.get("given"))
        raise ConfigError(finished(path, step, is_of_program=is_of_program))
    rows = read_rows(path / METRICS)
    last = max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)
    interval = config.run.save_every_steps
    if step == 0 and interval and last >= 2 * interval and request.after is None:
        raise CheckpointError(
            f"{path}: {last} steps are recorded, but their checkpoints are missing, and a run is never restarted from "
            f"scratch automatically. Restore a checkpoint, or start a new run with `oncurve train`"
        )


def _fresh(changed: Sequence[str], more: Sequence[str]) -> frozenset[str]:
    """Parts of the state that a change makes meaningless."""
    starts = {
        "tokens_per_microbatch": ("policy.tokens_per_microbatch",),
        "entropy": ("algorithm.entropy", "algorithm.type"),
        "curriculum": ("the training prompts",),
    }
    lines = [*changed, *more]
    return frozenset(name for name, keys in starts.items() if any(line.startswith(keys) for line in lines))


def _base_measurement(session: Session, step: int) -> Evaluation | None:
    """The measurement before training: read, or made again now that the policy still has the weights of the base."""
    base = session.parts.policy.processes.broadcast_from_main(lambda: _read_base(session.folder.path))
    if base is None and step > 0:
        base = session.evaluator.measure(session.parts.prompts.test, name="base", step=0)
        keep_evaluation(session.folder, base)
    return base


def _read_base(path: Path) -> Evaluation | None:
    try:
        return read_evaluation(path / "evaluations", "base")
    except DataError:
        return None


def _check_rows(path: Path, step: int, *, warn: Callable[[str], None]) -> None:
    """Say which records are missing: they cannot be made again without their steps."""
    there = {row.get("step") for row in read_rows(path / METRICS)}
    if missing := [str(number) for number in range(1, step + 1) if number not in there]:
        warn(f"{path / METRICS} has no record of {counted(len(missing), 'step')}, done already, such as {missing[0]}")


def config_differences(was: Mapping[str, Any], config: Config) -> list[str]:
    """Differences of the recipe from that of the checkpoint, as lines ``key: old -> new``."""
    was = recorded(resolved(validate_tree(was, source="the recipe of the checkpoint")))
    old, new, harmless = dict(flat(was)), dict(flat(recorded(config))), harmless_keys(Config)
    return [
        f"{key}: {old.get(key, 'not there')} -> {new.get(key, 'not there')}"
        for key in sorted(old.keys() | new.keys())
        if key not in harmless and old.get(key, "not there") != new.get(key, "not there")
    ]


def fact_differences(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Differences in the data, the base model and the number of processes."""
    names = {
        "data": "the training prompts",
        "base": "the weights of the base model",
        "world_size": "the number of processes",
    }
    differences = [
        f"{text}: {manifest.get(key)} -> {facts[key]}" for key, text in names.items() if manifest.get(key) != facts[key]
    ]
    note = "(a function counts with its source, an object with its attributes)"
    for key, text in (
        ("code", "the file of the {}: not as when the run began"),
        ("model_files", "the model's {}: not as when the run began"),
        ("columns", "the column {!r} of the training rows: not as when the run began"),
        ("given", f"{{}}: not as when the run began {note}"),
    ):
        was, now = manifest.get(key, {} if key == "given" else None), facts.get(key, {})
        differences += [text.format(name) for name in _changed(was, now, ignores_new=key == "columns")]
    return differences


def _changed(was: Mapping[str, Any] | None, now: Mapping[str, Any], *, ignores_new: bool = False) -> list[str]:
    """Names of what is otherwise; a new column is read by nobody. Of a checkpoint that knows none, nothing is said."""
    known = was or {}
    names = known.keys() | (set() if ignores_new or was is None else now.keys())
    return [name for name in sorted(names) if known.get(name) != now.get(name)]


def warn_of_machine(manifest: Mapping[str, Any], facts: Mapping[str, Any], *, warn: Callable[[str], None]) -> None:
    """Say what makes the bits differ without making the run another one."""
    for key in ("device", "threads", "versions"):
        if manifest.get(key) != facts[key]:
            old, new = manifest.get(key), facts[key]
            if isinstance(old, Mapping):
                old, new = ({k: v for k, v in versions.items() if old.get(k) != new.get(k)} for versions in (old, new))
            warn(f"{key}: {old} when it was saved, {new} now. The run goes on, but its last bits may differ")
    was, now = manifest.get("environment"), facts["environment"]
    for name in _changed(was, now):
        change = "not set when it was saved" if not (was or {}).get(name) else "had another value when it was saved"
        warn(f"the environment variable {name}: {change}, and your code reads it")
