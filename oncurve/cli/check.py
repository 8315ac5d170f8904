"""Command `check`: data and rewards before training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oncurve.cli.arguments import Overrides
from oncurve.constants import MODEL_FILES
from oncurve.core.errors import ConfigError
from oncurve.observe.terminal import console, loading_libraries, quiet_libraries

Groups = Annotated[
    int,
    typer.Option("--sample", min=0, help="Also sample this many groups from the model: how many carry a signal?"),
]


WEIGHTS = (".safetensors", ".bin")
"""Ends of the names of files with weights."""
RecipeOrModel = Annotated[
    str, typer.Argument(help="A recipe file, its folder, a recipe of the package; or a model: its folder or GGUF file.")
]


def check(recipe: RecipeOrModel, overrides: Overrides = None, sample: Groups = 0) -> None:
    """Validate data and rewards before training, or the folder of a model.

    Reference answers must earn full reward, made-up completions must not, and prompts must not leak the solution. With
    --sample, the untrained model answers some training prompts, which shows whether GRPO can learn from them.

    Of a model's folder it shows what is in the files and whether the model uses all of it.

    Example: `oncurve check word_problems data.limit=200 --sample 16`
    """
    if _is_model(recipe):
        if overrides or sample:
            raise ConfigError(f"{recipe} is a model, which takes no settings. Name a recipe, with model={recipe}")
        quiet_libraries()
        from oncurve.run.examine import check_model  # lazy

        check_model(recipe, console=console())
        return
    from oncurve.recipe.files import find_recipe  # lazy
    from oncurve.recipe.load import load_config  # lazy
    from oncurve.recipe.preflight import check_cheaply  # lazy

    config = load_config(find_recipe(recipe), overrides or ())
    check_cheaply(config)
    quiet_libraries()
    with loading_libraries():
        from oncurve.run.examine import check_recipe  # lazy

    if not check_recipe(config, console=console()):
        raise typer.Exit(1)
    if sample:
        from oncurve.run.first_groups import sample_groups  # lazy

        if not sample_groups(config, sample, console=console()):
            raise typer.Exit(1)


def _is_model(name: str) -> bool:
    """The package's own model, or a folder that holds a model or an adapter and no recipe."""
    from oncurve.observe.run_model import is_run, locate  # lazy
    from oncurve.recipe.files import MAIN  # lazy

    if name == "embedded" or is_run(name):
        return True
    if (Path(name).expanduser() / MAIN).is_file() or not (folder := Path(locate(name))).is_dir():
        return False
    return any(file.name in MODEL_FILES or file.suffix in WEIGHTS for file in folder.iterdir())
