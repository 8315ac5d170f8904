"""How are log-probabilities computed, and how are the weights moved?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.algorithm.logprobs import from_hidden, from_logits
from oncurve.batch import Batch
from oncurve.errors import TrainingError
from oncurve.records import Mean

ComputeType = Literal["float32", "bfloat16", "float16", "float64"]


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
        reference: PreTrainedModel | None = None,
    ) -> None:
        self._model, self._tokenizer, self.reference = model, tokenizer, reference
        self.settings, self.temperature = optimizer, temperature or 1.0
        self.compute_type: ComputeType = compute_type
        self.tokens_per_microbatch = tokens_per_microbatch
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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
        with self.compute():
            return completion_logprobs(self._model, batch, temperature=self.temperature)

    @torch.no_grad()
    def annotate(self, batch: Batch, *, old: bool, reference: bool) -> Batch:
        """The batch with log-probabilities that stay fixed during its updates, only those that are asked for."""
        if old:
            batch = replace(batch, old_logprobs=self._fixed_logprobs(self._model, batch))
        if reference:
            if self.reference is None:
                raise TrainingError("a KL term needs a reference, and this policy was made without one")
            batch = replace(batch, ref_logprobs=self._fixed_logprobs(self.reference, batch))
        return batch

    def _fixed_logprobs(self, model: PreTrainedModel, batch: Batch) -> Float[Tensor, "B T"]:
        result = torch.zeros_like(batch.sampler_logprobs)
        places = torch.arange(len(batch))
        for part in replace(batch, group_ids=places).split_tokens(self.tokens_per_microbatch):
            with compute_context(model.device, self.compute_type):
                logprobs, _ = completion_logprobs(model, part, temperature=self.temperature)
            result[part.group_ids, : logprobs.shape[1]] = logprobs.to(result.dtype)
        return result

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of a microbatch to that of the update."""
        loss.backward()

    def update(self) -> dict[str, Mean]:
        """Clip the gradient, move the weights, forget the gradient. A gradient that is not finite stops the run."""
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
        return {"policy/gradient_norm": Mean(norm, 1), "policy/learning_rate": Mean(rate, 1)}

    def _trained(self) -> Iterable[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]


def compute_context(device: torch.device, compute_type: ComputeType) -> AbstractContextManager[object]:
    """Autocast to a half-width type; nothing for the full-width ones, whose weights have that type already."""
    if compute_type in ("float32", "float64"):
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, compute_type))


def completion_logprobs(
    model: PreTrainedModel, batch: Batch, *, temperature: float
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Log-probabilities and entropies of the completion tokens under a model, [B, T], 0 outside the mask.

    Rows are right-padded, so that under a causal mask padding cannot reach a token, and no attention mask is needed.
    Only the hidden states that predict a completion token pass through the head.
    """
    device = model.device
    ids, predicts = join_rows(batch)
    hidden = hidden_states(model, ids.to(device))
    targets = batch.completion_ids[batch.mask].to(device)
    selected = hidden[predicts.to(device)]
    logprobs, entropy = head(model, selected, targets, temperature)
    mask = batch.mask.to(device)
    full = torch.zeros(mask.shape, dtype=logprobs.dtype, device=device)
    return full.masked_scatter(mask, logprobs), full.masked_scatter(mask, entropy)


def join_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Token ids of prompt and completion side by side [B, L], and the places whose output predicts a trained token."""
    width = int(batch.row_lengths.max())
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    predicts = torch.zeros(len(batch), width, dtype=torch.bool)
    for row in range(len(batch)):
        prompt, completion = int(batch.prompt_lengths[row]), int(batch.completion_lengths[row])
        ids[row, :prompt] = batch.prompt_ids[row, :prompt]
        ids[row, prompt : prompt + completion] = batch.completion_ids[row, :completion]
        predicts[row, prompt - 1 : prompt - 1 + completion] = batch.mask[row, :completion]
    return ids, predicts


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Last hidden states [B, L, H] of right-padded rows, before the head."""
    body = getattr(model, model.base_model_prefix)
    return body(input_ids=ids, use_cache=False).last_hidden_state


def head(model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of tokens from hidden states, in chunks where the head is a plain matrix."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise TrainingError(f"{type(model).__name__} has no language-model head; oncurve trains causal language models")
    if is_plain_head(model):
        return from_hidden(hidden, layer.weight, targets, temperature=temperature)
    logits: Tensor = layer(hidden)
    config = model.config.get_text_config()
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    return from_logits(logits, targets, temperature=temperature)


def is_plain_head(model: PreTrainedModel) -> bool:
    """The logits are hidden @ weight.T and nothing else."""
    layer = model.get_output_embeddings()
    config = model.config.get_text_config()
    changes = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    return type(layer) is nn.Linear and layer.bias is None and not any(getattr(config, key, None) for key in changes)
