"""The sections of a recipe about the model in training: the policy, its adapter and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.section import CountsWith, NonNegative, Section

SEEN_AT_ONCE = 1.5
"""Updates from which on it is worth saying how long rounding to the nearest hides them."""
TRIAL_UPDATES = 10
"""A run of fewer tries a recipe, whose warm-up may be longer."""
USUAL_RATES = ((20_000_000, 1e-4), (300_000_000, 1e-5))
"""Up to so many trained weights, the learning rate of AdamW to begin with; above them 1e-6."""


Extension = Literal["stretch", "restart", "hold"]


class OptimizerSettings(Section):
    """The optimizer and its schedule."""

    type: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw_8bit keeps the moments in 8 bits, through bitsandbytes. muon: Muon for the matrices of the layers, AdamW
    for the rest; for training from random weights."""
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    """About how much an update moves each weight; 0 moves none."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the mean of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the mean square."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, of all trained weights but biases and those of norms."""
    max_gradient_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip the gradient to this norm; 0 is off."""
    warmup_updates: NonNegative = 0
    """Updates of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to 0."""
    extension: Extension | None = None
    """The schedule of a run that is resumed with more updates: stretch, as if it had been planned so;
    restart, warm-up and schedule again over the new ones; hold, the last planned rate. None: it is asked for."""
    planned_updates: tuple[PositiveInt, ...] = ()
    """Updates that earlier schedules of an extended run went up to; a resume writes it."""

    @property
    def betas(self) -> tuple[float, float]:
        """Both as torch takes them."""
        return self.beta1, self.beta2

    @property
    def adam_options(self) -> dict[str, Any]:
        """Options of an Adam of any library, before the schedule."""
        return {"lr": self.learning_rate, "betas": self.betas, "eps": self.epsilon}

    @property
    def muon_options(self) -> dict[str, Any]:
        """Options of torch's Muon, before the schedule."""
        return {"lr": self.learning_rate, "weight_decay": self.weight_decay}

    def rate_warning(self, weights: int, *, is_adapter: bool, updates: int) -> str | None:
        """A warning of a rate below a tenth of what is usual for so many weights, or of a warm-up that is longer than a
        run of so many updates; None for other rates, and of the warm-up in a trial of a recipe."""
        if self.learning_rate == 0:
            return "warning: optimizer.learning_rate is 0: no weight moves, and the model stays as it is"
        if TRIAL_UPDATES < updates <= self.warmup_updates:
            return (
                f"warning: optimizer.warmup_updates={self.warmup_updates} and the run has {updates} updates: its last "
                f"has a rate of {self.rate(updates - 1, updates):.3g}, and optimizer.learning_rate="
                f"{self.learning_rate:g} is never reached. Shorten the warm-up, or train longer"
            )
        if self.type == "muon":
            return None
        usual = 1e-5 if is_adapter else next((rate for most, rate in USUAL_RATES if weights <= most), 0.0)
        if self.learning_rate > 0.1 * usual:
            return None
        return (
            f"warning: at optimizer.learning_rate={self.learning_rate:g} the {weights:,} trained weights may hardly "
            f"move. It is a rate for a billion weights; begin with {usual:g}"
        )

    def hidden_warning(self, steps_until_seen: Callable[[float], float | None]) -> str | None:
        """A warning of updates that rounding to the nearest hides for a while, from the updates that a rate needs to be
        seen; None where they are seen at once."""
        steps = steps_until_seen(self.learning_rate)
        if steps is None or steps < SEEN_AT_ONCE:
            return None
        return (
            f"warning: policy.rounding is nearest, and at optimizer.learning_rate={self.learning_rate:g} it takes "
            f"about {steps:.0f} updates in one direction until half of the weights that sample have changed. Set "
            f"policy.rounding=dither, which loses no update"
        )

    def rate_of(self, updates: int) -> float:
        """The learning rate of so many updates together."""
        return self.learning_rate * updates

    def rate(self, update: int, total_updates: int) -> float:
        """The learning rate of an update, counted from 0: warm-up, then the schedule down to zero at the last.

        In an extended run each schedule goes from the end of the one before to its own.
        """
        if self.planned_updates and self.extension == "hold":
            update, total_updates = min(update, self.planned_updates[0] - 1), self.planned_updates[0]
        elif self.planned_updates and self.extension == "restart":
            start = max((end for end in self.planned_updates if end <= update), default=0)
            end = min((end for end in self.planned_updates if end > update), default=total_updates)
            update, total_updates = update - start, end - start
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / (self.warmup_updates + 1)
        if self.schedule == "constant":
            return self.learning_rate
        span = max(total_updates - self.warmup_updates, 1)
        done = min((update - self.warmup_updates) / span, 1.0)
        share = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * share


class LoraSettings(Section):
    """A product of two thin matrices beside each chosen linear layer, W x + alpha / rank B A x (arXiv:2106.09685): a
    hundredth of the weights is trained, and the model under them is frozen."""

    rank: PositiveInt = 16
    """Width of the two matrices."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the adapter's inputs dropped in training passes."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Endings of layer names, such as [q_proj, v_proj]; all-linear is every linear layer but the head that
    a text goes through. Of experts, it is what peft takes; the log says which layers have an adapter."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained too; only none leaves the base unchanged."""


class PolicySection(Section):
    """The model in training."""

    lora: LoraSettings | None = None
    """{} trains an adapter with the defaults; None trains all weights."""
    quantization: Literal["nf4", "int8"] | None = None
    """Keep the frozen weights under an adapter in 4 or 8 bits (bitsandbytes)."""
    parallel: Literal["auto", "none", "ddp", "data_parallel", "fsdp", "deepspeed"] = "auto"
    """How several processes share the model. ddp (older name data_parallel): each has all of it. fsdp: sharded, with
    a copy to sample from. deepspeed: as its file says. auto: ddp for several processes."""
    deepspeed: Annotated[str | None, CountsWith("parallel", ("deepspeed",))] = None
    """JSON file for DeepSpeed; "auto" in it takes the recipe's value. None: ZeRO-2."""
    reshard_after_forward: Annotated[bool, CountsWith("parallel", ("fsdp",))] = True
    """fsdp: true frees a block's weights until its backward pass (ZeRO-3), false keeps them (ZeRO-2)."""
    shard_degree: Annotated[Annotated[int, Field(ge=2)] | None, CountsWith("parallel", ("fsdp",))] = None
    """fsdp: weights are cut over so many processes, such as the GPUs of a node, and gradients added up between these
    groups (HSDP): less traffic between nodes, more memory. None: over all processes."""
    offload: Annotated[bool, CountsWith("parallel", ("fsdp", "deepspeed"))] = False
    """fsdp: weights, gradients and optimizer state in CPU memory. deepspeed: optimizer state."""
    timeout_seconds: PositiveFloat = 1800.0
    """Processes wait for one that works as long as it takes. The run ends when none of them moved on for so long."""
    silent_seconds: PositiveFloat = 60.0
    """A process without a heartbeat for so long counts as dead, and the others end."""
    offload_activations: bool = False
    """Keep activations in CPU memory: less GPU memory, slower."""

    compute_type: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Type of the arithmetic; weights and optimizer stay in float32. auto: bfloat16 on a GPU, float32 on a CPU.
    float16 has three more digits and a small range, so that the loss is scaled; slow on most CPUs."""
    rounding: Literal["dither", "nearest"] = "dither"
    """Copies of the weights in a 16-bit compute_type. dither: each weight is rounded up or down by a threshold of its
    own, fixed for the run, so that the copies are right on average and no update is lost. nearest: as elsewhere."""
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
