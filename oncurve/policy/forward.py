"""Log-probabilities of a batch's completion tokens under a model, padded or packed."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.batch import Batch
from oncurve.model import forward_backward
from oncurve.model.head import head
from oncurve.model.ops import operations
from oncurve.model.ops_native import NativeOps
from oncurve.model.packing import make_layout
from oncurve.model.weights import backbone_of, body_of, supports
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
