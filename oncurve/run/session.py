"""A run with its folder: the model is measured, trained, and measured again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from oncurve.constants import GIB
from oncurve.core.batch import Batch, collate
from oncurve.core.errors import RewardError, SamplerError
from oncurve.core.grading import RewardFunction
from oncurve.core.loop import train
from oncurve.core.policy import DevicePolicy
from oncurve.core.records import Prompt, Reward, SamplingParams
from oncurve.core.sampler import Sampler, SamplingRequest
from oncurve.doctor.diagnose import Watch
from oncurve.evaluate.analysis import analysis_markdown
from oncurve.evaluate.evaluate import evaluate
from oncurve.evaluate.evaluation import Evaluation, read_evaluation
from oncurve.model.row_budget import widths_of
from oncurve.observe.manifest import memory_gib, redact_tree
from oncurve.observe.progress import Progress
from oncurve.observe.record import RunFolder, read_metrics
from oncurve.observe.sinks import open_tracker
from oncurve.observe.tokens import TokenRecord
from oncurve.policy.final_model import MODEL_TYPES, write_model
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.rewards.terms import describe_correct, make_lenient_reward
from oncurve.rewards.weighted_sum import check_any_graded
from oncurve.run.builder import Parts
from oncurve.run.checkpointer import Checkpointer
from oncurve.run.guards import Guards, compare_policy
from oncurve.run.interruption import Interrupted, Interruption
from oncurve.run.model_paths import has_single_policy
from oncurve.run.rendered import Rendered
from oncurve.run.result import Result, Steps
from oncurve.run.services import Run
from oncurve.run.step_log import StepLog

if TYPE_CHECKING:
    from oncurve.data.demonstrations import Demonstration
    from oncurve.run.longest_row import LongestRows
    from oncurve.run.profiling import Profiler


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
        self.lenient = make_lenient_reward()

    def measure(self, prompts: list[Prompt], *, name: str, step: int) -> Evaluation:
        """Sample, grade, count."""
        self.sampler.load_weights(self.policy, version=step)

        def show(done: int, total: int) -> None:
            if self.progress is not None:
                self.progress.status(f"measuring {name}: {done}/{total}")

        evaluation = evaluate(
            prompts,
            self.sampler,
            self.reward_function,
            lenient_reward_function=self.lenient,
            params=self.params,
            samples_per_prompt=self.samples,
            name=name,
            step=step,
            on_progress=show,
        )
        return replace(evaluation, correct_means=self.correct_means)

    def close(self) -> None:
        """End the graders' processes."""
        self.lenient.close()


@dataclass(eq=False)
class Session:
    """A run with its folder: measured before, trained, measured after."""

    parts: Parts
    folder: RunFolder
    interruption: Interruption
    progress: Progress
    evaluator: Evaluator
    saver: Checkpointer
    """Writes and reads this run's checkpoints."""
    run: Run
    note: Callable[[str], None]
    """Says something that stays, on the screen and in the log."""
    pending: Mapping[str, float] | None = None
    """Metrics of the last step that still miss their measurement."""

    def steps(self, base: Evaluation | None = None) -> Steps:
        """Everything that is left to do; ``base`` is the measurement before training, where it was made before."""
        parts, run = self.parts, self.run
        with ExitStack() as stack:
            for closing in (self.evaluator, *parts.closing, self.saver, *([run.profiler] if run.profiler else [])):
                stack.callback(closing.close)
            stack.enter_context(self.progress)
            if base is None:
                base = self.measure_base()
            try:
                self.begin()
                for _ in train(parts.policy, parts.sampler, parts.data, parts.reward_function, parts.algorithm, run):
                    if run.last is not None:
                        with self.interruption.away():
                            yield run.last
                self.save_last()
                trained = self.measure_trained()
                self.tell_of_waiting()
            except (RewardError, SamplerError) as error:
                self.folder.log(f"stopped: {error}")
                self.folder.write_status(run.steps_done, "stopped")
                self.saver.save_marked()
                raise
            except GeneratorExit:  # whoever asks for the steps asks for no more
                self.leave(base)
                raise
            except Interrupted:
                return self.leave(base)
            return Result(self.folder.path, base, trained, is_interrupted=False)

    def begin(self) -> None:
        """Write what stands before the steps that are left: a first row, or the measurement of a step before them."""
        self.saver.mark(self.run.steps_done, pending=self.pending)
        if self.run.steps_done == 0:
            self.write_first_row()
        if self.pending is not None:
            self.run.finish(self.run.steps_done, dict(self.pending))

    def save_last(self) -> None:
        """Save the end of the last step, and wait until it is on the disk."""
        self.folder.sync()
        if self.parts.config.run.save_every_steps:
            self.saver.save_marked()
        self.saver.wait()
        self.interruption.check()

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

    def write_first_row(self) -> None:
        """The metrics before the first step."""
        path, processes = self.folder.path, self.parts.policy.processes
        if processes.broadcast_from_main(lambda: any(row["step"] == 0 for row in read_metrics(path))):
            return
        with self.interruption.interruptible():
            if self.parts.config.evaluation.every_steps:
                first = measure_during(self.evaluator, self.parts.prompts, 0)
            else:
                first = processes.broadcast_from_main(lambda: read_evaluation(path / "evaluations", "base").metrics())
        self.folder.write_metrics(0, first)

    def measure_trained(self) -> Evaluation:
        """The final model, on the disk and measured."""
        self.folder.write_status(self.run.steps_done, "measure")
        policy = self.parts.policy
        write_model(policy, self.folder.path / "model", MODEL_TYPES[self.parts.config.run.model_type])
        with self.interruption.interruptible():
            trained = self.evaluator.measure(self.parts.prompts.test, name="trained", step=self.run.steps_done)
        keep_evaluation(self.folder, trained)
        self.folder.write_status(self.run.steps_done, "finished")
        return trained

    def tell_of_waiting(self) -> None:
        """Say what look-ahead would have saved, where a run without it waited for servers."""
        rollouts, is_main = self.parts.config.rollouts, self.parts.policy.processes.is_main
        if not is_main or rollouts.type != "servers" or rollouts.staleness:
            return
        from oncurve.observe.ahead import tip_of_waiting  # lazy

        if (tip := tip_of_waiting(read_metrics(self.folder.path))) is not None:
            self.note(tip)

    def leave(self, base: Evaluation) -> Result:
        """Save the end of the last step that is whole; a step that was begun is done again."""
        self.folder.sync()
        self.folder.write_status(self.run.steps_done, "stopped")
        if self.saver.save_marked():
            ending = f"checkpoint saved after step {self.saver.last_saved}"
        else:
            ending = "the last checkpoint is used when the run is resumed"
        how = f"oncurve resume {self.folder.path}"
        if self.parts.objects.fingerprints:  # which no command has
            how = "resume() of the program's trainer, or train(resume_from_checkpoint=True) in a script for TRL"
        self.note(f"stopped; {ending}. Resume with: {how}")
        return Result(self.folder.path, base, None, is_interrupted=True, exit_code=self.interruption.exit_code)


