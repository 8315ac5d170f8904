"""Command `check`: data and rewards before training."""

from __future__ import annotations

from typing import Annotated

import typer

from oncurve.cli.arguments import Overrides, RecipeArgument
from oncurve.observe.terminal import console, loading_libraries, quiet_libraries

Groups = Annotated[
    int,
    typer.Option("--sample", min=0, help="Also sample this many groups from the model: how many carry a signal?"),
]


def check(recipe: RecipeArgument, overrides: Overrides = None, sample: Groups = 0) -> None:
    """Validate data and rewards before training.

    Reference answers must earn full reward, made-up completions must not, and prompts must not leak the solution. With
    --sample, the untrained model answers some training prompts, which shows whether GRPO can learn from them.

    Example: `oncurve check word_problems data.limit=200 --sample 16`
    """
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
