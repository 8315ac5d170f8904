"""Time that oncurve and TRL train on the embedded word problems until 80 % of held-out ones are solved.

Both start from the embedded model and see the same prompts in the same order, the same rewards, group size, loss,
learning rates and optimizer settings: those of the recipe ``word_problems``. After every second step the weights are
measured by our evaluator on the same 200 test problems, greedy; that time does not count. Everything else counts,
from the beginning of the first step to the end of the step that reaches the accuracy. Every run has a process of its
own, whose largest memory, that of our evaluator included, is its peak.

    python benchmarks/bench.py time_to_accuracy --seeds 0 1 2 --trl fp32:32 fp32:64 bf16weights:64
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from ours import prepare
from record import Record
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl_side import Clock, TrlSetting, trl_config

from oncurve.core.grading import RewardFunction, grade
from oncurve.core.loop import train
from oncurve.core.records import Completion, Prompt
from oncurve.core.sampler import PolicyView, end_token_ids
from oncurve.data.curriculum import Curriculum
from oncurve.evaluate.evaluate import evaluate
from oncurve.observe.progress import Progress
from oncurve.observe.record import RunFolder
from oncurve.policy.model_folder import load_model
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.recipe.schema import Config
from oncurve.rewards.terms import make_reward_function
from oncurve.run.builder import make_algorithm, make_policy, make_sampler
from oncurve.run.rendered import Rendered, make_prompts
from oncurve.run.services import Run
from oncurve.run.step_log import StepLog
from oncurve.sandbox.inside.confine import die_with


class Reached(Exception):
    """The accuracy has been reached and training ends."""


@dataclass(frozen=True)
class View:
    """A model, whoever trains it, as our evaluator wants to see it: computed in the type of its weights."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def compute(self) -> AbstractContextManager[object]:
        """Nothing is cast."""
        return nullcontext()


@dataclass
class Course:
    """The stopwatch and the accuracy of one run."""

    config: Config
    prompts: list[Prompt]
    reward: RewardFunction
    threshold: float
    every_steps: int
    points: list[dict[str, float]] = field(default_factory=list)
    """Steps done, seconds of training, share of test problems solved."""
    seconds: float = 0.0
    _running_since: float | None = None

    def start(self) -> None:
        """Time counts from now on."""
        self._running_since = time.perf_counter()

    def stop(self) -> None:
        """Time does not count any more."""
        if self._running_since is not None:
            self.seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def step_done(self, step: int, view: Callable[[], PolicyView]) -> bool:
        """Measure if it is due; whether the accuracy has been reached. The watch stands still meanwhile."""
        self.stop()
        reached = False
        if step % self.every_steps == 0:
            reached = self.measure(step, view()) >= self.threshold
        if not reached:
            self.start()
        return reached

    def measure(self, step: int, view: PolicyView) -> float:
        """The share of test problems that these weights solve, greedy, in the right form."""
        sampler = make_sampler(self.config)
        sampler.load_weights(view, version=step)
        params = self.config.evaluation_sampling()
        solved = evaluate(self.prompts, sampler, self.reward, params=params, step=step).correct.fraction
        sampler.close()
        self.points.append({"step": step, "seconds": self.seconds, "correct_fraction": solved})
        print(f"    step {step:3d}  {self.seconds:7.1f} s  {solved:.1%}", flush=True)
        return solved

    def record(self, reached: bool) -> dict[str, Any]:
        """The outcome; None for seconds that were never reached."""
        return {
            "reached": reached,
            "seconds": self.points[-1]["seconds"] if reached else None,
            "steps": int(self.points[-1]["step"]) if reached else None,
            "trained_seconds": self.seconds,
            "points": self.points,
        }


def recipe(seed: int, arguments: argparse.Namespace) -> Config:
    """The recipe with the seed, the steps and the test problems of this benchmark."""
    return load_config(
        find_recipe(arguments.recipe),
        [
            f"run.seed={seed}",
            f"run.steps={arguments.max_steps}",
            f"rollouts.max_completion_tokens={arguments.new_tokens}",
            f"evaluation.num_prompts={arguments.problems}",
            f"evaluation.data.limit={arguments.problems}",
            "evaluation.every_steps=0",
            f"policy.compute_type={arguments.compute}",
            *arguments.overrides,
        ],
    )


