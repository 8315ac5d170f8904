"""Language-model head: from hidden states to log-probabilities and entropies of tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.algorithm.chunked_head import HeadOps, from_hidden
from oncurve.algorithm.precision import arithmetic_type, head_type
from oncurve.algorithm.rounding import weight_key
from oncurve.core.errors import TrainingError
from oncurve.core.logprobs import from_logits
from oncurve.model.weights import is_plain_head


def head(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, *, ops: HeadOps | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of tokens from hidden states, in chunks where the head is a plain matrix.

    ``ops`` computes on the chunks of logits; torch does if None.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        raise TrainingError(f"{type(model).__name__} has no language-model head; oncurve trains causal language models")
    if is_plain_head(model):
        dtype = head_type(hidden.device, arithmetic_type(hidden.device, hidden.dtype), hidden.dtype)
        return from_hidden(
            hidden.to(dtype), layer.weight, targets, temperature=temperature, ops=ops, key=weight_key(layer)
        )
    logits: Tensor = layer(hidden)
    config = model.config.get_text_config()
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    return from_logits(logits, targets, temperature=temperature)
