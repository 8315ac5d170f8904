"""Commands `train`, `sft`, `resume` and `demo`: beginning a run, and continuing one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oncurve.cli.arguments import Overrides, RecipeArgument
from oncurve.core.errors import ConfigError
from oncurve.observe.terminal import console, loading_libraries, quiet_libraries
from oncurve.run_errors import Stopped

if TYPE_CHECKING:
    from oncurve.recipe.schema import Config

Processes = Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU.")]


Restarts = Annotated[int, typer.Option(min=0, help="Maximum automatic restarts after a process dies.")]


Seeds = Annotated[
    str | None, typer.Option(help="Seeds such as 0,1,2: a run with each, one after the other or one per GPU, compared.")
]


GoOn = Annotated[bool, typer.Option("--resume", help="Resume the run with this name if it exists.")]


def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    processes: Processes = None,
    restarts: Restarts = 0,
    go_on: GoOn = False,
    seeds: Seeds = None,
) -> None:
    """Train a model from a recipe, evaluating it before and after.

    Example: `oncurve train word_problems run.steps=20 run.seed=1`
    """
    from oncurve.recipe.files import find_recipe  # lazy
    from oncurve.recipe.load import (  # lazy
        load_config,
        read_text,
        run_folder_path,  # lazy
    )
    from oncurve.recipe.preflight import check_cheaply  # lazy
    from oncurve.run.checkpoint_manifest import clear_unbegun, progress_of  # lazy

    path = find_recipe(recipe)
    config = load_config(path, overrides or ())
    folder = run_folder_path(config)
    if seeds is not None:
        if processes or restarts:
            raise ConfigError("--seeds starts a process for each seed; leave --processes and --restarts out")
        from oncurve.cli.seeds import parse_seeds, train_seeds  # lazy

        return train_seeds(recipe, overrides or (), parse_seeds(seeds), folder, is_resumed=go_on)
    if (processes or restarts) and "WORLD_SIZE" not in os.environ:
        from oncurve.cli.launch import supervise  # lazy

        arguments = ["train", recipe, *(overrides or ()), f"run.name={folder.name}"]
        first = [*arguments, "--resume"] if go_on else arguments
        raise typer.Exit(supervise(first, [*arguments, "--resume"], processes, restarts, config.run.grace_seconds))
    progress = progress_of(folder) if go_on else "absent"
    check_cheaply(config, new_folder=folder if progress == "absent" else None)
    if progress == "finished":
        _refuse_more(folder, config)
        console().print(f"run finished: {folder}", highlight=False)
        return
    quiet_libraries()
    if progress == "begun":
        with loading_libraries():
            from oncurve.run.training import resume_run  # lazy

        result = resume_run(folder, new_config=config, console=console())
    else:
        try:
            with loading_libraries():
                from oncurve.run.training import run_recipe  # lazy
        except KeyboardInterrupt:
            raise Stopped("stopped before the first step; there is nothing to resume", exit_code=130) from None

        if progress == "unbegun":
            clear_unbegun(folder)
        result = run_recipe(config, read_text(path), console=console())
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _refuse_more(folder: Path, config: Config) -> None:
    """Raises ConfigError where a finished run is asked for with another recipe than it had."""
    from oncurve.recipe.load import read_run_config  # lazy
    from oncurve.run.builder import settle  # lazy
    from oncurve.run.identity import recorded  # lazy
    from oncurve.run.rendered import with_epochs  # lazy
    from oncurve.run.resume import config_differences, finished  # lazy

    path = folder / "config.yaml"
    was = read_run_config(path.read_text(encoding="utf-8"), (), source=str(path))
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": folder.name})})
    config = settle(with_epochs(config))[0]  # what the recipe leaves open, as in the run
    if changed := config_differences(recorded(was), config):
        lines = "\n  ".join(changed)
        raise ConfigError(
            f"{finished(folder, was.run.steps, requested_steps=config.run.steps)}\n"
            f"Nothing was trained; asked for was:\n  {lines}"
        )


def sft(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    processes: Processes = None,
    restarts: Restarts = 0,
    go_on: GoOn = False,
) -> None:
    """Train on completions in the data before GRPO: the supervised stage of the recipe.

    Rows are {prompt, completion}, {messages}, {text}, or {question, solution, answer} in the recipe's template.

    Example: `oncurve sft word_problems sft.epochs=1 optimizer.learning_rate=1e-4`
    """
    from oncurve.recipe.files import find_recipe  # lazy
    from oncurve.recipe.load import read_tree  # lazy

    settings = list(overrides or ())
    if not any(setting.startswith(("sft.", "sft=")) for setting in settings) and not read_tree(find_recipe(recipe)).get(
        "sft"
    ):
        settings.append("sft={}")
    train(recipe, settings, processes, restarts, go_on)


def resume(
    run: Annotated[Path, typer.Argument(help="Folder of an interrupted run.")],
    overrides: Overrides = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if the newest checkpoint is damaged.")] = False,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Allow changes to the recipe, the data or the number of processes.")
    ] = False,
    processes: Processes = None,
    restarts: Restarts = 0,
) -> None:
    """Resume a run from its newest valid checkpoint. The result is the same as without the interruption.

    Example: `oncurve resume runs/demo`
    """
    if (processes or restarts) and "WORLD_SIZE" not in os.environ:
        from oncurve.cli.launch import supervise  # lazy

        again = ["resume", str(run)]
        flags = [flag for flag, is_set in (("--strict", strict), ("--allow-change", allow_change)) if is_set]
        raise typer.Exit(supervise([*again, *(overrides or ()), *flags], again, processes, restarts))
    quiet_libraries()
    with loading_libraries():
        from oncurve.run.training import resume_run  # lazy

    result = resume_run(run, overrides or (), strict=strict, allow_change=allow_change, console=console())
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def demo(overrides: Overrides = None) -> None:
    """Train the built-in model on word problems: a few minutes on a CPU, no network needed.

    Example: `oncurve demo run.seed=1`
    """
    train("word_problems", overrides)
