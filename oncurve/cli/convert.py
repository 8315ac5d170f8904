"""Command `convert`: a recipe from a script for TRL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from oncurve.cli.arguments import ScriptArgument


def convert(
    script: ScriptArgument,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own, behind --.")] = None,
    output: Annotated[Path, typer.Option(help="The recipe; - prints it.")] = Path("recipe.yaml"),
    processes: Annotated[int, typer.Option(min=1, help="Processes that TRL would run, as for --num_processes.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
) -> None:
    """Turn a script for TRL's GRPOTrainer into a recipe: it is run up to its training. A file of options is
    one for TRL's own command.

    Every option is taken over, or named; exit code 1 if something is lost or has to be filled in.

    Example: `oncurve convert train_grpo.py --processes 8 --output recipe.yaml -- --learning_rate 2e-6`
    """
    place = None if str(output) == "-" else output
    from oncurve.extensions import extension  # lazy

    text, is_whole = extension("convert")(script, arguments or (), place, processes=processes, overwrite=overwrite)
    sys.stdout.write(text if place is None else text + "\n")
    if not is_whole:
        raise typer.Exit(1)
