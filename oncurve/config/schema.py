"""Every key of a recipe, with its unit, meaning and default.

A recipe holds only what differs from these defaults. Nothing below ``wiring`` sees these classes. Sections
that are settings as they are are in ``oncurve/settings.py``. A key that changes no number of a run is ``Harmless``.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, cast

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.config.algorithm import AlgorithmSection
from oncurve.config.data import Data, with_type
from oncurve.config.rewards import R1ZeroReward, Reward
from oncurve.config.rollouts import RolloutSection
from oncurve.settings import Fraction, Harmless, LoraSettings, NonNegative, OptimizerSettings, Section


class EvaluationSection(Section):
    """Evaluation before, during and after the run."""

    data: Data | None = None
    """Other problems for evaluation; None holds out some of the training data."""
    num_prompts: PositiveInt = 500
    """Problems before and after the run, held out if ``data`` is None; at most a fifth of a small file."""
    split_seed: NonNegative = 0
    """Which rows are held out. Independent of run.seed, so that seeds are tested on the same problems."""
    every_steps: NonNegative = 0
    """Also evaluate after every so many steps; 0: only before and after the run."""
    num_prompts_during: PositiveInt = 100
    """Problems during the run."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling where the temperature is above 0."""
    samples: PositiveInt = 1
    """Completions per problem; more than one needs a temperature above 0."""


class PolicySection(Section):
    """The model in training."""

    lora: LoraSettings | None = None
    """{} trains an adapter with the defaults; None trains all weights."""
    quantization: Literal["nf4", "int8"] | None = None
    """Keep the frozen weights under an adapter in 4 or 8 bits (bitsandbytes)."""
    parallel: Literal["auto", "none", "ddp", "data_parallel", "fsdp", "deepspeed"] = "auto"
    """How several processes share the model. ddp (older name data_parallel): each has all of it. fsdp: sharded, with
    a copy to sample from. deepspeed: as its file says. auto: ddp for several processes."""
    deepspeed: str | None = None
    """JSON file for DeepSpeed; "auto" in it takes the recipe's value. None: ZeRO-2."""
    reshard_after_forward: bool = True
    """fsdp: true frees a block's weights until its backward pass (ZeRO-3), false keeps them (ZeRO-2)."""
    offload: bool = False
    """fsdp: weights, gradients and optimizer state in CPU memory. deepspeed: optimizer state."""
    timeout_seconds: PositiveFloat = 1800.0
    """Longest wait of one process for another."""
    silent_seconds: PositiveFloat = 60.0
    """A process without a heartbeat for so long counts as dead, and the others end."""
    offload_activations: bool = False
    """Keep activations in CPU memory: less GPU memory, slower."""

    compute_type: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Type of the arithmetic; weights and optimizer stay in float32. auto: bfloat16 on a GPU, float32 on a CPU.
    float16: sampling and evaluation only."""
    device: str = "auto"
    """auto uses a GPU if there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    tokens_per_microbatch: PositiveInt = 8192
    """Tokens per forward and backward pass."""
    packing: bool = True
    """No padding, and each prompt once per group; false pads every row."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; only for authors you trust."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hugging Face Hub."""


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
    keep_checkpoints: Harmless[PositiveInt] = 2
    """Checkpoints to keep, besides the best and the final model."""
    on_save_error: Harmless[Literal["stop", "continue"]] = "stop"
    """If a checkpoint cannot be written: stop, or continue and retry when the next is due."""
    grace_seconds: Harmless[PositiveFloat] = 25.0
    """Time to save after SIGTERM, Ctrl-C or SIGUSR1; keep it below the scheduler's limit."""
    max_nonfinite_updates: Harmless[NonNegative] = 3
    """Stop after so many updates in a row with a loss or gradient that is not finite; 0: never."""
    on_kl_alarm: Harmless[Literal["warn", "return"]] = "warn"
    """If the KL runs away: warn, or return to a checkpoint and double algorithm.kl_coef."""
    rollouts_every_steps: Harmless[PositiveInt] = 10
    """Write the completions of every so many steps to the run folder."""
    logprobs_of_prompts: Harmless[NonNegative] = 8
    """Prompts of a written step whose token log-probabilities are written too."""
    profile_trace_step: PositiveInt | None = None
    """Trace this step (the first is 1) with torch's profiler, and sum up where its time goes."""
    max_error_fraction: Harmless[Fraction] = 0.2
    """Stop if grading fails for more than this fraction of a step's completions."""
    track: Harmless[tuple[Literal["tensorboard", "wandb", "trackio"], ...] | None] = None
    """Trackers. None: those with a key in the environment (WANDB_API_KEY); []: none."""


SUPERVISED = {"type": "rft", "group_size": 1}
"""The loss of a supervised stage: the mean of -log p over all tokens of an update's demonstrations."""


