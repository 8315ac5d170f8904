"""A run with its folder: the model is measured, trained, and measured again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from rich.console import Console

from oncurve.data.collate import collate
from oncurve.data.demonstrations import Demonstration
from oncurve.doctor.live import Watch
from oncurve.errors import RewardError, SamplerError
from oncurve.evaluate.analysis import analysis_markdown
from oncurve.evaluate.evaluate import evaluate
from oncurve.evaluate.evaluation import Evaluation, read_evaluation
from oncurve.observe.progress import Progress
from oncurve.observe.record import RunFolder, read_metrics
from oncurve.observe.redact import redact_tree
from oncurve.observe.sinks import open_tracker
from oncurve.observe.tokens import TokenRecord
from oncurve.policy.final_model import write_model
from oncurve.policy.policy import TrainedPolicy
from oncurve.records import Prompt, Reward
from oncurve.rewards.base import RewardFunction, check_any_graded
from oncurve.rewards.terms import describe_correct, make_loose_reward
from oncurve.run.checkpointer import Checkpointer
from oncurve.run.demonstrated import DemonstrationSampler
from oncurve.run.guards import Guards
from oncurve.run.interruption import Interrupted, Interruption
from oncurve.run.loop import train
from oncurve.run.parts import Parts
from oncurve.run.profiling import Profiler
from oncurve.run.rendered import Rendered
from oncurve.run.result import Result, Steps
from oncurve.run.services import Run, Step
from oncurve.sample.base import Sampler, SamplingParams


class Evaluator:
    """Measures the policy on prompts, always with the same decoding."""

    def __init__(
        self,
        policy: TrainedPolicy,
        sampler: Sampler,
        reward_function: RewardFunction,
        *,
        params: SamplingParams,
        samples: int,
        correct_means: str = "",
        progress: Progress | None = None,
    ) -> None:
        self.correct_means = correct_means
        self.policy, self.sampler, self.reward_function = policy, sampler, reward_function
        self.params, self.samples, self.progress = params, samples, progress
        self.loose = make_loose_reward()

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
            correct_means=self.correct_means,
            on_progress=show,
        )

    def close(self) -> None:
        """End the graders' processes."""
        self.loose.close()


class Session:
    """A run with its folder: measured before, trained, measured after."""

    def __init__(
        self,
        parts: Parts,
        folder: RunFolder,
        facts: Mapping[str, Any],
        interruption: Interruption,
        console: Console,
        *,
        first_step: int = 0,
    ) -> None:
        self.parts, self.folder, self.interruption = parts, folder, interruption
        self.progress = Progress(parts.config.run.steps, first_step=first_step, console=console)
        interruption.notify = self.note
        if parts.servers is not None:
            parts.servers.notify = self.note
        self.pending: Mapping[str, float] | None = None
        """Metrics of the last step that still miss their measurement."""
        self.evaluator = Evaluator(
            parts.policy,
            parts.examining_sampler or parts.sampler,
            parts.examining_reward or parts.reward_function,
            params=parts.config.evaluation_sampling(),
            samples=parts.config.evaluation.samples,
            correct_means=describe_correct(parts.config.rewards),
            progress=self.progress,
        )
        self.during = partial(measure_during, self.evaluator, parts.prompts)
        self.run = make_run(self, facts, first_step)

    @property
    def saver(self) -> Checkpointer:
        """What writes and reads this run's checkpoints."""
        assert self.run.saver is not None
        return self.run.saver

    def note(self, text: str) -> None:
        """Say something that stays, on the screen and in the log."""
        self.progress.note(text)
        self.folder.log(text)

    def steps(self, base: Evaluation | None = None) -> Steps:
        """Everything that is left to do; ``base`` is the measurement before training, where it was made before."""
        with ExitStack() as stack:
            for closing in (self.evaluator, *self.parts.closing, self.saver):
                stack.callback(closing.close)
            if self.run.profiler is not None:
                stack.callback(self.run.profiler.close)
            stack.enter_context(self.progress)
            if base is None:
                base = self.measure_base()
            try:
                yield from self.train()
            except (RewardError, SamplerError) as error:
                self.folder.log(f"stopped: {error}")
                self.folder.write_status(self.run.steps_done, "stopped")
                self.saver.save_marked()
                raise
            except GeneratorExit:  # whoever asks for the steps asks for no more
                self.leave(base)
                raise
            except Interrupted:
                return self.leave(base)
            try:
                trained = self.measure_trained()
            except Interrupted:
                return self.leave(base)
            return Result(self.folder.path, base, trained, is_interrupted=False)

    def measure_base(self) -> Evaluation:
        """The model before training, and a checkpoint without weights from which a run that dies early goes on."""
        if self.parts.config.run.save_every_steps and self.run.steps_done == 0:
            self.saver.mark(0)
            self.saver.save()
            self.saver.wait()
        self.folder.write_status(0, "measure")
        with self.interruption.interruptible():
            base = self.evaluator.measure(self.parts.prompts.test, name="base", step=0)
        keep_evaluation(self.folder, base)
        check_any_graded(
            [Reward(example.reward, error=example.error, detail=example.detail) for example in base.examples],
            where="the model before training",
        )
        return base

    def train(self) -> Iterator[Step]:
        """The steps that are left, and a checkpoint of the last one."""
        self.saver.mark(self.run.steps_done, pending=self.pending)
        if self.run.steps_done == 0:
            self.write_first_row()
        if self.pending is not None:
            self.run.finish_pending(self.pending)
        parts = self.parts
        loop = train(parts.policy, parts.sampler, parts.data, parts.reward_function, parts.algorithm, self.run)
        for _ in loop:
            if self.run.last is not None:
                with self.interruption.away():
                    yield self.run.last
        self.folder.sync()
        if parts.config.run.save_every_steps:
            self.saver.save_marked()
        self.saver.wait()
        self.interruption.check()

    def write_first_row(self) -> None:
        """The metrics before the first step."""
        path, processes = self.folder.path, self.parts.policy.processes
        if processes.broadcast_from_main(lambda: any(row["step"] == 0 for row in read_metrics(path))):
            return
        with self.interruption.interruptible():
            if self.parts.prompts.during:
                first = self.during(0)
            else:
                first = processes.broadcast_from_main(lambda: read_evaluation(path / "evaluations", "base").metrics())
        self.folder.write_metrics(0, first)

    def measure_trained(self) -> Evaluation:
        """The final model, on the disk and measured."""
        self.folder.write_status(self.run.steps_done, "measure")
        policy = self.parts.policy
        write_model(policy, self.folder.path / "model")  # by all processes
        with self.interruption.interruptible():
            trained = self.evaluator.measure(self.parts.prompts.test, name="trained", step=self.run.steps_done)
        keep_evaluation(self.folder, trained)
        self.folder.write_status(self.run.steps_done, "finished")
        return trained

    def leave(self, base: Evaluation) -> Result:
        """Save the end of the last step that is whole; a step that was begun is done again."""
        self.folder.sync()
        self.folder.write_status(self.run.steps_done, "stopped")
        if self.saver.save_marked():
            ending = f"checkpoint saved after step {self.saver.last_saved}"
        else:
            ending = "the last checkpoint is used when the run is resumed"
        self.note(f"stopped; {ending}. Resume with: oncurve resume {self.folder.path}")
        return Result(self.folder.path, base, None, is_interrupted=True, exit_code=self.interruption.exit_code)


