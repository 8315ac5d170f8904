"""Command `compare`: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oncurve.cli.report import Output, Price
from oncurve.observe.terminal import console
from oncurve.run_errors import CheckpointError


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of two or more runs; the first is the baseline.")],
    output: Output = None,
    usd_per_hour: Price = None,
) -> None:
    """Compare runs side by side, with intervals, and show how their recipes differ; --output writes a page with curves.

    Runs that differ in `run.seed` alone are one recipe: its mean over seeds, and its difference from the first recipe,
    paired by seed, come first.

    Example: `oncurve compare runs/a runs/b --output compare.html`
    """
    from oncurve.report.comparing import (  # lazy
        compare_runs,  # lazy
        comparison_tables,
        write_comparison,
    )
    from oncurve.report.seeds import compare_seeds, recipes_block, seeds_table  # lazy

    if output is not None and output.suffix != ".html":
        output = output / "compared.html" if output.is_dir() else output.with_name(f"{output.name}.html")
    compared = compare_runs(runs, usd_per_hour=usd_per_hour)
    out = console()
    if (seeds := compare_seeds(compared)) is not None:
        out.print(*seeds_table(seeds, out.width))
        for sentence in seeds.sentences():
            out.print(sentence, markup=False, highlight=False)
    for table in comparison_tables(compared, out.width):
        out.print(table)
    if not compared.differences:
        out.print("The recipes are the same.")
    for note in compared.notes:
        out.print(note, style="dim", markup=False, highlight=False)
    if output is not None:
        try:
            page = write_comparison(compared, output, recipes=recipes_block(compared))
            out.print(f"page: {page}", markup=False, highlight=False)
        except OSError as error:
            raise CheckpointError(f"{output}: the page cannot be written ({error}). Name another place.") from error
