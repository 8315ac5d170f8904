"""The two ways into a run: `run_recipe` starts one, `resume_run` goes on with one. KL alarms are caught here."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from oncurve.core.errors import ConfigError
from oncurve.data.prompts import describe_chat
from oncurve.data.python_objects import NOTHING, PythonObjects
from oncurve.observe.manifest import describe_run
from oncurve.observe.record import NullRunFolder, RunFolder
from oncurve.policy.distributed import ALONE, Processes
from oncurve.policy.environment import read_rank_info
from oncurve.policy.from_settings import make_processes
from oncurve.policy.settings import PolicySection
from oncurve.recipe.load import read_run_config, run_folder_path
from oncurve.recipe.preflight import check_algorithm, unread_settings
from oncurve.recipe.schema import Config
from oncurve.rewards.terms import describe_rewards
from oncurve.run.builder import make_parts, settle
from oncurve.run.guards import KlAlarm
from oncurve.run.identity import identity
from oncurve.run.interruption import Interrupted, Interruption
from oncurve.run.model_paths import advice, describe_paths, passport_facts
from oncurve.run.rendered import arithmetic, count_prompts, with_epochs
from oncurve.run.result import Result, Steps, finish, report
from oncurve.run.session import make_session
from oncurve.run_errors import Stopped

if TYPE_CHECKING:
    from oncurve.run.resume import Load, ResumeRequest

MAX_RETURNS = 3
"""Most returns of a run after KL alarms; a coefficient eight times as high should have helped."""


def run_recipe(config: Config, recipe: str, *, console: Console, objects: PythonObjects = NOTHING) -> Result:
    """Train as the recipe says and leave everything worth keeping in the run's folder.

    Raises Stopped if a signal ended it where there is nothing to show.
    """
    return finish(recipe_steps(config, recipe, console=console, objects=objects))


def recipe_steps(
    config: Config,
    recipe: str,
    *,
    console: Console,
    objects: PythonObjects = NOTHING,
    owns_process: bool = True,
    load: Load = make_parts,
    processes: Processes | None = None,
) -> Steps:
    """The same, step by step; closed early, it saves and leaves a run that can be resumed.

    Without ``owns_process`` a signal never ends the process. ``load`` is what loads the parts. Without ``processes``
    it joins those that a launcher started.
    """
    config = with_epochs(config, objects)
    with joined(config.policy) if processes is None else nullcontext(processes) as processes:
        console = audible(console, processes)
        path = processes.broadcast_from_main(lambda: run_folder_path(config))
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": path.name})})
        objects.check_model(config.model, needs_files=bool(config.rollouts.own_servers or config.rollouts.vllm_servers))
        settled, placement = processes.broadcast_from_main(lambda: settle(config))
        config = config.model_copy(update={"rollouts": settled.rollouts})  # the rest is compared later
        announce(config, placement, objects, console)
        interruption = Interruption(
            grace_seconds=config.run.grace_seconds, is_alone=processes.count == 1, owns_process=owns_process
        )
        try:
            with interruption.listen():
                interruption.join(processes)
                with interruption.interruptible():
                    parts = load(config, processes, interruption, objects)
                    facts = identity(parts)
                    paths, hints = describe_paths(parts.policy, config.rollouts), advice(parts)
                config = parts.config
                chat = describe_chat(config.data.chat, parts.policy.tokenizer, config.data.template, model=config.model)
                if chat is not None:
                    console.print(chat, markup=False, highlight=False, soft_wrap=True)
                if not console.is_jupyter:
                    console.print(arithmetic(config, parts.prompts), markup=False, highlight=False)
                    console.print(paths, *hints, sep="\n", markup=False, highlight=False, soft_wrap=True)
                with processes.on_main(lambda: RunFolder(path)) or NullRunFolder(path) as folder:
                    counts, known = count_prompts(parts.prompts), passport_facts(parts.policy, paths)
                    manifest = describe_run(prompts=counts, processes=processes.count, **known)
                    folder.write_start(recipe, config.model_dump(mode="json"), manifest)
                    for line in (chat, paths, *hints):
                        if line is not None:
                            folder.log(line)
                    result = yield from make_session(parts, folder, facts, interruption, console).steps()
        except Interrupted:
            raise Stopped(_before_first_step(path), exit_code=interruption.exit_code) from None
        except KlAlarm as alarm:
            from oncurve.run.resume import ResumeRequest  # lazy

            request = ResumeRequest(path, (), False, True, console, None, objects, owns_process, load)
            result = yield from _go_back(alarm, request, processes)
        return _reported(result, console, processes)


def resume_run(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    strict: bool = False,
    allow_change: bool = False,
    new_config: Config | None = None,
    console: Console,
) -> Result:
    """Go on from a run's newest good checkpoint, or from the one that is named, to the bits that it would have had.

    ``strict``, ``allow_change`` and ``new_config`` are those of ``resume_steps``.
    """
    return finish(
        resume_steps(
            Path(run), overrides, strict=strict, allow_change=allow_change, new_config=new_config, console=console
        )
    )


def resume_steps(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    strict: bool = False,
    allow_change: bool = False,
    new_config: Config | None = None,
    objects: PythonObjects = NOTHING,
    owns_process: bool = True,
    load: Load = make_parts,
    after: int | None = None,
    extends: bool = False,
    console: Console,
) -> Steps:
    """The same, step by step.

    Every checksum is verified before a file is used. A broken checkpoint is named, and the one before is taken; with
    ``strict`` it is an error. Several processes need the run's folder on storage that all of them see. A ``new_config``
    recipe is only compared with the run's own, which counts; a program that says again what it trains passes the same
    ``objects`` as when the run began, and its recipe counts. ``after`` so many steps it goes on, if that is said; with
    ``extends``, more steps are no change that has to be allowed.

    Raises CheckpointError if there is no good one; ConfigError if the recipe, the data, the group size or the number
    of processes changed and ``allow_change`` is not given.
    """
    from oncurve.run.resume import ResumeRequest, resume, run_and_step  # lazy

    run, named = run_and_step(run)
    with _joined(run, overrides) as processes:
        console = audible(console, processes)
        request = ResumeRequest(
            run, overrides, strict, allow_change, console, new_config, objects, owns_process, load,
            after=named if after is None else after, extends=extends,
        )  # fmt: skip
        try:
            result = yield from resume(request, processes)
        except KlAlarm as alarm:
            result = yield from _go_back(alarm, request, processes)
        return _reported(result, console, processes)


def _go_back(alarm: KlAlarm, request: ResumeRequest, processes: Processes) -> Steps:
    """The run from its newest checkpoint below the limit on, with twice the KL coefficient.

    The same step with the same recipe would run away again. Raises the alarm if that happened MAX_RETURNS times, or if
    there is no such checkpoint.
    """
    from oncurve.run.resume import go_below_limit, resume  # lazy

    for _ in range(MAX_RETURNS):
        step, override = processes.broadcast_from_main(partial(go_below_limit, request.path, alarm))
        request.console.print(f"{alarm}. Going back to step {step} with {override}", highlight=False)
        again = replace(request, overrides=(override,), strict=False, allow_change=True, new_config=None, after=None)
        try:
            return (yield from resume(again, processes))
        except KlAlarm as another:
            alarm = another
    raise alarm


def _before_first_step(path: Path) -> str:
    """Advice for a run that was stopped before its first step."""
    if any((path / "checkpoints").glob("step_*")):
        return f"stopped before the first step; resume with: oncurve resume {path}"
    return "stopped before the first step; there is nothing to resume, so begin it again"


def _reported(result: Result, console: Console, processes: Processes) -> Result:
    """The result, shown if the run came to its end."""
    if not result.is_interrupted and processes.is_main:
        report(result, console=console)
    return result


def announce(config: Config, placement: str | None, objects: PythonObjects, console: Console) -> None:
    """Print where the run samples, what it rewards, and what somebody should know before it begins."""
    if placement is not None:
        console.print(placement, markup=False, highlight=False, soft_wrap=True)
    for line in describe_rewards(config.rewards, is_default=config.has_default_reward):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for finding in check_algorithm(config):
        console.print(f"[yellow]warning[/yellow]: {finding.what}. {finding.why} {finding.do}", highlight=False)
    for line in unread_settings(config):
        console.print(f"warning: {line}", markup=False, highlight=False, soft_wrap=True)
    for name, unseen in objects.unseen.items():
        console.print(
            f"{name}: a resumed run will not notice a change of {'; '.join(unseen)}", markup=False, highlight=False
        )


@contextmanager
def _joined(path: Path, overrides: Sequence[str]) -> Iterator[Processes]:
    """The processes that were started to go on with a run, with the limits in its recipe."""
    if read_rank_info().count == 1:
        yield ALONE
        return
    try:
        text = (path / "config.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path / 'config.yaml'}: cannot be read ({error}). Several processes need it, on storage that all of "
            f"them see; the manifest of a checkpoint holds it as well"
        ) from None
    with joined(read_run_config(text, overrides, source=str(path / "config.yaml")).policy) as processes:
        yield processes


@contextmanager
def joined(section: PolicySection) -> Iterator[Processes]:
    """The processes of the run; they take leave of each other at its end."""
    processes = make_processes(section)
    try:
        with processes.watched():
            yield processes
    finally:
        processes.close()


def audible(console: Console, processes: Processes) -> Console:
    """The console of process 0; the others speak to nobody."""
    return console if processes.is_main else Console(file=io.StringIO(), quiet=True)
