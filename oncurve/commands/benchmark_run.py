"""Measuring models on benchmarks, with results kept along the way and compared at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from oncurve import wiring
from oncurve.commands.benchmark_models import BenchmarkRequest, MeasuredModel, decoding_of, load_subject, short_labels
from oncurve.commands.measuring import measure
from oncurve.config.load import load_config, read_text
from oncurve.config.run_folder import read_run_config
from oncurve.data.contamination import find_contamination
from oncurve.data.datasets import load_rows
from oncurve.data.prompts import render_prompts
from oncurve.errors import ConfigError, DataError, OncurveError
from oncurve.evaluate.benchmarks import (
    Benchmark,
    Grader,
    Problems,
    find_benchmark,
    load_problems,
    make_grader,
    template_named,
)
from oncurve.evaluate.compare import compare
from oncurve.evaluate.estimators import runs_interval
from oncurve.evaluate.evaluate import Evaluation
from oncurve.evaluate.numbers import mean_of_prompts, pooled_outcomes, report_numbers
from oncurve.evaluate.result_tables import results_markdown, summary_line
from oncurve.evaluate.resumable import PartialResults, prompts_per_call
from oncurve.observe.manifest import describe_run
from oncurve.observe.record import write_json, write_text
from oncurve.observe.redact import redact_tree
from oncurve.observe.run_model import resolve_model
from oncurve.recipes.find import find_recipe
from oncurve.records import Prompt
from oncurve.rollouts.base import SamplingParams

SCHEMA = "oncurve-evaluation/1"


@dataclass(frozen=True, slots=True)
class Measured:
    """One benchmark of one model."""

    evaluation: Evaluation
    entry: dict[str, Any]
    """What ``results.json`` says of it."""
    prompts: list[Prompt]


def evaluate_on_benchmarks(
    models: Sequence[str], request: BenchmarkRequest, output: Path, *, compares: bool = False, console: Console
) -> list[dict[str, Any]]:
    """Measure models on the same problems; ``compares`` holds the second against the first, otherwise several are
    training seeds of one recipe and are pooled. The results of each, as they are written.

    Raises Stopped after Ctrl-C: what was sampled is kept, and the same call goes on with it.
    """
    chosen = [find_benchmark(name) for name in request.benchmarks]
    _check_request(request)
    labels = short_labels(models)
    measured: list[dict[str, Measured]] = []
    results: list[dict[str, Any]] = []
    for name, label in zip(models, labels, strict=True):
        folder = output if len(models) == 1 else output / label
        found, result = _examine(name, label, chosen, request, folder, console=console)
        measured.append(found)
        results.append(result)
        for entry in result["benchmarks"].values():
            console.print(summary_line(entry), markup=False, highlight=False)
        console.print(f"results: {folder}/results.json and results.md", highlight=False)
    for benchmark in chosen if len(models) > 1 else ():
        pair = [found[benchmark.name].evaluation for found in measured]
        if compares:
            _compare(pair, labels, benchmark, output / f"comparison_{benchmark.name}", console)
        else:
            _pool(pair, labels, benchmark, output / f"pooled_{benchmark.name}.json", request.seed, console)
    return results


def _check_request(request: BenchmarkRequest) -> None:
    if not request.benchmarks:
        raise ConfigError("--benchmark names none. Give names with commas, such as gsm8k,math500")
    for name in request.data:
        if name and name not in request.benchmarks:
            raise ConfigError(f"--data {name}=...: {name!r} is not among --benchmark {','.join(request.benchmarks)}")


def _examine(
    name: str, label: str, chosen: Sequence[Benchmark], request: BenchmarkRequest, folder: Path, *, console: Console
) -> tuple[dict[str, Measured], dict[str, Any]]:
    subject = load_subject(name, label, request)
    training = _training_rows(name, request)
    found: dict[str, Measured] = {}
    try:
        for benchmark in chosen:
            found[benchmark.name] = _run(
                subject, benchmark, request, training, folder / benchmark.name, console=console
            )
    finally:
        subject.sampler.close()
    result = redact_tree(
        {
            "schema": SCHEMA,
            "model": dict(subject.identity),
            "sampler": {
                "type": subject.config.rollouts.type,
                "device": str(subject.policy.model.device.type),
                "compute_type": subject.config.policy.compute_type,
            },
            "run": describe_run(),
            "benchmarks": {name: one.entry for name, one in found.items()},
        }
    )
    write_json(folder / "results.json", result)
    write_text(folder / "results.md", results_markdown(result) + "\n")
    return found, result


def _run(
    subject: MeasuredModel,
    benchmark: Benchmark,
    request: BenchmarkRequest,
    training: wiring.Rows | str,
    folder: Path,
    *,
    console: Console,
) -> Measured:
    """One benchmark of one model."""
    data = request.data.get(benchmark.name, request.data.get(""))
    problems = load_problems(benchmark, data=data, split=request.split, limit=request.limit)
    template = template_named(request.template, benchmark)
    chat = bool(subject.tokenizer.chat_template) if request.chat is None else request.chat
    params, samples = decoding_of(subject, benchmark, request, template, chat=chat, console=console)
    room = wiring.context_of(subject.policy.model.config)
    longest = None if room is None else room - params.max_completion_tokens
    prompts, excluded = render_prompts(
        problems.rows, subject.tokenizer, template=template, chat=chat, max_prompt_tokens=longest
    )
    if not prompts:
        raise DataError("there is no problem to evaluate on. Raise --limit, or check --data")
    asked = {
        "template": asdict(template),
        "chat": chat,
        "example": prompts[0].text,
        "sha256": _digest(prompts),
    }
    grader = make_grader(benchmark.grader, template)
    try:
        settings = _settings(subject, benchmark, problems, asked["sha256"], params, samples)
        with PartialResults(folder, settings, samples=samples, num_prompts=len(prompts)) as kept:
            evaluation = _measured(prompts, subject, grader, params, kept, benchmark, console)
    finally:
        grader.close()
    categories = {
        column: {place: str(row.get(column)) for place, row in enumerate(problems.rows)}
        for column in benchmark.categories
    }
    entry = {
        "title": benchmark.title,
        "source": dict(problems.source),
        "is_whole": is_whole(problems, num_excluded=len(excluded)),
        "num_excluded": len(excluded),
        "prompt": asked,
        "grader": grader.description,
        "grader_name": benchmark.grader,
        "decoding": asdict(params),
        "numbers": report_numbers(evaluation, categories, has_votes=grader.extract is not None),
        "contamination": _contamination(problems.rows, training, evaluation, request.ngram_words),
        "seconds": evaluation.seconds,
    }
    return Measured(evaluation, entry, prompts)


def _settings(
    subject: MeasuredModel, benchmark: Benchmark, problems: Problems, prompts: str, params: SamplingParams, samples: int
) -> dict[str, Any]:
    """What must be the same for an evaluation that goes on."""
    return {
        "model": subject.identity["sha256"],
        "benchmark": benchmark.name,
        "source": dict(problems.source),
        "prompts": prompts,
        "grader": benchmark.grader,
        "decoding": asdict(params),
        "samples": samples,
        "sampler": subject.config.rollouts.type,
        "compute_type": subject.config.policy.compute_type,
        "prompts_per_call": prompts_per_call(samples),
    }


def _measured(
    prompts: Sequence[Prompt],
    subject: MeasuredModel,
    grader: Grader,
    params: SamplingParams,
    kept: PartialResults,
    benchmark: Benchmark,
    console: Console,
) -> Evaluation:
    """The measurement behind a bar; Ctrl-C leaves what is whole."""
    if kept.examples:
        done = len(kept.examples) // kept.samples
        console.print(f"{benchmark.title}: {done} of {len(prompts)} problems were done before", highlight=False)

    return measure(
        prompts,
        subject.sampler,
        grader.strict,
        params,
        kept,
        what=f"{subject.label} on {benchmark.title}",
        goes_on="The same command goes on from there",
        console=console,
        loose_reward_function=grader.loose,
        extract=grader.extract,
        name=benchmark.name,
    )


def is_whole(problems: Problems, *, num_excluded: int) -> bool:
    """Whether these are all the problems of the published split, as far as is known."""
    source = problems.source
    right_number = source["rows_known"] in (None, source["rows_found"])
    return source["chosen"] == "test" and source["limit"] is None and right_number and num_excluded == 0


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.index}\0{prompt.text}\0{prompt.row['answer']}\n".encode("utf-8", "replace"))
    return digest.hexdigest()


def _training_rows(name: str, request: BenchmarkRequest) -> wiring.Rows | str:
    """What the model was trained on, as far as it can be read; else why not.

    Raises OncurveError if what was asked for cannot be read.
    """
    asked = request.trained_on
    if asked is None:
        model = Path(resolve_model(name)).expanduser()
        recipe = next((place / "config.yaml" for place in model.parents[:2] if (place / "config.yaml").is_file()), None)
        if recipe is None:
            return "the training data are not known; name them with --trained-on"
        try:
            return wiring.split_rows(read_run_config(read_text(recipe), source=str(recipe)))[0]
        except OncurveError as error:
            return f"the training data of {recipe.parent} cannot be read: {error}"
    place = Path(asked).expanduser()
    if place.is_file() and place.suffix in (".jsonl", ".parquet"):
        return load_rows("jsonl" if place.suffix == ".jsonl" else "huggingface", path=place)
    own = place / "config.yaml"
    if own.is_file():
        return wiring.split_rows(read_run_config(read_text(own), source=str(own)))[0]
    return wiring.split_rows(load_config(find_recipe(asked)))[0]


def _contamination(
    rows: wiring.Rows, training: wiring.Rows | str, evaluation: Evaluation, words: int
) -> dict[str, Any]:
    """The problems that the training data hold, and the average without them."""
    if isinstance(training, str):
        return {"checked": False, "why": training}
    found = find_contamination(rows, training, words=words)
    seen = set(found.indices)
    clean = [row for row in evaluation.by_prompt() if row[0].index not in seen]
    graded = [[example for example in row if example.category != "error"] for row in clean]
    average = mean_of_prompts([row for row in graded if row], seed=evaluation.seed)
    return {"checked": True, **found.describe(), "avg_of_the_others": average}


def _compare(
    pair: Sequence[Evaluation], labels: Sequence[str], benchmark: Benchmark, folder: Path, console: Console
) -> None:
    first, second = (replace(one, name=label) for one, label in zip(pair, labels, strict=True))
    comparison = compare(first, second, names=(labels[0], labels[1]), problems=f"problems of {benchmark.title}")
    comparison.write(folder)
    console.print(comparison.table())
    console.print(f"comparison: {folder}", highlight=False)


def _pool(
    found: Sequence[Evaluation], labels: Sequence[str], benchmark: Benchmark, path: Path, seed: int, console: Console
) -> None:
    """Several training seeds of one recipe as one number."""
    outcomes = pooled_outcomes(found)
    if not outcomes[0]:
        raise ConfigError(f"{benchmark.title}: no problem has a graded completion of every model. Nothing to pool")
    means = [sum(row) / len(row) for row in outcomes]
    low, high = runs_interval(outcomes, seed=seed)
    pooled = {
        "schema": "oncurve-pooled/1",
        "benchmark": benchmark.name,
        "models": dict(zip(labels, means, strict=True)),
        "num_prompts": len(outcomes[0]),
        "value": sum(means) / len(means),
        "over_runs_and_prompts": [low, high],
    }
    write_json(path, cast("Mapping[str, Any]", pooled))
    console.print(
        f"{benchmark.title}, {len(means)} models: {100 * pooled['value']:.1f} [{100 * low:.1f}, {100 * high:.1f}] "
        f"(95 %, over models and problems): {path}",
        highlight=False,
    )