def our_run(config: Config, course: Course, prompts: Rendered, scratch: Path) -> bool:
    """oncurve's own loop; whether it reached the accuracy."""
    algorithm, sampler = make_algorithm(config), make_sampler(config)
    policy = make_policy(config, with_reference=algorithm.needs_reference)
    data = Curriculum(prompts.train, config.run.prompts_per_step, seed=config.run.seed)
    console = Console(file=io.StringIO())
    with RunFolder(scratch / "run") as folder, Progress(config.run.steps, console=console, live=False) as progress:

        def measured(step: int) -> dict[str, float]:
            if course.step_done(step, lambda: View(policy.model, policy.tokenizer)):
                raise Reached
            return {}

        run = Run(
            StepLog(folder, progress),
            total_steps=config.run.steps,
            completions_per_step=config.completions_per_step,
            completions_per_update=config.run.completions_per_update or config.completions_per_step,
            every=((1, measured),),
        )
        course.measure(0, View(policy.model, policy.tokenizer))
        course.start()
        try:
            list(train(policy, sampler, data, course.reward, algorithm, run))
        except Reached:
            return True
        finally:
            course.stop()
            sampler.close()
    return False


class TrlCourse(Clock):
    """Measures TRL's weights between its steps and ends its run when they are good enough."""

    def __init__(self, course: Course) -> None:
        super().__init__(updates=1)
        self.course, self.reached = course, False
        self.trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The watch starts."""
        self.course.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One optimizer update is one step."""
        super().on_step_end()
        view = View(self.trainer.accelerator.unwrap_model(self.trainer.model), self.trainer.processing_class)
        self.reached = self.course.step_done(state.global_step, lambda: view)
        control.should_training_stop = control.should_training_stop or self.reached


def trl_run(config: Config, course: Course, prompts: Rendered, setting: TrlSetting) -> tuple[bool, Clock]:
    """TRL's trainer on the same course; whether it reached the accuracy, and its times by phase."""
    from datasets import Dataset
    from trl import GRPOTrainer

    dtype = torch.bfloat16 if setting.arithmetic == "bf16weights" else torch.float32
    model, tokenizer = load_model(config.model, dtype=dtype)
    data = Curriculum(prompts.train, config.run.prompts_per_step, seed=config.run.seed)
    shown = [prompt for step in range(config.run.steps) for prompt in data.at(step)]
    wrong = [prompt for prompt in shown if tuple(tokenizer(prompt.text)["input_ids"]) != prompt.prompt_ids]
    if wrong:
        raise SystemExit(f"TRL reads other tokens than oncurve for {len(wrong)} prompts; no comparison")
    settings, total = config.optimizer, config.run.steps * config.updates_per_step
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda u: settings.rate(u, total) / settings.learning_rate)
    watcher = TrlCourse(course)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=partial(trl_rewards, course.reward, tokenizer, shown, set(end_token_ids(model, tokenizer))),
        args=trl_options(config, setting),
        train_dataset=Dataset.from_list([{"prompt": p.text, "place": place} for place, p in enumerate(shown)]),
        optimizers=(optimizer, schedule),
        callbacks=[watcher],
    )
    trainer.remove_callback(PrinterCallback)
    watcher.trainer = trainer
    watcher.watch(trainer)
    course.measure(0, View(model, tokenizer))
    trainer.train()
    course.stop()
    return watcher.reached, watcher


def trl_options(config: Config, setting: TrlSetting) -> Any:
    """The recipe's numbers under TRL's names."""

    row = config.algorithm.row()
    if row.normalize != "sequence_mean" or row.kl_coef or config.updates_per_step != 1:
        raise SystemExit("this benchmark knows TRL's names for grpo without a KL term and with one update per step")
    return trl_config(
        setting,
        completions=config.completions_per_step,
        updates=1,
        num_generations=config.algorithm.group_size,
        max_completion_length=config.rollouts.max_completion_tokens,
        temperature=config.rollouts.temperature,
        loss_type="grpo",
        epsilon=row.clip_low,
        epsilon_high=row.clip_high,
        beta=0.0,
        max_grad_norm=config.optimizer.max_gradient_norm,
        max_steps=config.run.steps,
        shuffle_dataset=False,
        seed=config.run.seed,
    )


