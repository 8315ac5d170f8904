"""Commands for a finished model: evaluate, sample, merge, publish."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from oncurve.errors import ConfigError
from oncurve.observe.terminal import console, quiet_libraries

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value settings, such as evaluation.samples=8.")]


def evaluate(
    target: Annotated[str, typer.Argument(help="A run or a recipe; with --benchmark a run or a model.")],
    overrides: Overrides = None,
    benchmark: Annotated[
        str | None, typer.Option(help="Comma-separated benchmarks, such as gsm8k,math500, or a YAML file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With a recipe: the model to evaluate, if not its own.")] = None,
    against: Annotated[str | None, typer.Option(help="A second model to evaluate and compare with.")] = None,
    output: Annotated[Path | None, typer.Option(help="Output folder. An unfinished evaluation is resumed.")] = None,
) -> None:
    """Evaluate a model on benchmarks or on the test problems of a run or recipe, and compare two.

    Example: `oncurve evaluate runs/demo --benchmark gsm8k,math500 evaluation.samples=8 evaluation.temperature=0.6`
    """
    from oncurve.observe.run_model import check_place, is_run, resolve_model  # lazy
    from oncurve.recipe.find import find_recipe  # lazy
    from oncurve.recipe.load import load_config, read_text  # lazy
    from oncurve.recipe.run_folder import read_run_config  # lazy

    if benchmark is not None:
        if model is not None:
            raise ConfigError("--model: with --benchmark, give the model as the first argument")
        model, config = resolve_model(target), None
    elif is_run(target):
        model = model or resolve_model(target)
        recorded = Path(target).expanduser() / "config.yaml"
        config = read_run_config(read_text(recorded), overrides or (), source=str(recorded))
    else:
        config = load_config(find_recipe(target), overrides or ())
        model = model or config.model
    quiet_libraries()
    from oncurve.commands.evaluate_recipe import evaluate_models, evaluate_on_benchmark, short_name  # lazy

    models = [model, *([resolve_model(against)] if against else [])]
    for name in models:
        check_place(name)
    named = "-vs-".join(short_name(name) for name in models)
    folder = output or Path("evaluations") / f"{named}-{time.strftime('%Y%m%d-%H%M%S')}"
    if config is not None:
        evaluate_models(config, models, folder, console=console())
        return
    chosen = [name.strip() for name in str(benchmark).split(",") if name.strip()]
    for name in chosen:
        place = folder / Path(name).stem if len(chosen) > 1 else folder
        evaluate_on_benchmark(name, models, overrides or (), place, console=console())


def sample(
    model: Annotated[str, typer.Argument(help="A run, a model folder, a Hugging Face Hub name, or `embedded`.")],
    question: Annotated[list[str] | None, typer.Argument(help="Questions, asked for if omitted.")] = None,
    template: Annotated[str, typer.Option(help="Prompt template.")] = "think_answer",
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Completions per question.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum completion tokens.")] = 256,
) -> None:
    """Ask a model a question and print its completions.

    Example: `oncurve sample embedded "Tom has 12 apples and buys 7 more. How many apples does Tom have?"`
    """
    quiet_libraries()
    from oncurve.commands.examine import ask  # lazy

    ask(
        model, question or (), template=template, chat=chat, count=count,
        temperature=temperature, max_tokens=max_tokens, console=console(),
    )  # fmt: skip


def merge(
    adapter: Annotated[Path, typer.Argument(help="A run that trained a LoRA adapter, or an adapter folder.")],
    output: Annotated[Path, typer.Option(help="New folder for the merged model.")],
) -> None:
    """Merge a LoRA adapter into its base model.

    Example: `oncurve merge runs/demo/model --output runs/demo/merged`
    """
    quiet_libraries()
    from oncurve.run.publish import merge_with_card  # lazy

    console().print(f"merged: {merge_with_card(adapter, output)}", highlight=False)


def push(
    model: Annotated[Path, typer.Argument(help="A run or a model folder.")],
    repo: Annotated[str, typer.Option(help="owner/name on the Hugging Face Hub.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files to upload.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public (default: private).")] = False,
) -> None:
    """Upload a model with its card to the Hugging Face Hub; files that look like secrets are refused.

    Example: `oncurve push runs/demo --repo me/my-model --dry-run`
    """
    from oncurve.observe.run_model import resolve_model  # lazy
    from oncurve.run.publish import files_to_upload  # lazy
    from oncurve.run.publish import push as upload  # lazy

    folder = Path(resolve_model(str(model)))
    for path in files_to_upload(folder):
        console().print(f"{path.stat().st_size:>16,}  {path.name}", markup=False, highlight=False)
    if not dry_run:
        console().print(f"uploaded: {upload(folder, repo, private=not public)}", highlight=False)


def download(
    name: Annotated[str, typer.Argument(help="gsm8k, math, or a model on the Hugging Face Hub.")],
    output: Annotated[Path, typer.Option(help="Folder for the files.")],
    split: Annotated[
        list[str] | None, typer.Option(help="Dataset split; repeat for several (default: train and test).")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Only these model files, such as *.json; repeat for several.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Skip these model files, such as *.bin; repeat for several.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Download again even if the files exist.")] = False,
) -> None:
    """Download a dataset (as JSON lines) or a model from the Hugging Face Hub to a folder.

    For gated models, set HF_TOKEN or run `hf auth login` first.

    Example: `oncurve download math --output data/math`
    """
    from oncurve.data.download import SPLITS, download_data, download_model, is_model  # lazy

    if is_model(name):
        if split:
            raise ConfigError("download: --split is for datasets; for a model, use --include")
        place = download_model(
            name, output, revision=revision, include=include or (), exclude=exclude or (), force=force
        )
        console().print(f"model: {place}", highlight=False)
        return
    if include or exclude:
        raise ConfigError("download: --include and --exclude are for models; for a dataset, use --split")
    for said in download_data(name, output, splits=split or SPLITS, revision=revision, force=force):
        console().print(said, markup=False, highlight=False)
