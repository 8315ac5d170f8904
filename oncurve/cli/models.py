"""Commands for a finished model: evaluate, sample, merge, publish."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from oncurve.errors import ConfigError
from oncurve.observe.terminal import console, quiet_libraries

NGRAM = 13
Target = Annotated[str, typer.Argument(help="A run, or a recipe; with --benchmark a run or a model.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value settings, such as rollouts.max_rows=64.")]
Model = Annotated[str | None, typer.Option(help="With a recipe: the model to evaluate, if not the recipe's.")]
Also = Annotated[
    list[str] | None,
    typer.Option(help="A run of the same recipe with another seed, to pool with; repeat for several."),
]
Data = Annotated[
    list[str] | None, typer.Option(help="Local file or folder instead of the Hugging Face Hub, or NAME=PATH.")
]
TemplateName = Annotated[str | None, typer.Option(help="Prompt template or text file (default: the benchmark's).")]
Chat = Annotated[bool | None, typer.Option(help="Use the chat template (default: if the tokenizer has one).")]
TrainedOn = Annotated[
    str | None, typer.Option(help="Run, recipe or JSON lines file whose training data to check for contamination.")
]


def evaluate(
    target: Target,
    overrides: Overrides = None,
    benchmark: Annotated[str | None, typer.Option(help="Comma-separated benchmarks, such as gsm8k,math500.")] = None,
    model: Model = None,
    against: Annotated[str | None, typer.Option(help="A second model to evaluate and compare with.")] = None,
    also: Also = None,
    data: Data = None,
    split: Annotated[str, typer.Option(help="test, validation, or remainder (all but validation).")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N problems.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Completions per problem.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.01, max=1.0, help="Nucleus sampling probability.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of completion tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for sampling and bootstrapping.")] = 0,
    template: TemplateName = None,
    chat: Chat = None,
    sampler: Annotated[str, typer.Option(help="Sampler: engine or transformers.")] = "engine",
    trained_on: TrainedOn = None,
    ngram: Annotated[int, typer.Option(min=1, help="Consecutive words that count as seen in training.")] = NGRAM,
    card: Annotated[bool, typer.Option("--card", help="Write the results into the model's README.md.")] = False,
    output: Annotated[Path | None, typer.Option(help="Output folder. An unfinished evaluation is resumed.")] = None,
) -> None:
    """Evaluate a model on benchmarks or on the test problems of a run or recipe; compare two; pool seeds.

    Example: `oncurve evaluate runs/demo --benchmark gsm8k,math500 --samples 8 --temperature 0.6`
    """
    if benchmark is None:
        refuse_given({
            "--also": also, "--data": data, "--limit": limit, "--samples": samples, "--temperature": temperature,
            "--top-p": top_p, "--max-tokens": max_tokens, "--seed": seed, "--template": template,
            "--chat": chat is not None, "--trained-on": trained_on, "--card": card,
            "--split": split != "test", "--sampler": sampler != "engine", "--ngram": ngram != NGRAM,
        })  # fmt: skip
        return evaluate_recipe(target, overrides or [], model, against, output)
    if model is not None or (against is not None and also):
        raise ConfigError(
            "with --benchmark, give the model as the first argument, and only one of --against and --also"
        )
    quiet_libraries()
    from oncurve.commands.benchmark_models import BenchmarkRequest, short_labels  # lazy
    from oncurve.commands.benchmark_run import evaluate_on_benchmarks  # lazy

    request = BenchmarkRequest(
        benchmarks=tuple(dict.fromkeys(name.strip() for name in benchmark.split(",") if name.strip())),
        data=data_by_benchmark(data or []), split=split, limit=limit, samples=samples, temperature=temperature,
        top_p=top_p, max_tokens=max_tokens, seed=seed, template=template, chat=chat, sampler=sampler,
        overrides=tuple(overrides or ()), trained_on=trained_on, ngram_words=ngram,
    )  # fmt: skip
    models = [target, *([against] if against else also or ())]
    folder = output or Path("evaluations") / short_labels(models)[0]
    results = evaluate_on_benchmarks(models, request, folder, compares=against is not None, console=console())
    if card:
        from oncurve.commands.publish import card_with_results  # lazy

        for name, result in zip(models, results, strict=True):
            console().print(f"card: {card_with_results(name, result)}", highlight=False)


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


def refuse_given(options: Mapping[str, object]) -> None:
    """Refuse options that would do nothing for a recipe, whose own keys say the same."""
    if given := [name for name, value in options.items() if value not in (None, False, 0)]:
        raise ConfigError(
            f"{', '.join(given)}: only with --benchmark. For a recipe, use its settings, such as "
            f"evaluation.samples=8 or evaluation.temperature=0.6"
        )


def evaluate_recipe(
    target: str, overrides: list[str], model: str | None, against: str | None, output: Path | None
) -> None:
    """Evaluate a model on a recipe's test problems; of a run, its final model."""
    from oncurve.config.load import load_config, read_text  # lazy
    from oncurve.config.run_folder import read_run_config  # lazy
    from oncurve.observe.run_model import check_place, is_run, resolve_model  # lazy
    from oncurve.recipes.find import find_recipe  # lazy

    if is_run(target):
        model = model or resolve_model(target)
        recorded = Path(target).expanduser() / "config.yaml"
        config = read_run_config(read_text(recorded), overrides, source=str(recorded))
    else:
        config = load_config(find_recipe(target), overrides)
    quiet_libraries()
    from oncurve.commands.evaluate_recipe import evaluate_models, short_name  # lazy

    models = [model or config.model, *([against] if against else [])]
    for name in models:
        check_place(name)
    named = "-vs-".join(short_name(name) for name in models)
    folder = output or Path("evaluations") / f"{named}-{time.strftime('%Y%m%d-%H%M%S')}"
    evaluate_models(config, models, folder, console=console())


def data_by_benchmark(given: list[str]) -> dict[str, str]:
    """Files by the name of their benchmark; the name "" stands for all.

    >>> data_by_benchmark(["shared/data", "gsm8k=mine.jsonl"])
    {'': 'shared/data', 'gsm8k': 'mine.jsonl'}
    """
    pairs = (one.partition("=") if "=" in one and not Path(one).exists() else ("", "=", one) for one in given)
    return {name: path for name, _, path in pairs}


def merge(
    adapter: Annotated[Path, typer.Argument(help="A run that trained a LoRA adapter, or an adapter folder.")],
    output: Annotated[Path, typer.Option(help="New folder for the merged model.")],
) -> None:
    """Merge a LoRA adapter into its base model.

    Example: `oncurve merge runs/demo/model --output runs/demo/merged`
    """
    quiet_libraries()
    from oncurve.commands.publish import merge_with_card  # lazy

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
    from oncurve.session.upload import plan_upload, push_upload  # lazy

    upload = plan_upload(Path(resolve_model(str(model))), repo)
    console().print(upload.describe(), markup=False, highlight=False)
    if not dry_run:
        console().print(f"uploaded: {push_upload(upload, private=not public)}", highlight=False)


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
