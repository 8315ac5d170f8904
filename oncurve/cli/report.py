"""Command `report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oncurve.observe.terminal import console
from oncurve.run_errors import CheckpointError

Price = Annotated[
    float | None,
    typer.Option(min=0.0, help="Price of all devices of the run in USD per hour (default: from the planner's table)."),
]


Output = Annotated[Path | None, typer.Option(help="Path of the HTML page.")]


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")],
    output: Output = None,
    usd_per_hour: Price = None,
) -> None:
    """Write a run as one self-contained HTML page and print its summary. Works during the run, too.

    Example: `oncurve report runs/demo`
    """
    from oncurve.observe.record import json_if_there  # lazy
    from oncurve.observe.summary import summarize  # lazy
    from oncurve.report.overview import stage_lines  # lazy
    from oncurve.report.write import read_run, write_report  # lazy

    out = console()
    if output is not None and output.is_dir():
        output /= "report.html"
    read = read_run(run, usd_per_hour=usd_per_hour)
    try:
        written = write_report(run, output, read=read)
    except OSError as error:
        raise CheckpointError(
            f"{output or run}: the page cannot be written ({error}). Name a place with --output."
        ) from error
    if read.columns.steps:
        manifest, comparison = (json_if_there(run / f"{name}.json") for name in ("manifest", "comparison"))
        text = summarize(
            read.columns, manifest=manifest, comparison=comparison, title=str(run), mfu=read.facts["spent"]["mfu"]
        )
        out.print(text, markup=False, highlight=False)
        if lines := stage_lines(read.facts["stages"]):
            out.print("\n".join([*lines, ""]), markup=False, highlight=False)
    left = written.recorded_steps - written.steps_in_page
    more = f"; completions of {left} of {written.recorded_steps} steps did not fit" if left else ""
    out.print(f"report: {written.path} ({written.num_bytes / 2**20:.1f} MiB{more})", markup=False, highlight=False)
