"""What does `oncurve train` do from start to finish? Measure the model, train it, measure it again, show the result."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from oncurve import wiring
from oncurve.config.schema import Config
from oncurve.data.curriculum import Curriculum
from oncurve.errors import ConfigError
from oncurve.evaluate.compare import compare
from oncurve.evaluate.evaluate import Evaluation, evaluate
from oncurve.observe.manifest import describe_run
from oncurve.observe.plots import plot_run
from oncurve.observe.progress import Progress
from oncurve.observe.record import RunFolder, read_manifest, read_metrics
from oncurve.observe.summary import summarize
from oncurve.records import Prompt
from oncurve.rewards.base import RewardFunction
from oncurve.rollouts.base import Sampler, SamplingParams
from oncurve.train.checkpoint import prune, save_model
from oncurve.train.loop import train
from oncurve.train.policy import Policy
from oncurve.train.run import Run


@dataclass(frozen=True)
class Result:
    """Where a run ended."""

    folder: Path
    base: Evaluation
    trained: Evaluation | None
    """None if the run was stopped before its end."""
    is_interrupted: bool


class Examiner:
    """Measures the policy on prompts, always with the same decoding."""

    def __init__(
        self,
        policy: Policy,
        sampler: Sampler,
        reward_function: RewardFunction,
        *,
        params: SamplingParams,
        samples: int,
        progress: Progress | None = None,
    ) -> None:
        self.policy, self.sampler, self.reward_function = policy, sampler, reward_function
        self.params, self.samples, self.progress = params, samples, progress
        self.loose = wiring.make_loose_reward()

    def measure(self, prompts: list[Prompt], *, name: str, step: int) -> Evaluation:
        """Sample, grade, count."""
        self.sampler.load_weights(self.policy, version=step)

        def show(done: int, total: int) -> None:
            if self.progress is not None:
                self.progress.status(f"measuring {name}: {done}/{total}")

        return evaluate(
            prompts,
            self.sampler,
            self.reward_function,
            loose_reward_function=self.loose,
            params=self.params,
            samples_per_prompt=self.samples,
            name=name,
            step=step,
            on_progress=show,
        )

    def close(self) -> None:
        """End the graders' processes."""
        self.loose.close()


def run_recipe(config: Config, recipe: str, *, console: Console, quiet: bool = False) -> Result:
    """Train as the recipe says and leave everything worth keeping in the run's folder."""
    folder_path = run_folder_path(config)
    for finding in wiring.check_algorithm(config):
        console.print(f"[yellow]warning[/yellow]: {finding.what}. {finding.why} {finding.do}", highlight=False)
    reward_function = wiring.make_reward_function(config.rewards)
    algorithm, sampler = wiring.make_algorithm(config), wiring.make_sampler(config)
    policy = wiring.make_policy(config, with_reference=algorithm.needs_reference)
    context = wiring.context_of(policy.model.config)
    prompts = wiring.make_prompts(config, policy.tokenizer, context_tokens=context)
    data = Curriculum(
        prompts.train,
        config.run.prompts_per_step,
        seed=config.run.seed,
        retire_above=config.data.retire_above,
        prefer_half_solved=config.data.prefer_half_solved,
    )
    if not quiet:
        console.print(arithmetic(config, prompts))
    with RunFolder(folder_path) as folder, Progress(config.run.steps, console=console) as progress:
        folder.write_start(recipe, config.model_dump(mode="json"), describe_run())
        params = wiring.evaluation_sampling(config)
        examiner = Examiner(
            policy, sampler, reward_function, params=params, samples=config.evaluation.samples, progress=progress
        )
        base = examiner.measure(prompts.test, name="base", step=0)
        keep_evaluation(folder, base)
        during = partial(measure_during, examiner, prompts.during)
        first = during(0) if prompts.during else base.metrics()
        folder.write_metrics(0, first)
        run = make_run(config, folder, progress, policy, during)
        train(policy, sampler, data, reward_function, algorithm, run)
        trained = None
        if not run.is_interrupted:
            save_model(policy.model, policy.tokenizer, folder_path / "model")
            trained = examiner.measure(prompts.test, name="trained", step=run.steps_done)
            keep_evaluation(folder, trained)
        for closing in (examiner, reward_function, sampler):
            closing.close()
    result = Result(folder_path, base, trained, run.is_interrupted)
    report(result, console=console)
    return result