def trl_rewards(
    reward: RewardFunction,
    tokenizer: PreTrainedTokenizerBase,
    shown: Sequence[Prompt],
    end_ids: set[int],
    *,
    completion_ids: list[list[int]],
    place: list[int],
    **_: Any,
) -> list[float | None]:
    """Our rewards for TRL's completions, read from their tokens: TRL's own text leaves special tokens out."""
    completions = []
    for ids, number in zip(completion_ids, place, strict=True):
        ended = bool(ids) and ids[-1] in end_ids
        text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        reason = "stop" if ended else "length"
        zeros = (0.0,) * len(ids)
        completions.append(Completion(shown[number].prompt_ids, tuple(ids), str(text), zeros, reason, 0, 0))
    return [one.value for one in grade(reward, [shown[number] for number in place], completions)]


def one_run(system: str, seed: int, setting: TrlSetting, arguments: argparse.Namespace) -> dict[str, Any]:
    """One system on one seed, in this process."""
    prepare(arguments)
    config = recipe(seed, arguments)
    reward = make_reward_function(config.rewards)
    _, tokenizer = load_model(config.model)
    prompts = make_prompts(config, tokenizer, context_tokens=None)
    course = Course(config, prompts.test, reward, arguments.accuracy, arguments.every_steps)
    print(f"{system}, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        if system == "oncurve":
            record = course.record(our_run(config, course, prompts, Path(scratch)))
        else:
            reached, clock = trl_run(config, course, prompts, setting)
            record = course.record(reached) | {"setting": str(setting), "phases": clock.steps}
    reward.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"system": system, "seed": seed, "peak_gib": round(peak, 2), **record}


def apart(system: str, seed: int, setting: TrlSetting, arguments: argparse.Namespace) -> dict[str, Any]:
    """One system on one seed, in a fresh process that ends with this one."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=die_with, initargs=[os.getpid()]) as pool:
        return pool.submit(one_run, system, seed, setting, arguments).result()


def fastest_setting(settings: Sequence[TrlSetting], arguments: argparse.Namespace) -> tuple[TrlSetting, dict[str, Any]]:
    """The setting of TRL with the shortest steps on this task, and the seconds of each; nothing to try with one."""
    if len(settings) == 1:
        return settings[0], {}
    short = argparse.Namespace(**{**vars(arguments), "max_steps": 3, "every_steps": 1000})
    seconds = {}
    for setting in settings:
        steps = apart(f"TRL {setting}", 0, setting, short)["phases"]
        seconds[str(setting)] = statistics.median(step["step"] for step in steps[1:])
        print(f"TRL {setting}: {seconds[str(setting)]:.2f} s per step")
    return TrlSetting.parse(min(seconds, key=lambda name: seconds[name])), seconds


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="word_problems", help="whose rows, rewards and settings both take")
    parser.add_argument("--accuracy", type=float, default=0.8)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--every-steps", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--trl", nargs="+", default=["fp32:32"], help="the fastest of several is used")
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--kernels", choices=["on", "off"], default="on", help="oncurve's compiled kernels")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value pairs for the recipe, for both")


def bench(asked: argparse.Namespace, record: Record) -> None:
    """Every seed with one system and then with the other."""
    prepare(asked)
    setting, swept = fastest_setting([TrlSetting.parse(text) for text in asked.trl], asked)
    record.facts |= {"trl_setting": str(setting), "trl_sweep_seconds": swept}
    record.total = 2 * len(asked.seeds)
    for seed in asked.seeds:
        for name in ("oncurve", "TRL"):
            record.add(apart(name, seed, setting, asked))
    for run in record.rows:
        reached = f"{run['seconds']:.1f} s, {run['steps']} steps" if run["reached"] else "never reached it"
        print(f"{run['system']:8s} seed {run['seed']}: {reached}")
