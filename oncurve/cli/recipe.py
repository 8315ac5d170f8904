"""The command `oncurve recipe`: list, show and copy the recipes in the package, and write their schema."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from oncurve.cli.arguments import Overrides, RecipeArgument, RecipeCommand
from oncurve.observe.terminal import console

recipes = typer.Typer(name="recipe", help="List, show and copy the recipes in this package.")


@recipes.command("list")
def list_recipes() -> None:
    """List the recipes in the package; variants are shown as NAME/VARIANT.

    Example: `oncurve recipe list`
    """
    from oncurve.recipe.files import described_recipes  # lazy

    described = described_recipes()
    width = max(len(name) for name, _ in described) + 2
    for name, purpose in described:
        console().print(f"{name:{width}}{purpose}", markup=False, highlight=False, soft_wrap=True)


@recipes.command("show", cls=RecipeCommand)
def show_recipe(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Show every value that a recipe resolves to, defaults and those of its algorithm included.

    Example: `oncurve recipe show word_problems run.steps=5`
    """
    from oncurve.recipe.files import find_recipe  # lazy
    from oncurve.recipe.load import config_yaml, load_config  # lazy

    config = load_config(find_recipe(recipe), overrides or ())
    sys.stdout.write(
        f"# Every value of {recipe}. null: not used, or chosen when the run starts.\n"
        f"# The keys of `algorithm` are those of {config.algorithm.type}: delete them before you choose another type.\n"
    )
    sys.stdout.write(config_yaml(config))


@recipes.command("copy")
def copy(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe in the package.")],
    folder: Annotated[Path | None, typer.Argument(help="New folder (default: the name of the recipe).")] = None,
) -> None:
    """Copy a recipe with all its files here, to edit it.

    Example: `oncurve recipe copy custom_reward mine`
    """
    from oncurve.recipe.files import copy_recipe  # lazy

    made = copy_recipe(recipe, folder)
    console().print(f"{made}: edit it, then `oncurve train {made}`", markup=False, highlight=False, soft_wrap=True)


@recipes.command("schema")
def schema() -> None:
    """Print the JSON Schema of a recipe, for completion in editors.

    Example: `oncurve recipe schema > recipe.schema.json`
    """
    import json

    from oncurve.recipe.schema import Config  # lazy

    sys.stdout.write(json.dumps(Config.model_json_schema(), indent=2) + "\n")
