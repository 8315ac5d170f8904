"""Command `check`: data and rewards before training."""

from __future__ import annotations

import typer

from oncurve.cli.arguments import Overrides, RecipeArgument
from oncurve.observe.terminal import console, quiet_libraries


def check(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Validate data and rewards before training.

    Reference answers must earn full reward, made-up completions must not, and prompts must not leak the solution.

    Example: `oncurve check word_problems data.limit=200`
    """
    from oncurve.recipe.find import find_recipe  # lazy
    from oncurve.recipe.load import load_config  # lazy
    from oncurve.recipe.preflight import check_cheaply  # lazy

    config = load_config(find_recipe(recipe), overrides or ())
    check_cheaply(config)
    quiet_libraries()
    from oncurve.run.examine import check_recipe  # lazy

    if not check_recipe(config, console=console()):
        raise typer.Exit(1)
