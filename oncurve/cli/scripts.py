"""The commands for those who come from TRL: a script as it is, and its recipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

AsIs = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Everything behind the script is the script's."""


def trl(
    script: Annotated[Path, typer.Argument(help="A script that uses GRPOTrainer, or a YAML or JSON of options.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    accept: Annotated[
        list[str] | None, typer.Option(help="An option that may be lost although that changes what is learned.")
    ] = None,
    trl_version: Annotated[
        str | None, typer.Option(help="The version of TRL that it was written for, whose defaults it gets.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine, as for `accelerate launch --num_processes`.")
    ] = None,
) -> None:
    """Run a script for TRL's GRPOTrainer with oncurve in the place of TRL, which need not be installed.

    Example: `oncurve trl train_grpo.py --learning_rate 2e-6`
    """
    if processes and "WORLD_SIZE" not in os.environ:
        from oncurve.commands.launch import supervise  # lazy

        words = ["trl", *(word for name in accept or () for word in ("--accept", name))]
        words += ["--trl-version", trl_version] if trl_version else []
        raise typer.Exit(supervise([*words, str(script), *(arguments or ())], [], processes, 0))
    from oncurve.observe.terminal import quiet_libraries  # lazy

    quiet_libraries()
    from oncurve.extensions import extension  # lazy

    extension("trl")(script, arguments or (), accept=accept or (), version=trl_version)


def convert(
    script: Annotated[Path, typer.Argument(help="A script that uses GRPOTrainer, or a YAML or JSON of options.")],
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
