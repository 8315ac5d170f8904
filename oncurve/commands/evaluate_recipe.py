"""Evaluation of models on the test problems of a recipe, resumable, with a comparison of two."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from oncurve import wiring
from oncurve.commands.measuring import measure, recipe_settings
from oncurve.config.schema import Config
from oncurve.errors import ConfigError
from oncurve.evaluate.benchmarks import Grader
from oncurve.evaluate.compare import compare
from oncurve.evaluate.evaluate import Evaluation
from oncurve.evaluate.resumable import PartialResults
from oncurve.observe.record import RunFolder
from oncurve.session.session import keep_evaluation

UNFINISHED = "unfinished"
"""Folder inside the output with what is measured so far; removed at the end."""


def evaluate_models(config: Config, models: Sequence[str], output: Path, *, console: Console) -> list[Evaluation]:
    """Evaluate models on the same test problems with the same decoding; two of them are compared.

    Raises ConfigError if the output holds a finished evaluation or one with other settings.
    """
    if (output / "evaluations").exists():
        raise ConfigError(f"{output}: already holds a finished evaluation. Choose another --output, or remove it")
    console.print(f"evaluation: {output}", highlight=False)
    rows = wiring.split_rows(config)
    columns = wiring.shared_columns(rows)
    grader = Grader(
        wiring.make_reward_function(config.rewards, columns=columns), wiring.make_loose_reward(), None, "the recipe's"
    )
    try:
        evaluations = [
            _measured(config.model_copy(update={"model": name}), rows, grader, output / UNFINISHED / label, console)
            for name, label in zip(models, _labels(models), strict=True)
        ]
    finally:
        grader.close()
    names = ("base", "trained") if len(models) > 1 else ("evaluation",)
    with RunFolder(output) as folder:
        for place, name in enumerate(names):
            keep_evaluation(folder, replace(evaluations[place], name=name))
    if len(models) == 2:
        comparison = compare(evaluations[0], evaluations[1], names=(short_name(models[0]), short_name(models[1])))
        comparison.write(output)
        console.print(comparison.table())
    shutil.rmtree(output / UNFINISHED)
    console.print(f"examples and counts: {output / 'evaluations'}", highlight=False, soft_wrap=True)
    return evaluations


def short_name(model: str) -> str:
    """A model's name for a column of a table: the last part of its path, or the run that it is the result of."""
    path = Path(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def _labels(models: Sequence[str]) -> list[str]:
    return [f"{place}-{short_name(name)}" for place, name in enumerate(models)]


def _measured(
    config: Config, rows: tuple[wiring.Rows, ...], grader: Grader, unfinished: Path, console: Console
) -> Evaluation:
    """One model on the test problems; what was sampled before a stop is not sampled again."""
    policy = wiring.make_policy(config)
    context = wiring.context_of(policy.model.config)
    prompts = wiring.make_prompts(config, policy.tokenizer, context_tokens=context, rows=rows).test  # type: ignore[arg-type]
    sampler, params, samples = (
        wiring.make_sampler(config),
        wiring.evaluation_sampling(config),
        config.evaluation.samples,
    )
    settings = {
        "model": config.model,
        "sampler": config.rollouts.type,
        **recipe_settings(config, prompts, params, samples),
    }
    try:
        sampler.load_weights(policy, version=0)
        with PartialResults(unfinished, settings, samples=samples, num_prompts=len(prompts)) as kept:
            evaluation = measure(
                prompts,
                sampler,
                grader.strict,
                params,
                kept,
                what=f"evaluating {short_name(config.model)}",
                goes_on=f"The same command with --output {unfinished.parents[1]} resumes it",
                console=console,
                loose_reward_function=grader.loose,
            )
    finally:
        sampler.close()
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in evaluation.counts.items() if count)
    console.print(f"{config.model}: {counts} of {len(evaluation.examples)}", highlight=False, soft_wrap=True)
    return evaluation
