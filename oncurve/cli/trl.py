"""Command `trl`: a script for TRL as it is."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from oncurve.cli.arguments import ScriptArgument
from oncurve.observe.terminal import quiet_libraries

AsIs = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Everything behind the script is the script's."""


def trl(
    script: ScriptArgument,
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
        from oncurve.cli.launch import supervise  # lazy

        words = ["trl", *(word for name in accept or () for word in ("--accept", name))]
        words += ["--trl-version", trl_version] if trl_version else []
        raise typer.Exit(supervise([*words, str(script), *(arguments or ())], [], processes, 0))

    quiet_libraries()
    from oncurve.extensions import extension  # lazy

    extension("trl")(script, arguments or (), accept=accept or (), version=trl_version)
