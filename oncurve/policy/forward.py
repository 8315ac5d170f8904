"""Log-probabilities of a batch's completion tokens under a model, padded or packed."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.algorithm.logprobs import HeadOps, from_hidden, from_logits
from oncurve.algorithm.precision import arithmetic_type, head_type
from oncurve.batch import Batch
from oncurve.errors import TrainingError
from oncurve.model import forward_backward
from oncurve.model.ops import operations
from oncurve.model.ops_native import NativeOps
from oncurve.model.packing import make_layout
from oncurve.model.weights import backbone_of, body_of, is_plain_head, supports
from oncurve.policy.packed_attention import packed_hidden


def completion_logprobs(
    model: PreTrainedModel, batch: Batch, *, temperature: float, packed: bool = False, recompute: bool = False
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Log-probabilities and entropies of the completion tokens under a model, [B, T], 0 outside the mask.

    Only the hidden states that predict a completion token pass through the head. Without packing, rows are padded on
    the right, so that under a causal mask padding cannot reach a token, and no attention mask is needed. Packed rows
    go through our own layers where the model is of a family they know, with ``recompute`` to save memory, and through
    the model's elsewhere.
    """
    device = model.device
    backbone = backbone_of(model) if packed and device.type == "cpu" else None
    ops = None
    with ExitStack() as stack:
        if backbone is not None:
            compute_type = backbone.compute_type()
            native = operations(compute_type)
            stack.enter_context(torch.autocast("cpu", enabled=False))  # our own layers choose their types themselves
            selected = forward_backward.packed_hidden(
                backbone, make_layout(batch, device), compute_type, recompute=recompute
            )
            ops = native if isinstance(native, NativeOps) else None
        elif packed:
            selected = packed_hidden(body_of(model), make_layout(batch, device))
        else:
            ids, predicts = join_rows(batch)
            places = predicts.flatten().nonzero().flatten().to(device)  # told by the CPU, which need not wait for a GPU
            selected = hidden_states(model, ids.to(device)).flatten(0, 1).index_select(0, places)
        logprobs, entropy = head(model, selected, batch.completion_ids[batch.mask].to(device), temperature, ops=ops)
    mask = batch.mask.to(device)
    full = torch.zeros(mask.shape, dtype=logprobs.dtype, device=device)
    return full.masked_scatter(mask, logprobs), full.masked_scatter(mask, entropy)


def has_own_layers(model: PreTrainedModel) -> bool:
    """Packed rows go through our own layers: those of a CPU."""
    return model.device.type == "cpu" and supports(model)


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
    body = body_of(model)
    return body(input_ids=ids, use_cache=False).last_hidden_state


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
        return from_hidden(hidden.to(dtype), layer.weight, targets, temperature=temperature, ops=ops)
    logits: Tensor = layer(hidden)
    known = vars(model.config.get_text_config())
    if cap := known.get("final_logit_softcapping"):
        logits = torch.tanh(logits / cap) * cap
    if scale := known.get("logits_scaling"):
        logits = logits / scale
    if scale := known.get("logit_scale"):
        logits = logits * scale
    return from_logits(logits, targets, temperature=temperature)
