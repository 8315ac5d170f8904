"""Command `evaluate`: a model on benchmarks, or on the test problems of a run or recipe."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from oncurve.cli.arguments import Overrides
from oncurve.core.errors import ConfigError
from oncurve.observe.terminal import console, loading_libraries, quiet_libraries


def evaluate(
    target: Annotated[str, typer.Argument(help="A run or a recipe; with --benchmark a run or a model.")],
    overrides: Overrides = None,
    benchmark: Annotated[
        str | None, typer.Option(help="Comma-separated benchmarks, such as gsm8k,math500, or a YAML file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With a recipe: the model to evaluate, if not its own.")] = None,
    against: Annotated[str | None, typer.Option(help="A second model, which the first is compared with.")] = None,
    output: Annotated[Path | None, typer.Option(help="Output folder. An unfinished evaluation is resumed.")] = None,
) -> None:
    """Evaluate a model on benchmarks or on the test problems of a run or recipe, and compare two.

    Example: `oncurve evaluate runs/demo --benchmark gsm8k,math500 evaluation.samples=8 evaluation.temperature=0.6`
    """
    from oncurve.observe.run_model import is_run, locate_model, resolve_model  # lazy
    from oncurve.recipe.files import find_recipe  # lazy
    from oncurve.recipe.load import (  # lazy
        load_config,
        read_run_config,  # lazy
        read_text,
    )

    if benchmark is not None:
        if model is not None:
            raise ConfigError("--model: with --benchmark, give the model as the first argument")
        model, config = resolve_model(target), None
    elif is_run(target):
        model = model or resolve_model(target)
        recorded = Path(target).expanduser() / "config.yaml"
        config = read_run_config(read_text(recorded), overrides or (), source=str(recorded))
    else:
        if target == "embedded" or os.path.isfile(Path(resolve_model(target)).expanduser() / "config.json"):
            raise ConfigError(
                f"{target}: is a model, and nothing says on what to evaluate it. Add --benchmark, such as --benchmark "
                f"gsm8k, or name a run or recipe first and then --model {target}"
            )
        try:
            recipe = find_recipe(target)
        except ConfigError as error:
            raise ConfigError(f"{target}: no run, and {str(error).partition(': ')[2]}") from None
        config = load_config(recipe, overrides or ())
        model = model or config.model
    quiet_libraries()
    with loading_libraries():
        from oncurve.run.measuring import evaluate_models, evaluate_on_benchmark, short_name  # lazy

    models = [model, *([resolve_model(against)] if against else [])]
    for name in models:
        locate_model(name)
    named = "-vs-".join(short_name(name) for name in models)
    folder = output or Path("evaluations") / f"{named}-{time.strftime('%Y%m%d-%H%M%S')}"
    if config is not None:
        evaluate_models(config, models, folder, console=console())
        return
    chosen = [name.strip() for name in str(benchmark).split(",") if name.strip()]
    for name in chosen:
        target_folder = folder / Path(name).stem if len(chosen) > 1 else folder
        evaluate_on_benchmark(name, models, overrides or (), target_folder, console=console())
