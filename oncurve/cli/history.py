"""Commands `replay` and `regrade`: a run of the past, done again and graded again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from oncurve.cli.launch import supervise
from oncurve.core.errors import ConfigError
from oncurve.observe.terminal import console, counting, quiet_libraries
from oncurve.run_errors import CheckpointError

RunArgument = Annotated[Path, typer.Argument(help="Folder of a run.")]
JsonOutput = Annotated[Path | None, typer.Option("--json", help="Write everything as JSON to this file.")]
PageOutput = Annotated[Path | None, typer.Option("--output", help="Write a page of HTML to this file.")]


def replay(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings under which to see the same completions: key=value.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step to do again; the first is 1.")] = None,
    reward: Annotated[str | None, typer.Option(help="Another reward: file.py:name, a type, or a recipe.")] = None,
    recorded: Annotated[bool, typer.Option("--recorded", help="Take the recorded completions; train only.")] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine; as many as the run had, if not said.")
    ] = None,
    output: PageOutput = None,
    json_output: JsonOutput = None,
) -> None:
    """Do a step of a past run again, compare it with the record, and lay it open: groups, tokens, gradient.

    With key=value or --reward, it also shows what the same completions teach under that setting. The run is not
    changed. It begins at the newest checkpoint before the step (`run.keep_every_steps`), else at the run's start. Of a
    run with `run.record=all` the completions are compared too, else the metrics.

    Example: `oncurve replay runs/first --step 12 algorithm.type=dapo`
    """
    quiet_libraries()
    from oncurve.history.past import PastRun  # lazy

    if step is None:
        raise ConfigError(f"which step? Name one that was done: --step {PastRun(run).metrics[-1]['step']}")

    if "WORLD_SIZE" not in os.environ and (count := processes or PastRun(run).num_processes) > 1:
        arguments = ["replay", str(run), *(overrides or ()), "--step", str(step), *(["--recorded"] if recorded else ())]
        for name, value in (("reward", reward), ("output", output), ("json", json_output)):
            arguments += [] if value is None else [f"--{name}", str(value)]
        raise typer.Exit(supervise(arguments, [], count, 0))
    from oncurve.history.describe import replay_text  # lazy
    from oncurve.history.pages import replay_page  # lazy
    from oncurve.history.replay import replay as do_again  # lazy

    out = console()
    with counting(out, "doing steps again") as tell:
        replayed = do_again(run, step, changes=overrides or (), reward=reward, recorded=recorded, on_progress=tell)
    if replayed.is_main:
        out.print(replay_text(replayed))
        _write(output, replay_page(replayed) if output else "", json_output, replayed.summary())
    if not replayed.is_same:
        raise typer.Exit(1)


def regrade(
    run: RunArgument,
    other: Annotated[
        str | None,
        typer.Option("--with", help="file.py:name, a type, or a recipe; without it the run's own reward as it is now."),
    ] = None,
    first: Annotated[int | None, typer.Option(help="First step.")] = None,
    last: Annotated[int | None, typer.Option(help="Last step.")] = None,
    cosine: Annotated[
        bool, typer.Option("--cosine", help="Compare the gradients as well, at the checkpoints that are there.")
    ] = False,
    output: PageOutput = None,
    json_output: JsonOutput = None,
) -> None:
    """Grade the recorded completions of a run again: what another reward would have paid, and taught.

    It needs no weights and no GPU. Runs with `run.record=all` are graded whole, others where completions were written.

    Example: `oncurve regrade runs/first --with mine.py:strict --output regrade.html`
    """
    quiet_libraries()
    from oncurve.history.cosines import add_cosines  # lazy
    from oncurve.history.describe import regrade_text  # lazy
    from oncurve.history.pages import regrade_page  # lazy
    from oncurve.history.past import PastRun  # lazy
    from oncurve.history.regrade import regrade as grade_again  # lazy

    out, past = console(), PastRun(run)
    steps = None
    if first is not None or last is not None:
        steps = [number for number in past.steps if (first or 1) <= number <= (last or number)]
    with counting(out, "grading") as tell:
        regraded = grade_again(past, other, steps=steps, on_progress=tell)
        if cosine:
            add_cosines(regraded, past, other, on_progress=tell)
    out.print(regrade_text(regraded))
    _write(output, regrade_page(regraded) if output else "", json_output, regraded.summary())


def _write(page: Path | None, text: str, data: Path | None, summary: Mapping[str, Any]) -> None:
    from oncurve.observe.record import write_json, write_text  # lazy

    try:
        if page is not None:
            write_text(page, text)
            console().print(f"page: {page}", markup=False, highlight=False)
        if data is not None:
            write_json(data, summary)
            console().print(f"JSON: {data}", markup=False, highlight=False)
    except OSError as error:
        raise CheckpointError(f"the result cannot be written ({error}). Name another place.") from error
