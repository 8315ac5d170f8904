"""How are log-probabilities computed, and how are the weights moved?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from oncurve.algorithm.reference import move_reference
from oncurve.batch import Batch
from oncurve.errors import TrainingError
from oncurve.records import Mean
from oncurve.train.forward import completion_logprobs, enable_packing

ComputeType = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule, which is a pure function of the number of the update."""

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.99)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    """The gradient is scaled down to this norm; 0 leaves it alone."""
    warmup_updates: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_updates: int = 1

    def rate(self, update: int) -> float:
        """The learning rate of an update, counted from 0: warm-up, then the schedule down to zero."""
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / (self.warmup_updates + 1)
        if self.schedule == "constant":
            return self.learning_rate
        span = max(self.total_updates - self.warmup_updates, 1)
        done = min((update - self.warmup_updates) / span, 1.0)
        share = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * share


class Policy:
    """The model in training: weights and optimizer state in float32, arithmetic in the compute type.

    bfloat16 has 8 bits of mantissa, so that an update of 1e-6 to a weight of 0.02 is lost in it: the master weights
    stay in float32 and only the products are done in the smaller type.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        optimizer: OptimizerSettings,
        temperature: float = 1.0,
        compute_type: ComputeType = "float32",
        tokens_per_microbatch: int = 8192,
        gradient_checkpointing: bool = False,
        packing: bool = True,
        reference: PreTrainedModel | None = None,
    ) -> None:
        self._model, self._tokenizer, self.reference = model, tokenizer, reference
        self.settings, self.temperature = optimizer, temperature or 1.0
        self.compute_type: ComputeType = compute_type
        self.tokens_per_microbatch = tokens_per_microbatch
        self.is_packed = packing and enable_packing(model) and (reference is None or enable_packing(reference))
        self._recomputed = recomputable_layers(model) if gradient_checkpointing else []
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained,
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.num_updates = 0

    @property
    def model(self) -> PreTrainedModel:
        """The module with the current weights."""
        return self._model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Text to tokens and back."""
        return self._tokenizer

    def compute(self) -> AbstractContextManager[object]:
        """The arithmetic of the compute type, for training and for sampling in process."""
        return compute_context(self._model.device, self.compute_type)

    def logprobs(self, batch: Batch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """log pi_theta(o_t | q, o_<t) and the entropy of each token's distribution; 0 outside the mask."""
        with self.compute(), recomputing(self._recomputed):
            return completion_logprobs(self._model, batch, temperature=self.temperature, packed=self.is_packed)

    @torch.no_grad()
    def annotate(self, batch: Batch, *, old: bool, entropy: bool, reference: bool) -> Batch:
        """The batch with what stays fixed during its updates, only what is asked for."""
        if old or entropy:
            logprobs, entropies = self._fixed(self._model, batch)
            batch = replace(batch, old_logprobs=logprobs if old else None, old_entropy=entropies if entropy else None)
        if reference:
            if self.reference is None:
                raise TrainingError("a KL term needs a reference, and this policy was made without one")
            batch = replace(batch, ref_logprobs=self._fixed(self.reference, batch)[0])
        return batch

    def _fixed(self, model: PreTrainedModel, batch: Batch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        logprobs, entropies = torch.zeros_like(batch.sampler_logprobs), torch.zeros_like(batch.sampler_logprobs)
        for rows in batch.plan_microbatches(self.tokens_per_microbatch, share_prompts=self.is_packed):
            with compute_context(model.device, self.compute_type):
                part = completion_logprobs(
                    model, batch.select(rows), temperature=self.temperature, packed=self.is_packed
                )
            for whole, piece in zip((logprobs, entropies), part, strict=True):
                whole[rows, : piece.shape[1]] = piece.to(whole)
        return logprobs, entropies

    def move_reference(self, share: float) -> None:
        """Let the reference follow the policy: by nothing (0), by a share, or all the way (1)."""
        if share and self.reference is not None:
            move_reference(self.reference, self._model, share=share)

    def microbatches(self, update: Batch) -> Iterator[Batch]:
        """The rows of an update in parts of at most ``tokens_per_microbatch`` tokens, counted as they are computed."""
        return update.split_tokens(self.tokens_per_microbatch, share_prompts=self.is_packed)

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of a microbatch to that of the update."""
        loss.backward()

    def update(self) -> dict[str, Mean]:
        """Clip the gradient, move the weights, forget the gradient. A gradient that is not finite stops the run.

        Without any gradient (no group of the update has a signal) nothing moves, and the update is counted as skipped.
        """
        if all(parameter.grad is None for parameter in self._trained()):
            return {"policy/skipped_updates": Mean(1, 1), "policy/loss": Mean(0, 1)}
        rate = self.settings.rate(self.num_updates)
        limit = self.settings.max_gradient_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_(self._trained(), limit))
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient of update {self.num_updates} has norm {norm}; no weight was changed. "
                f"Lower optimizer.learning_rate, or look for a reward that is not finite"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        return {
            "policy/gradient_norm": Mean(norm, 1),
            "policy/learning_rate": Mean(rate, 1),
            "policy/skipped_updates": Mean(0, 1),
            "policy/loss": Mean(0, 1),  # the microbatches gave the sum
        }

    def _trained(self) -> Iterable[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]


def recomputable_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The layers of a model that may keep only their inputs and run again in the backward pass.

    Raises TrainingError for a model without such layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise TrainingError(
            f"{type(model).__name__} cannot recompute its activations. Set policy.gradient_checkpointing to false"
        )
    return layers


@contextmanager
def recomputing(layers: Sequence[GradientCheckpointingLayer]) -> Iterator[None]:
    """While it lasts, what these layers compute will be computed again in the backward pass.

    The models' own switch for this works in training mode only, and that would bring dropout with it.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own again


def compute_context(device: torch.device, compute_type: ComputeType) -> AbstractContextManager[object]:
    """Autocast to a half-width type; nothing for the full-width ones, whose weights have that type already."""
    if compute_type in ("float32", "float64"):
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, compute_type))
