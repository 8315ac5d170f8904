"""The section of a recipe about the run: its length, batch, folder and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from oncurve.section import Fraction, Harmless, NonNegative, Section


class RunSection(Section):
    """Length, batch, folder, checkpoints."""

    steps: PositiveInt = 100
    """Steps of the run."""
    prompts_per_step: PositiveInt = 16
    """Prompts per step; times algorithm.group_size gives its completions."""
    refill_rounds: NonNegative = 0
    """Replace groups without signal, at most so many times per step (dynamic sampling)."""
    completions_per_update: PositiveInt | None = None
    """Completions per optimizer update; None: all of the step. Must divide them."""
    passes_per_step: PositiveInt = 1
    """Passes over the completions of a step, mu in the GRPO paper."""
    seed: NonNegative = 0
    """Seed of data order, sampling and adapters."""
    folder: Harmless[str] = "runs"
    """The run gets its own folder in this one."""
    name: Harmless[str | None] = None
    """Name of that folder; None: from recipe and time."""
    save_every_steps: Harmless[NonNegative] = 10
    """Steps between checkpoints; 0 saves only the final model."""
    model_type: Harmless[Literal["float32", "bfloat16"]] = "float32"
    """Type of the final model's weights. bfloat16 takes half the room, and is written through the copies that were
    trained and measured with (policy.rounding)."""
    keep_checkpoints: Harmless[NonNegative] = 2
    """Checkpoints to keep, besides the best and the final model; 0 keeps all."""
    keep_every_steps: Harmless[NonNegative] = 0
    """Also keep the checkpoint of every so many steps for good, to replay from; a multiple of save_every_steps. 0:
    none."""
    on_save_error: Harmless[Literal["stop", "continue"]] = "stop"
    """If a checkpoint cannot be written: stop, or continue and retry when the next is due."""
    grace_seconds: Harmless[PositiveFloat] = 25.0
    """Time to save after SIGTERM, SIGHUP, Ctrl-C or SIGUSR1; keep it below the scheduler's limit."""
    max_nonfinite_updates: Harmless[NonNegative] = 3
    """Stop after so many updates in a row with a loss or gradient that is not finite; 0: never."""
    on_kl_alarm: Harmless[Literal["warn", "return"]] = "warn"
    """If the KL runs away: warn, or return to a checkpoint and double algorithm.kl_coef."""
    rollouts_every_steps: Harmless[PositiveInt] = 10
    """Write the completions of every so many steps to the run folder."""
    record: Harmless[Literal["sampled", "all"]] = "sampled"
    """sampled: completions of every rollouts_every_steps; all: also the tokens, log-probabilities, rewards and
    advantages of every step, in `steps/`, from which `oncurve replay` and `oncurve regrade` work."""
    logprobs_of_prompts: Harmless[NonNegative] = 8
    """Prompts of a written step whose token log-probabilities are written too."""
    profile_trace_step: PositiveInt | None = None
    """Trace this step (the first is 1) with torch's profiler, and sum up where its time goes."""
    max_error_fraction: Harmless[Fraction] = 0.2
    """Stop if grading fails for more than this fraction of a step's completions."""
    track: Harmless[tuple[Literal["tensorboard", "wandb", "trackio"], ...] | None] = None
    """Trackers. None: those with a key in the environment (WANDB_API_KEY); []: none."""

    @model_validator(mode="after")
    def _check_milestones(self) -> RunSection:
        every, saved = self.keep_every_steps, self.save_every_steps
        if every and (not saved or every % saved):
            remedy = f"Set it to {-(-every // saved) * saved}" if saved else "Set run.save_every_steps, such as 10"
            raise ValueError(
                f"run.keep_every_steps is {every} and run.save_every_steps {saved}, so not every such step has a "
                f"checkpoint to keep. {remedy}"
            )
        return self

    @property
    def returns_on_kl(self) -> bool:
        """A KL that runs away sends the run back to a checkpoint."""
        return self.on_kl_alarm == "return"
