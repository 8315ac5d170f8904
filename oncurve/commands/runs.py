"""`oncurve report`, `compare` and `dashboard`; what they need is imported when they run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from oncurve.errors import CheckpointError
from oncurve.observe.terminal import console

TOKEN = "ONCURVE_DASHBOARD_TOKEN"
"""The environment variable with the token of a dashboard that others can reach."""

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
    from oncurve.doctor.read import read_config  # lazy
    from oncurve.observe.record import read_manifest, read_metrics  # lazy
    from oncurve.observe.summary import summarize  # lazy
    from oncurve.report.lineage import stage_lines, stages  # lazy
    from oncurve.report.overview import json_if_there  # lazy
    from oncurve.report.write import write_report  # lazy

    out = console()
    if output is not None and output.is_dir():
        output /= "report.html"
    try:
        written = write_report(run, output, usd_per_hour=usd_per_hour)
    except OSError as error:
        raise CheckpointError(
            f"{output or run}: the page cannot be written ({error}). Name a place with --output."
        ) from error
    metrics = read_metrics(run)
    if metrics:
        manifest = read_manifest(run) if (run / "manifest.json").is_file() else None
        text = summarize(metrics, manifest=manifest, comparison=json_if_there(run / "comparison.json"), title=str(run))
        out.print(text, markup=False, highlight=False)
        if lines := stage_lines(stages(run, read_config(run))):
            out.print("\n".join([*lines, ""]), markup=False, highlight=False)
    left = written.recorded_steps - written.shown_steps
    more = f"; completions of {left} of {written.recorded_steps} steps did not fit" if left else ""
    out.print(f"report: {written.path} ({written.num_bytes / 2**20:.1f} MiB{more})", markup=False, highlight=False)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of two or more runs; the first is the baseline.")],
    output: Output = None,
    usd_per_hour: Price = None,
) -> None:
    """Compare runs side by side, with intervals, and show how their recipes differ; --output writes a page with curves.

    Example: `oncurve compare runs/a runs/b --output compare.html`
    """
    from oncurve.report.comparing import (  # lazy
        compare_runs,  # lazy
        comparison_tables,
        write_comparison,
    )

    compared = compare_runs(runs, usd_per_hour=usd_per_hour)
    out = console()
    for table in comparison_tables(compared):
        out.print(table)
    if not compared.differences:
        out.print("The recipes are the same.")
    for note in compared.notes:
        out.print(note, style="dim", markup=False, highlight=False)
    if output is not None:
        try:
            out.print(f"page: {write_comparison(compared, output)}", markup=False, highlight=False)
        except OSError as error:
            raise CheckpointError(f"{output}: the page cannot be written ({error}). Name another place.") from error


def dashboard(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders, or folders that contain runs.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anything but localhost needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port (default: the first free one from 8420).")
    ] = None,
    usd_per_hour: Price = None,
) -> None:
    """Watch runs live in a browser. The dashboard only reads the run folders.

    Where others can reach it, a token guards it: that of ONCURVE_DASHBOARD_TOKEN, or a new one.

    Example: `oncurve dashboard runs`
    """
    from oncurve.report.dashboard import serve  # lazy

    serve(
        runs or [Path("runs")],
        host=host,
        port=port,
        token=os.environ.get(TOKEN) or None,
        usd_per_hour=usd_per_hour,
        notify=lambda text: typer.echo(text, err=False),
    )