def make_run(
    config: Config, folder: RunFolder, progress: Progress, policy: Policy, during: partial[dict[str, float]]
) -> Run:
    """The services around the loop, with what is due and when."""

    def save(step: int) -> Mapping[str, float]:
        started = time.perf_counter()
        save_model(policy.model, policy.tokenizer, folder.checkpoints / f"step_{step:06d}")
        prune(folder.checkpoints, keep=config.run.keep_checkpoints)
        return {"time/save_seconds": time.perf_counter() - started}

    def save_interrupted(step: int) -> None:
        save(step)

    return Run(
        folder,
        progress,
        total_steps=config.run.steps,
        completions_per_step=config.completions_per_step,
        completions_per_update=config.run.completions_per_update or config.completions_per_step,
        mask_truncated=config.algorithm.mask_truncated,
        refill_rounds=config.run.refill_rounds,
        max_error_fraction=config.run.max_error_fraction,
        rollouts_every_steps=config.run.rollouts_every_steps,
        every=((config.evaluation.every_steps, during), (config.run.save_every_steps, save)),
        save=save_interrupted,
    )


def measure_during(examiner: Examiner, prompts: list[Prompt], step: int) -> dict[str, float]:
    """The held-out measurement in the middle of a run, as metrics."""
    started = time.perf_counter()
    metrics = examiner.measure(prompts, name="during", step=step).metrics()
    return {**metrics, "time/evaluate_seconds": time.perf_counter() - started}


def keep_evaluation(folder: RunFolder, evaluation: Evaluation) -> None:
    """Write an evaluation's examples and counts."""
    folder.write_evaluation(evaluation.name, evaluation.rows(), evaluation.summary())


def report(result: Result, *, console: Console) -> None:
    """The table of before and after, examples, pictures and the summary of a run."""
    metrics = read_metrics(result.folder)
    if len(metrics) > 1:
        picture = plot_run(metrics, result.folder / "curves.png", title=result.folder.name)
        text = summarize(metrics, manifest=read_manifest(result.folder), title=str(result.folder))
        (result.folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
        console.print(f"curves: {picture}", highlight=False)
    if result.trained is not None:
        comparison = compare(result.base, result.trained)
        comparison.write(result.folder)
        console.print(comparison.table())
        console.print(comparison.examples_text(limit=2), markup=False, highlight=False)
    ending = "stopped early; its checkpoint is in" if result.is_interrupted else "finished:"
    console.print(f"run {ending} {result.folder}", highlight=False)


def run_folder_path(config: Config) -> Path:
    """The folder of the run: its name, or one made of the model, the data and the time."""
    name = config.run.name
    if name is None:
        model = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(config.model).name)
        name = f"{model}-{config.data.type}-{config.algorithm.type}-{time.strftime('%Y%m%d-%H%M%S')}"
    if Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"run.name is {name!r}, which is not the name of one folder; put parents into run.folder")
    return Path(config.run.folder) / name


def arithmetic(config: Config, prompts: wiring.Rendered) -> Table:
    """How the numbers of the batch follow from each other, with their units."""
    table = Table(title="batch arithmetic", show_header=False, title_justify="left")
    step = config.completions_per_step
    rows = [
        ("prompts per step", f"{config.run.prompts_per_step}"),
        ("x completions per prompt (group size)", f"{config.algorithm.group_size}"),
        ("= completions per step", f"{step}"),
        ("/ completions per update", f"{config.run.completions_per_update or step}"),
        ("= updates per step", f"{config.updates_per_step}"),
        ("steps x updates per step", f"{config.run.steps * config.updates_per_step} updates"),
        ("training prompts", f"{len(prompts.train)}"),
        ("passes over them", f"{config.run.steps * config.run.prompts_per_step / len(prompts.train):.2f}"),
        ("most tokens in a completion", f"{config.rollouts.max_completion_tokens}"),
        ("tokens in a microbatch, at most", f"{config.policy.tokens_per_microbatch}"),
        ("test prompts (before and after)", f"{len(prompts.test)}"),
        ("held-out prompts (during)", f"{len(prompts.during)}"),
        ("prompts left out as too long", f"{len(prompts.excluded)}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table