def _make_guards(parts: Parts, note: Callable[[str], None]) -> Guards:
    """The guards that the recipe asks for."""
    section = parts.config.run
    return Guards(
        max_nonfinite=section.max_nonfinite_updates,
        watches_mismatch=has_single_policy(parts.config),
        is_exact=parts.config.rollouts.type == "engine" and parts.policy.compute_type in ("float32", "float64"),
        returns_on_kl=section.returns_on_kl,
        notify=note,
    )


def make_session(
    parts: Parts,
    folder: RunFolder,
    facts: Mapping[str, Any],
    interruption: Interruption,
    console: Console,
    *,
    first_step: int = 0,
) -> Session:
    """A run from its loaded parts, with what is logged, what is due and when: each is made here and nowhere else."""
    config, policy, section = parts.config, parts.policy, parts.config.run
    progress = Progress(section.steps, first_step=first_step, console=console)

    def note(text: str) -> None:
        progress.note(text)
        folder.log(text)

    interruption.notify = note
    if parts.servers is not None:
        parts.servers.notify = note
    if policy.processes.is_main:
        settings = redact_tree(config.model_dump(mode="json"))
        folder.tracker = open_tracker(folder.path, settings, first_step=first_step, notify=note)
    evaluator = make_evaluator(parts, progress)
    guards = _make_guards(parts, note)
    saver = Checkpointer(
        policy,
        parts.algorithm,
        parts.data,
        guards,
        folder.checkpoints,
        section=section,
        facts=facts,
        moves_reference=parts.moves_reference,
        ahead=parts.ahead.finished if parts.ahead is not None else lambda step: {},
        notify=note,
    )
    run = Run(
        make_log(parts, folder, progress, is_resumed=first_step > 0),
        total_steps=section.steps,
        completions_per_step=config.completions_per_step,
        completions_per_update=section.completions_per_update or config.completions_per_step,
        passes_per_step=section.passes_per_step,
        mask_truncated=config.algorithm.mask_truncated,
        refill_rounds=section.refill_rounds,
        rollouts_every_steps=section.rollouts_every_steps,
        tokens=make_token_record(parts),
        records_all=section.record == "all",
        seed=section.seed,
        guards=guards,
        interruption=interruption,
        every=((config.evaluation.every_steps, partial(measure_during, evaluator, parts.prompts)),),
        saver=saver,
        profiler=_make_profiler(parts, folder),
        compare=_make_comparison(parts, guards, note, folder),
        try_longest=_make_longest_rows(parts),
        steps_done=first_step,
    )
    return Session(parts, folder, interruption, progress, evaluator, saver, run, note)


def _make_comparison(
    parts: Parts, guards: Guards, note: Callable[[str], None], folder: RunFolder
) -> Callable[[DevicePolicy, Batch], None] | None:
    """The comparison of the first rollouts with the model's own forward pass; None where nothing is sampled."""
    if parts.config.sft is not None:
        return None
    is_exact = guards.is_exact and guards.watches_mismatch
    is_quiet = parts.config.model == "embedded"
    return partial(compare_policy, is_exact=is_exact, is_quiet=is_quiet, notify=note, write=folder.log)


