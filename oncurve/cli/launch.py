"""Starting a run in several processes, on this machine or through SLURM."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def launch(
    recipe: Annotated[str, typer.Argument(help="A recipe file, its folder, or the name of a recipe in the package.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings, such as run.steps=50.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes for training.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=0, help="GPUs (and processes) per node; 0 for one CPU process.")
    ] = 8,
    rollout_nodes: Annotated[int, typer.Option(min=0, help="Nodes used only for rollouts.")] = 0,
    time: Annotated[str, typer.Option(help="Time limit of the job, in SLURM notation.")] = "24:00:00",
    grace: Annotated[
        int, typer.Option(help="Seconds before the time limit at which the run saves a checkpoint.")
    ] = 300,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Additional sbatch option, such as --partition=gpu; repeat for several.")
    ] = None,
    cpus_per_task: Annotated[
        int, typer.Option(min=0, help="Cores of each process; 0 asks for whole nodes (--exclusive).")
    ] = 0,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit through SLURM (the only scheduler supported).")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script without submitting it.")] = False,
) -> None:
    """Submit a run as a batch job. The job checkpoints on preemption and requeues itself.

    Example: `oncurve launch gsm8k run.name=first --slurm --nodes 2 --rollout-nodes 1 --dry-run`
    """
    from oncurve.core.errors import ConfigError  # lazy
    from oncurve.extensions import extension  # lazy
    from oncurve.recipe.files import find_recipe  # lazy

    if not slurm:
        raise ConfigError(
            "launch: add --slurm, the only scheduler supported. Without one, use `oncurve train --processes`"
        )
    allocation = (nodes, gpus_per_node, rollout_nodes, time, grace, tuple(sbatch or ()), cpus_per_task)
    sys.stdout.write(extension("slurm")(find_recipe(recipe), overrides or (), *allocation, dry_run=dry_run))


def supervise(
    first: list[str], again: list[str], processes: int | None, restarts: int, grace_seconds: float = 25.0
) -> int:
    """Run a command in processes that are watched, and started again where that may help; the exit code."""
    from oncurve.extensions import extension  # lazy

    return extension("processes")(
        first,
        again,
        processes=processes or 1,
        restarts=restarts,
        grace_seconds=grace_seconds,
        notify=lambda text: typer.echo(f"oncurve: {text}", err=True),
    )
