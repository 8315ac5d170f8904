"""Command `trl`: a script for TRL as it is, or the recipe that it asks for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from oncurve.core.errors import ConfigError
from oncurve.observe.terminal import quiet_libraries

AsIs = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Everything behind the script is the script's."""


def trl(
    script: Annotated[Path, typer.Argument(help="A script that uses GRPOTrainer, or a YAML or JSON of options.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Write the recipe that the script asks for to this file, and do not train; - prints it."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --recipe: replace files that exist.")] = False,
    accept: Annotated[
        list[str] | None, typer.Option(help="An option that may be lost although that changes what is learned.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="A key of the recipe besides the script's options: run.refill_rounds=3."),
    ] = None,
    trl_version: Annotated[
        str | None, typer.Option(help="The version of TRL that it was written for, whose defaults it gets.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine, as for `accelerate launch --num_processes`.")
    ] = None,
) -> None:
    """Run a script for TRL's GRPOTrainer with oncurve in the place of TRL, which need not be installed.

    With --recipe the script is run up to its training and becomes a recipe with its rows beside it. Every option is
    taken over, or named; exit code 1 if something is lost or has to be filled in.

    Examples: `oncurve trl train_grpo.py --learning_rate 2e-6`,
    `oncurve trl --recipe recipe.yaml --processes 8 train_grpo.py --learning_rate 2e-6`
    """
    from oncurve.extensions import extension  # lazy

    if recipe is not None:
        output = None if str(recipe) == "-" else recipe
        text, is_whole = extension("trl recipe")(
            script,
            arguments or (),
            output,
            processes=processes or 1,
            overwrite=overwrite,
            accept=accept or (),
            overrides=overrides or (),
            version=trl_version,
        )
        sys.stdout.write(text if output is None else text + "\n")
        if not is_whole:
            raise typer.Exit(1)
        return
    if overwrite:
        raise ConfigError("--overwrite is for --recipe FILE, which was not given. Leave it out")
    if processes and "WORLD_SIZE" not in os.environ:
        from oncurve.cli.launch import supervise  # lazy

        command = ["trl", *(word for name in accept or () for word in ("--accept", name))]
        command += [word for override in overrides or () for word in ("--set", override)]
        command += ["--trl-version", trl_version] if trl_version else []
        raise typer.Exit(supervise([*command, str(script), *(arguments or ())], [], processes, 0))
    quiet_libraries()
    extension("trl")(script, arguments or (), accept=accept or (), overrides=overrides or (), version=trl_version)
