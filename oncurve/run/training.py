"""The two ways into a run: `run_recipe` starts one, `resume_run` goes on with one. KL alarms are caught here."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from oncurve.data.given import NOTHING, Given
from oncurve.errors import ConfigError, Stopped
from oncurve.extensions import extension
from oncurve.observe.manifest import describe_run
from oncurve.observe.null_run_folder import NullRunFolder
from oncurve.observe.record import RunFolder
from oncurve.policy.distributed import ALONE, Processes
from oncurve.policy.environment import read_place
from oncurve.policy.from_settings import make_processes
from oncurve.recipe.algorithm_rules import check_algorithm
from oncurve.recipe.run_folder import read_run_config, run_folder_path
from oncurve.recipe.schema import Config
from oncurve.rewards.terms import describe_rewards
from oncurve.run.guards import KlAlarm
from oncurve.run.interruption import Interrupted, Interruption
from oncurve.run.parts import arithmetic, count_prompts, identity, make_parts
from oncurve.run.rendered import with_epochs
from oncurve.run.result import Result, Steps, finish, report
from oncurve.run.resume import Load, ResumeRequest, go_below_limit, resume
from oncurve.run.session import Session

MAX_RETURNS = 3
"""How often a run goes back after KL alarms; a coefficient eight times as high should have helped."""


def run_recipe(config: Config, recipe: str, *, console: Console, given: Given = NOTHING) -> Result:
    """Train as the recipe says and leave everything worth keeping in the run's folder.

    Raises Stopped if a signal ended it where there is nothing to show.
    """
    return finish(recipe_steps(config, recipe, console=console, given=given))


def recipe_steps(
    config: Config,
    recipe: str,
    *,
    console: Console,
    given: Given = NOTHING,
    owns_process: bool = True,
    load: Load = make_parts,
) -> Steps:
    """The same, step by step; closed early, it saves and leaves a run that can be resumed.

    Without ``owns_process`` a signal never ends the process. ``load`` is what loads the parts.
    """
    config = with_epochs(config, given)
    with joined(config) as processes:
        console = audible(console, processes)
        path = processes.broadcast_from_main(lambda: run_folder_path(config))
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": path.name})})
        request = ResumeRequest(path, (), False, True, console, None, given, owns_process, load)
        start = partial(_start, config, recipe, request, processes)
        return (yield from _to_the_end(start, request, processes))


def resume_run(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    strict: bool = False,
    allow_change: bool = False,
    processes: Processes | None = None,
    given: Config | None = None,
    console: Console,
) -> Result:
    """Go on from the newest good checkpoint of a run, to the same bits that the run would have had.

    Every checksum is verified before a file is used. A broken checkpoint is named, and the one before is taken; with
    ``strict`` it is an error. Several processes need the run's folder on storage that all of them see; ``processes``
    are those that are joined already. A ``given`` recipe is only compared with the run's own, which counts.

    Raises CheckpointError if there is no good one; ConfigError if the recipe, the data, the group size or the number
    of processes changed and ``allow_change`` is not given.
    """
    path = Path(run)
    with ExitStack() as stack:
        if processes is None:
            processes = stack.enter_context(_joined(path, overrides))
        request = ResumeRequest(path, overrides, strict, allow_change, audible(console, processes), given)
        return finish(_to_the_end(partial(resume, request, processes), request, processes))


def resume_steps(run: Path, *, config: Config, given: Given, load: Load, owns_process: bool, console: Console) -> Steps:
    """The run of a program that says again what it trains, step by step: recipe, rows and rewards must be the same."""
    with _joined(run, ()) as processes:
        request = ResumeRequest(run, (), False, False, audible(console, processes), config, given, owns_process, load)
        return (yield from _to_the_end(partial(resume, request, processes), request, processes))


def _to_the_end(attempt: Callable[[], Steps], request: ResumeRequest, processes: Processes) -> Steps:
    """A run up to its result, which is shown.

    After a KL alarm it goes on from the newest checkpoint below the limit with twice the coefficient: the same step
    with the same recipe would run away again. Raises the alarm if that happened MAX_RETURNS times, or if there is no
    such checkpoint.
    """
    returns = 0
    while True:
        try:
            result = yield from attempt()
            break
        except KlAlarm as caught:
            if returns == MAX_RETURNS:
                raise
            alarm = caught
        returns += 1
        step, doubled = processes.broadcast_from_main(partial(go_below_limit, request.path, alarm))
        request.console.print(f"{alarm}. Going back to step {step} with algorithm.kl_coef={doubled:g}", highlight=False)
        changed = (f"algorithm.kl_coef={doubled!r}",)
        again = replace(request, overrides=changed, strict=False, allow_change=True, given=None)
        attempt = partial(resume, again, processes)
    if not result.is_interrupted and processes.is_main:
        report(result, console=request.console)
    return result


def _start(config: Config, recipe: str, request: ResumeRequest, processes: Processes) -> Steps:
    """All of a new run up to the measurement of its model."""
    console, given = request.console, request.objects
    given.check_place(config.model, needs_files=bool(config.rollouts.own_servers or config.rollouts.vllm_servers))
    settled, placement = processes.broadcast_from_main(lambda: extension("servers of a machine")(config))
    config = config.model_copy(update={"rollouts": settled.rollouts})  # the rest is compared later
    if placement is not None:
        console.print(placement, markup=False, highlight=False, soft_wrap=True)
    for line in describe_rewards(config.rewards, is_default=config.has_default_reward):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for finding in check_algorithm(config):
        console.print(f"[yellow]warning[/yellow]: {finding.what}. {finding.why} {finding.do}", highlight=False)
    for name, unseen in given.unseen.items():
        console.print(
            f"{name}: a resumed run will not notice a change of {'; '.join(unseen)}", markup=False, highlight=False
        )
    interruption = Interruption(
        grace_seconds=config.run.grace_seconds, is_alone=processes.count == 1, owns_process=request.owns_process
    )
    try:
        with interruption.listen():
            interruption.join(processes)
            with interruption.interruptible():
                parts = request.load(config, processes, interruption, given)
                facts = identity(parts)
            if not console.is_jupyter:
                console.print(arithmetic(config, parts.prompts), markup=False, highlight=False)
            with processes.on_main(lambda: RunFolder(request.path)) or NullRunFolder(request.path) as folder:
                started = describe_run(prompts=count_prompts(parts.prompts), processes=processes.count)
                folder.write_start(recipe, config.model_dump(mode="json"), started)
                return (yield from Session(parts, folder, facts, interruption, console).steps())
    except Interrupted:
        said = "stopped before the first step; there is nothing to resume"
        raise Stopped(said, exit_code=interruption.exit_code) from None


@contextmanager
def _joined(path: Path, overrides: Sequence[str]) -> Iterator[Processes]:
    """The processes that were started to go on with a run, with the limits in its recipe."""
    if read_place().count == 1:
        yield ALONE
        return
    try:
        text = (path / "config.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path / 'config.yaml'}: cannot be read ({error}). Several processes need it, on storage that all of "
            f"them see; the manifest of a checkpoint holds it as well"
        ) from None
    with joined(read_run_config(text, overrides, source=str(path / "config.yaml"))) as processes:
        yield processes


@contextmanager
def joined(config: Config) -> Iterator[Processes]:
    """The processes of the run; they take leave of each other at its end."""
    processes = make_processes(config.policy)
    try:
        with processes.watched():
            yield processes
    finally:
        processes.close()


def audible(console: Console, processes: Processes) -> Console:
    """The console of process 0; the others speak to nobody."""
    return console if processes.is_main else Console(file=io.StringIO(), quiet=True)
