"""Command `coldstart`: a base model from random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oncurve.cli.arguments import Overrides
from oncurve.cli.train import train
from oncurve.errors import ConfigError
from oncurve.observe.terminal import quiet_libraries

BASES = {
    "word_problems": "word_problems/base",
    "programs": "programs/base",
    "calculator": "calculator/base",
    "calculator_chains": "calculator/chained_base",
}
"""The recipe of each task's base."""


UNTRAINED = "untrained"
"""Folder of the random weights, in that of the run."""


def prepare_base(output: Path, *, task: str, seed: int) -> tuple[str, list[str]]:
    """Write the random weights; the recipe that trains them, and what it is told.

    Raises ConfigError for a task without a recipe, and for a folder that holds a run already.
    """
    from oncurve.coldstart.untrained import write_untrained  # lazy
    from oncurve.observe.record import refuse_existing  # lazy
    from oncurve.recipe.find import find_recipe  # lazy
    from oncurve.recipe.load import read_tree  # lazy

    if task not in BASES and not (Path(task) / "base.yaml").is_file():
        raise ConfigError(
            f"--task {task}: there is no such task. Use one of {', '.join(BASES)}, or the folder of a recipe with a "
            f"base.yaml"
        )
    refuse_existing(output)
    recipe = BASES.get(task, f"{task}/base")
    start = write_untrained(output / UNTRAINED, read_tree(find_recipe(recipe))["data"]["task"], seed=seed)
    return recipe, [f"model={start}", f"run.folder={output.parent}", f"run.name={output.name}", f"run.seed={seed}"]


def coldstart(
    output: Annotated[Path, typer.Option(help="Folder for the new run, which is a model too.")],
    task: Annotated[
        str, typer.Option(help="word_problems, programs, calculator, calculator_chains, or the folder of a recipe.")
    ] = "word_problems",
    seed: Annotated[int, typer.Option(help="Random seed for the weights.")] = 0,
    overrides: Overrides = None,
) -> None:
    """Train a small base model from random weights on imperfect worked solutions, by the recipe TASK/base.

    Example: `oncurve coldstart --task word_problems --output runs/base`
    """
    quiet_libraries()
    recipe, given = prepare_base(output, task=task, seed=seed)
    train(recipe, [*given, *(overrides or ())])