CPU_SHARE = 0.125
"""Share of a machine's memory that the activations of a microbatch may take on a CPU without a try at the longest."""


def _make_longest_rows(parts: Parts) -> LongestRows | None:
    """A try at the longest rows that may come; None where it would show nothing.

    On a GPU memory that runs out is an error, whose message comes hours earlier. On a CPU the system ends the process
    without a word, and memory is seldom short: the longest rows are tried where the activations of a microbatch take
    more than ``CPU_SHARE`` of it by estimate. DeepSpeed's engine keeps the gradients that it has added up, and the rows
    of a supervised stage are as long in every step.
    """
    config, prompts, model = parts.config, parts.prompts, parts.policy.model
    if config.sft is not None or config.policy.parallel == "deepspeed":
        return None
    prompt_tokens = max(len(prompt.prompt_ids) for prompt in (*prompts.written, *prompts.test, *prompts.during))
    completion_tokens = config.rollouts.max_completion_tokens
    if model.device.type != "cuda":
        widths, memory = widths_of(model, torch.float32), memory_gib()
        tokens = max(config.policy.tokens_per_microbatch, prompt_tokens + completion_tokens)
        if memory is None or tokens * widths.layers * widths.token_bytes / GIB <= CPU_SHARE * memory:
            return None
    from oncurve.run.longest_row import LongestRows  # lazy

    return LongestRows(
        parts.policy,
        parts.algorithm,
        parts.sampler,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        prompts_per_step=config.run.prompts_per_step,
        group_size=config.algorithm.group_size,
        completions_per_update=config.run.completions_per_update or config.completions_per_step,
    )


def _make_profiler(parts: Parts, folder: RunFolder) -> Profiler | None:
    """The profiler of the step that the recipe names; None where it names none."""
    if (step := parts.config.run.profile_trace_step) is None:
        return None
    from oncurve.run.profiling import Profiler  # lazy

    return Profiler(folder.path, trace_step=step, is_main=parts.policy.processes.is_main)


def make_token_record(parts: Parts) -> TokenRecord:
    """The record of tokens for reports; their texts only where the tokenizer can say where they are."""
    tokenizer = parts.policy.tokenizer
    backend_tokenizer = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    return TokenRecord(backend_tokenizer, num_groups=parts.config.run.logprobs_of_prompts)


def make_evaluator(parts: Parts, progress: Progress) -> Evaluator:
    """The evaluator of the policy before, during and after training."""
    return Evaluator(
        parts.policy,
        parts.examining_sampler or parts.sampler,
        parts.examining_reward or parts.reward_function,
        params=parts.config.evaluation_sampling(),
        samples=parts.config.evaluation.samples,
        correct_means=parts.correct_means or describe_correct(parts.config.rewards),
        progress=progress,
    )


def make_log(parts: Parts, folder: RunFolder, progress: Progress, *, is_resumed: bool) -> StepLog:
    """The log of the steps."""
    config, processes = parts.config, parts.policy.processes
    resolved = redact_tree(config.model_dump(mode="json"))
    return StepLog(
        folder,
        progress,
        processes=processes,
        max_staleness_steps=config.rollouts.staleness,
        max_error_fraction=config.run.max_error_fraction,
        watcher=Watch(resolved, read_metrics(folder.path) if is_resumed and processes.is_main else ()),
        sampler_metrics=parts.servers.weight_metrics if parts.servers is not None else dict,
        is_supervised=config.sft is not None,
    )


def measure_during(evaluator: Evaluator, prompts: Rendered, step: int) -> dict[str, float]:
    """The validation in the middle of a run, as metrics."""
    started = time.perf_counter()
    metrics = evaluator.measure(prompts.during, name="during", step=step).metrics()
    if prompts.demonstrations_during:
        metrics["evaluation/loss"] = demonstrated_loss(evaluator.policy, prompts.demonstrations_during)
    return {**metrics, "time/evaluate_seconds": time.perf_counter() - started}


def demonstrated_loss(policy: TrainedPolicy, demonstrations: Sequence[Demonstration]) -> float:
    """Mean of -log p over all tokens of some demonstrations under the current weights, in nats."""
    from oncurve.run.demonstrated import DemonstrationSampler  # lazy

    prompts = [demonstration.prompt for demonstration in demonstrations]
    batch = collate(
        DemonstrationSampler(demonstrations).sample(SamplingRequest(prompts, 1)), torch.ones(len(prompts), 1)
    )
    logprobs = policy.annotate(batch, old=True, entropy=False, reference=False).old_logprobs
    assert logprobs is not None
    return -float(logprobs[batch.mask.to(logprobs.device)].mean())


def keep_evaluation(folder: RunFolder, evaluation: Evaluation) -> None:
    """Write an evaluation's examples and counts, and a page that shows some of every category."""
    analysis = analysis_markdown(evaluation)
    folder.write_evaluation(evaluation.name, evaluation.rows(), evaluation.summary(), analysis=analysis)