class SftSection(Section):
    """Supervised fine-tuning on completions in the data; `oncurve sft` sets it."""

    epochs: PositiveFloat | None = None
    """Passes over the training rows, which set run.steps; None: run.steps counts."""
    train_on: Literal["assistant", "last"] = "assistant"
    """Rows of messages: learn all assistant messages, or only the last."""
    max_tokens: PositiveInt | None = None
    """Drop and count longer rows; None: the model's context."""


class Config(Section):
    """A whole recipe."""

    model: str
    """A causal language model: folder, run or Hugging Face Hub name; "embedded" is the small one in this package."""
    data: Data
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)] = (R1ZeroReward(),)
    algorithm: AlgorithmSection = AlgorithmSection()
    rollouts: RolloutSection = RolloutSection()
    policy: PolicySection = PolicySection()
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSection = EvaluationSection()
    run: RunSection = RunSection()
    sft: SftSection | None = None
    """With this section the recipe is a supervised stage: completions come from the data, and keys of algorithm count
    for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _supervise(cls, tree: object) -> object:
        """A supervised stage is rejection sampling with completions that are there, all of them right."""
        if not isinstance(tree, dict):
            return tree
        keys = cast("dict[str, object]", tree)
        return keys if keys.get("sft") is None else {**keys, "algorithm": SUPERVISED}

    def steps_over(self, num_rows: int) -> int:
        """Steps of a run over so many training rows: as ``sft.epochs`` asks for, else ``run.steps``."""
        if self.sft is None or self.sft.epochs is None:
            return self.run.steps
        return max(1, math.ceil(self.sft.epochs * num_rows / self.run.prompts_per_step))

    @property
    def has_default_reward(self) -> bool:
        """It names no reward, and something is graded."""
        return self.sft is None and "rewards" not in self.model_fields_set

    @property
    def completions_per_step(self) -> int:
        """Prompts times group size."""
        return self.run.prompts_per_step * self.algorithm.group_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates on one batch of rollouts."""
        per_pass = self.completions_per_step // (self.run.completions_per_update or self.completions_per_step)
        return per_pass * self.run.passes_per_step

    @model_validator(mode="before")
    @classmethod
    def _infer_types(cls, tree: object) -> object:
        """A data file says by its ending what it is."""
        if not isinstance(tree, dict):
            return tree
        known = dict(cast("dict[str, object]", tree))
        known["data"] = with_type(known["data"]) if "data" in known else None
        if known["data"] is None:
            del known["data"]
        evaluation = known.get("evaluation")
        if isinstance(evaluation, dict) and "data" in evaluation:
            section = cast("dict[str, object]", evaluation)
            known["evaluation"] = {**section, "data": with_type(section["data"])}
        return known

    @model_validator(mode="after")
    def _check_batch(self) -> Config:
        size = self.run.completions_per_update
        if size and self.completions_per_step % size:
            fitting = [n for n in range(1, self.completions_per_step + 1) if self.completions_per_step % n == 0]
            nearest = min(fitting, key=lambda n: abs(n - size))
            raise ValueError(
                f"run.completions_per_update is {size}, which does not divide the {self.completions_per_step} "
                f"completions of a step (run.prompts_per_step {self.run.prompts_per_step} x algorithm.group_size "
                f"{self.algorithm.group_size}). The nearest that does is {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _check_transfer(self) -> Config:
        if self.rollouts.transfer == "nccl" and self.policy.lora is not None:
            raise ValueError(
                "rollouts.transfer is nccl, which sends whole weights, and policy.lora trains an adapter, a hundredth "
                "of them. Set `rollouts.transfer=fetch`"
            )
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> Config:
        if self.rollouts.staleness and (self.data.retire_above is not None or self.data.prefer_half_solved):
            raise ValueError(
                "rollouts.staleness is 1, which chooses the prompts of a step before the step before it is graded, and "
                "data.retire_above and data.prefer_half_solved need those grades. Set `rollouts.staleness=0`, or "
                "`data.retire_above=null data.prefer_half_solved=false`"
            )
        return self

    @model_validator(mode="after")
    def _check_deepspeed(self) -> Config:
        if self.policy.deepspeed is not None and self.policy.parallel != "deepspeed":
            raise ValueError(
                f"policy.deepspeed names a file, but policy.parallel is {self.policy.parallel}. Set it to deepspeed, "
                f"or leave the file out"
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Config:
        if self.policy.quantization and self.policy.lora is None:
            raise ValueError(
                f"policy.quantization is {self.policy.quantization}, and weights of few bits cannot be trained. "
                f"Set policy.lora as well, such as policy.lora.rank=16, or leave quantization out"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> Config:
        if self.evaluation.samples > 1 and self.evaluation.temperature == 0:
            raise ValueError(
                f"evaluation.samples is {self.evaluation.samples} at evaluation.temperature 0, which would sample the "
                f"same completion each time. Set the temperature above 0 or the samples to 1"
            )
        return self