def make_run(session: Session, facts: Mapping[str, Any], first_step: int) -> Run:
    """The services around the loop, with what is due and when: each is made here and nowhere else."""
    parts, folder = session.parts, session.folder
    config, policy = parts.config, parts.policy
    resolved, is_main = redact_tree(config.model_dump(mode="json")), policy.processes.is_main
    if is_main:
        folder.tracker = open_tracker(folder.path, resolved, first_step=first_step, notify=session.note)
    guards = Guards(
        max_nonfinite=config.run.max_nonfinite_updates,
        returns_on_kl=config.run.on_kl_alarm == "return",
        notify=session.note,
    )
    return Run(
        folder,
        session.progress,
        total_steps=config.run.steps,
        completions_per_step=config.completions_per_step,
        completions_per_update=config.run.completions_per_update or config.completions_per_step,
        passes_per_step=config.run.passes_per_step,
        mask_truncated=config.algorithm.mask_truncated,
        refill_rounds=config.run.refill_rounds,
        max_staleness_steps=config.rollouts.staleness,
        max_error_fraction=config.run.max_error_fraction,
        rollouts_every_steps=config.run.rollouts_every_steps,
        seed=config.run.seed,
        steps_done=first_step,
        processes=policy.processes,
        guards=guards,
        interruption=session.interruption,
        tokens=TokenRecord(
            policy.tokenizer.backend_tokenizer if policy.tokenizer.is_fast else None,
            num_groups=config.run.logprobs_of_prompts,
        ),
        every=((config.evaluation.every_steps, session.during),),
        saver=Checkpointer(
            policy,
            parts.algorithm,
            parts.data,
            guards,
            folder.checkpoints,
            facts=facts,
            every_steps=config.run.save_every_steps,
            keep=config.run.keep_checkpoints,
            on_error=config.run.on_save_error,
            moves_reference=parts.moves_reference,
            notify=session.note,
        ),
        watcher=Watch(resolved, read_metrics(folder.path) if first_step and is_main else ()),
        profiler=Profiler(folder.path, trace_step=traced, is_main=is_main)
        if (traced := config.run.profile_trace_step) is not None
        else None,
        sampler_metrics=parts.servers.weight_metrics if parts.servers is not None else dict,
        is_supervised=config.sft is not None,
    )


def measure_during(evaluator: Evaluator, prompts: Rendered, step: int) -> dict[str, float]:
    """The held-out measurement in the middle of a run, as metrics."""
    started = time.perf_counter()
    metrics = evaluator.measure(prompts.during, name="during", step=step).metrics()
    if prompts.shown_during:
        metrics["evaluation/loss"] = demonstrated_loss(evaluator.policy, prompts.shown_during)
    return {**metrics, "time/evaluate_seconds": time.perf_counter() - started}


def demonstrated_loss(policy: TrainedPolicy, shown: Sequence[Demonstration]) -> float:
    """Mean of -log p over all tokens of some demonstrations under the current weights, in nats."""
    prompts = [one.prompt for one in shown]
    batch = collate(DemonstrationSampler(shown).sample(prompts, 1), torch.ones(len(prompts), 1))
    logprobs = policy.annotate(batch, old=True, entropy=False, reference=False).old_logprobs
    assert logprobs is not None
    return -float(logprobs[batch.mask.to(logprobs.device)].mean())


def keep_evaluation(folder: RunFolder, evaluation: Evaluation) -> None:
    """Write an evaluation's examples and counts, and a page that shows some of every category."""
    analysis = analysis_markdown(evaluation)
    folder.write_evaluation(evaluation.name, evaluation.rows(), evaluation.summary(), analysis=analysis)
