"""Evaluation of models on the test problems of a recipe or a benchmark, resumable, with a comparison of two."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction
from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import Sampler
from oncurve.data.from_settings import Rows
from oncurve.data.prompts import describe_chat
from oncurve.evaluate.compare import compare
from oncurve.evaluate.evaluate import evaluate
from oncurve.evaluate.evaluation import Evaluation
from oncurve.evaluate.resumable import PartialResults, prompts_per_call
from oncurve.observe.record import RunFolder
from oncurve.observe.run_model import is_run
from oncurve.observe.terminal import counting
from oncurve.recipe.load import load_config, read_run_config, read_tree
from oncurve.recipe.schema import Config
from oncurve.rewards.terms import describe_correct, make_lenient_reward
from oncurve.run.builder import make_policy, make_rewards, make_sampler, prompts_for
from oncurve.run.model_paths import describe_sampling, describe_weights
from oncurve.run.rendered import benchmark_rows, split_rows
from oncurve.run.session import keep_evaluation
from oncurve.run_errors import Stopped
from oncurve.wording import did_you_mean, listed

BENCHMARKS = Path(__file__).resolve().parent.parent / "evaluate" / "benchmarks"
"""Recipes of the problems that others measure on too: data, template, reward and decoding."""
UNFINISHED = "unfinished"
"""Folder inside the output with what is measured so far; removed at the end."""


def find_benchmark(name: str) -> Path:
    """The file of a benchmark of the package, or the YAML file of that name.

    Raises ConfigError with the nearest name if there is none.
    """
    known = {path.stem: path for path in sorted(BENCHMARKS.glob("*.yaml"))}
    path = Path(name)
    if name in known or (path.suffix in (".yaml", ".yml") and path.is_file()):
        return known.get(name, path)
    raise ConfigError(
        f"--benchmark: there is no {name!r}. {did_you_mean(name, known)}Use one of {listed(known)}, or a YAML file "
        f"with data, rewards, evaluation and rollouts as in a recipe"
    )


def evaluate_on_benchmark(
    name: str, models: Sequence[str], overrides: Sequence[str], output: Path, *, console: Console
) -> list[Evaluation]:
    """Evaluate models on a benchmark's problems; two of them are compared.

    A model with a chat template is asked through it, unless ``data.chat`` says otherwise.

    Raises ConfigError for a benchmark that does not exist, and as ``evaluate_models``.
    """
    path = find_benchmark(name)
    known = read_tree(path, ["model=embedded"])
    config = load_config(path, [*overrides, f"model={json.dumps(models[0])}"])
    evaluations = evaluate_models(config, models, output, rows=benchmark_rows(config), console=console)
    published = known.get("evaluation", {}).get("num_prompts")
    measured = len(evaluations[0].by_prompt())
    if published is not None and measured < published and config.data.type != "jsonl":
        console.print(
            f"{path.stem}: {measured:,} of its {published:,} problems. Do not compare this with published numbers",
            highlight=False,
        )
    return evaluations


def evaluate_models(
    config: Config,
    models: Sequence[str],
    output: Path,
    *,
    rows: tuple[Rows, Rows, Rows, Rows] | None = None,
    console: Console,
) -> list[Evaluation]:
    """Evaluate models on the same test problems with the same decoding; the first of two is compared with the second.

    ``rows`` are those of a benchmark, in the place of the recipe's own split.

    Raises ConfigError if the output holds a finished evaluation or one with other settings.
    """
    if (output / "evaluations").exists():
        raise ConfigError(f"{output}: already holds a finished evaluation. Choose another --output, or remove it")
    console.print(f"evaluation: {output}", highlight=False)
    rows = rows or split_rows(config)
    strict, lenient = make_rewards(config, rows=rows), make_lenient_reward()
    try:
        evaluations = [
            _measured(
                config.model_copy(update={"model": name}),
                rows,
                strict,
                lenient,
                output / UNFINISHED / label,
                console,
            )
            for name, label in zip(models, _labels(models), strict=True)
        ]
    finally:
        strict.close()
        lenient.close()
    names = ("base", "trained") if len(models) > 1 else ("evaluation",)
    with RunFolder(output) as folder:
        for index, name in enumerate(names):
            keep_evaluation(folder, replace(evaluations[-1 - index], name=name))
    if len(models) == 2:  # the second is the base: a better first model has gained
        comparison = compare(evaluations[1], evaluations[0], names=(short_name(models[1]), short_name(models[0])))
        comparison.write(output)
        comparison.print(console)
    shutil.rmtree(output / UNFINISHED)
    console.print(f"examples and counts: {output / 'evaluations'}", highlight=False, soft_wrap=True)
    return evaluations


def short_name(model: str) -> str:
    """A model's name for a column of a table: the last part of its path, or the run that it is the result of."""
    path = Path(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def _labels(models: Sequence[str]) -> list[str]:
    return [f"{index}-{short_name(name)}" for index, name in enumerate(models)]


def _measured(
    config: Config,
    rows: tuple[Rows, Rows, Rows, Rows],
    strict: RewardFunction,
    lenient: RewardFunction,
    unfinished: Path,
    console: Console,
) -> Evaluation:
    """One model on the test problems; what was sampled before a stop is not sampled again."""
    policy = make_policy(_copied_as_in_training(config), is_trained=False)
    section = config.evaluation_data
    if description := describe_chat(section.chat, policy.tokenizer, section.template, model=config.model):
        console.print(description, markup=False, highlight=False, soft_wrap=True)
    console.print(describe_sampling(policy, config.rollouts), markup=False, highlight=False, soft_wrap=True)
    weights = describe_weights(policy)
    console.print(weights, markup=False, highlight=False, soft_wrap=True)
    prompts = prompts_for(config, policy, rows=rows).test
    sampler, params, samples = make_sampler(config), config.evaluation_sampling(), config.evaluation.samples
    settings = {
        "model": config.model,
        "sampler": config.rollouts.type,
        "weights": weights,
        **recipe_settings(config, prompts, params, samples),
    }
    try:
        sampler.load_weights(policy, version=0)
        with PartialResults(unfinished, settings, samples=samples, num_prompts=len(prompts)) as store:
            evaluation = measure(
                prompts,
                sampler,
                strict,
                params,
                store,
                what=f"evaluating {short_name(config.model)}",
                goes_on=f"The same command with --output {unfinished.parents[1]} resumes it",
                console=console,
                lenient_reward_function=lenient,
            )
        evaluation = replace(evaluation, correct_means=describe_correct(config.rewards))
    finally:
        sampler.close()
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in evaluation.counts.items() if count)
    console.print(f"{config.model}: {counts} of {len(evaluation.examples)}", highlight=False, soft_wrap=True)
    shares = [evaluation.headline()]
    if samples > 1 and evaluation.judges("correct"):
        shares.append(f"pass@{samples} {evaluation.pass_at_k(samples):.1%}")
    console.print(f"{short_name(config.model)}: {', '.join(shares)}", highlight=False, soft_wrap=True)
    return evaluation


