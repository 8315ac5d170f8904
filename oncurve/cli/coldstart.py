"""Command `coldstart`: a base model from random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from oncurve.cli.arguments import Overrides
from oncurve.cli.train import train
from oncurve.core.errors import ConfigError
from oncurve.observe.terminal import quiet_libraries
from oncurve.wording import did_you_mean

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
    from oncurve.recipe.files import find_recipe  # lazy
    from oncurve.recipe.load import read_tree  # lazy

    if task not in BASES and not (Path(task) / "base.yaml").is_file():
        raise ConfigError(
            f"--task {task}: there is no such task. {did_you_mean(task, BASES)}Use one of {', '.join(BASES)}, "
            f"or the folder of a recipe with a base.yaml"
        )
    refuse_existing(output, chosen_by="--output")
    recipe = BASES.get(task, f"{task}/base")
    start = write_untrained(output / UNTRAINED, read_tree(find_recipe(recipe))["data"]["task"], seed=seed)
    return recipe, [f"model={start}", f"run.folder={output.parent}", f"run.name={output.name}", f"run.seed={seed}"]


def prepare_own(
    output: Path, data: Path, *, size: str, like: str | None, layers: int | None, seed: int, overrides: Sequence[str]
) -> tuple[str, list[str]]:
    """The same for demonstrations in a file; the recipe is written beside the random weights."""
    from oncurve.coldstart.from_data import write_from_data  # lazy
    from oncurve.observe.record import refuse_existing  # lazy

    refuse_existing(output, chosen_by="--output")
    start = output / UNTRAINED
    text = write_from_data(start, data, size=size, like=like, layers=layers, seed=seed, overrides=overrides)
    recipe = output / "coldstart.yaml"
    recipe.write_text(text, encoding="utf-8")
    settings = [f"model={start}", f"run.folder={output.parent}", f"run.name={output.name}", f"run.seed={seed}"]
    return str(recipe), settings


def coldstart(
    output: Annotated[Path, typer.Option(help="Folder for the new run, which is a model too.")],
    task: Annotated[
        str | None,
        typer.Option(help="word_problems, programs, calculator, calculator_chains, or the folder of a recipe."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Demonstrations of your own instead of a task's.")] = None,
    size: Annotated[
        str | None,
        typer.Option(help="With --data: nano, tiny (the default) or small, a Qwen2 model and a tokenizer of its own."),
    ] = None,
    like: Annotated[
        str | None, typer.Option(help="With --data: the architecture and tokenizer of this model, with random weights.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="With --like: so many layers.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed for the weights.")] = 0,
    overrides: Overrides = None,
) -> None:
    """Train a small base model from random weights on demonstrations: those of a task, or your own.

    Rows of --data are those of `oncurve sft`, such as {prompt, completion}.

    Example: `oncurve coldstart --data demonstrations.jsonl --size tiny --output runs/base`
    """
    quiet_libraries()
    if data is None:
        if size or like or layers:
            raise ConfigError("--size, --like and --layers are for demonstrations of your own: give --data FILE")
        if task is None:
            raise ConfigError(
                f"give demonstrations of your own with --data FILE, or a task of the package with --task: one of "
                f"{', '.join(BASES)}, or the folder of a recipe"
            )
        recipe, settings = prepare_base(output, task=task, seed=seed)
    else:
        if task or (size and like):
            raise ConfigError(
                "--task and --data exclude each other: a task brings its own demonstrations"
                if task
                else "--size and --like exclude each other: --like MODEL --layers N has the widths of that model"
            )
        recipe, settings = prepare_own(
            output, data, size=size or "tiny", like=like, layers=layers, seed=seed, overrides=overrides or ()
        )
    train(recipe, [*settings, *(overrides or ())])