def _copied_as_in_training(config: Config) -> Config:
    """The recipe with the seed of the run that trained the model, so that copies in 16 bits are those of the run."""
    model = Path(config.model).expanduser()
    run = next((folder for folder in model.parents[:2] if is_run(folder)), None)  # also of a checkpoint's folder
    if run is None or not model.is_dir():
        return config
    recorded = run / "config.yaml"
    seed = read_run_config(recorded.read_text(encoding="utf-8"), source=str(recorded)).run.seed
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})


def recipe_settings(config: Config, prompts: Sequence[Prompt], params: SamplingParams, samples: int) -> dict[str, Any]:
    """The parts of a recipe that must be the same for an evaluation that goes on."""
    digest = hashlib.sha256("\0".join(f"{prompt.text}\0{prompt.row.get('answer')}" for prompt in prompts).encode())
    return {
        "prompts": digest.hexdigest(),
        "rewards": [reward.model_dump(mode="json") for reward in config.rewards],
        "decoding": asdict(params),
        "samples": samples,
        "compute_type": config.policy.compute_type,
        "prompts_per_call": prompts_per_call(samples),
    }


def measure(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    reward_function: RewardFunction,
    params: SamplingParams,
    store: PartialResults,
    *,
    what: str,
    goes_on: str,
    console: Console,
    lenient_reward_function: RewardFunction | None = None,
) -> Evaluation:
    """The evaluation, with its progress; Ctrl-C leaves what is whole and says how it ``goes_on``."""

    def num_correct() -> str:
        right = sum(example.is_correct for example in store.examples)
        return "" if any(example.category == "graded" for example in store.examples) else f", {right:,} correct"

    try:
        with counting(console, what) as tell:
            evaluation = evaluate(
                prompts,
                sampler,
                reward_function,
                params=params,
                samples_per_prompt=store.samples,
                prompts_per_call=prompts_per_call(store.samples),
                store=store,
                lenient_reward_function=lenient_reward_function,
                on_progress=lambda done, total: tell(done, total, num_correct()),
            )
            return replace(evaluation, seed=params.seed)
    except KeyboardInterrupt:
        done = len(store.examples) // store.samples
        raise Stopped(
            f"stopped: {done} of {len(prompts)} problems are kept in {store.folder}. {goes_on}", exit_code=130
        ) from None
