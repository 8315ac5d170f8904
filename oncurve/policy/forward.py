"""Log-probabilities of a batch's completion tokens under a model, padded or packed, and those of its head."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from oncurve.algorithm.chunked_head import HeadOps, from_hidden
from oncurve.algorithm.precision import arithmetic_type, dithered_casts, head_type, weight_key
from oncurve.core.batch import Batch, Size
from oncurve.core.errors import TrainingError
from oncurve.core.logprobs import from_logits, join_rows, spread
from oncurve.model import forward_backward
from oncurve.model.ops_native import NativeOps, operations
from oncurve.model.packing import make_layout
from oncurve.model.weights import backbone_of, body_of, is_plain_head, supports, trust_of
from oncurve.policy.packed_attention import packed_hidden


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


def completion_logprobs(
    model: PreTrainedModel, batch: Batch, *, temperature: float, packed: bool = False, recompute: bool = False
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Log-probabilities and entropies of the completion tokens under a model, [B, T], 0 outside the mask.

    Only the hidden states that predict a completion token pass through the head. Without packing, rows are padded on
    the right, so that under a causal mask padding cannot reach a token, and no attention mask is needed. Packed rows
    go through our own layers where the model is of a family they know, with ``recompute`` to save memory, and through
    the model's elsewhere.
    """
    device, trust = model.device, trust_of(model)
    targets = batch.completion_ids[batch.mask].to(device)
    if not trust.padding and len(batch) > 1:
        return _row_by_row(model, batch, temperature)
    if not trust.head:
        ids, predicts = join_rows(batch)
        with dithered_casts(model):
            logits = model(input_ids=ids.to(device), use_cache=False).logits[predicts.to(device)]
        return spread(batch, from_logits(logits, targets, temperature=temperature))
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
        else:
            stack.enter_context(dithered_casts(model))
            selected = _by_modules(model, batch, packed=packed)
        return spread(batch, head(model, selected, targets, temperature, ops=ops))


def _by_modules(model: PreTrainedModel, batch: Batch, *, packed: bool) -> Tensor:
    """The hidden states [M, H] that predict the trained tokens, by the model's own modules."""
    device = model.device
    if packed:
        return packed_hidden(body_of(model), make_layout(batch, device))
    ids, predicts = join_rows(batch)
    indices = predicts.flatten().nonzero().flatten().to(device)  # told by the CPU, which need not wait for a GPU
    return hidden_states(model, ids.to(device)).flatten(0, 1).index_select(0, indices)


def _row_by_row(
    model: PreTrainedModel, batch: Batch, temperature: float
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """The same of a model in which rows change with those beside them."""
    alone = [batch.select(torch.tensor([row])) for row in range(len(batch))]
    results = [completion_logprobs(model, row, temperature=temperature) for row in alone]
    width = batch.mask.shape[1]
    logprobs, entropies = (
        torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
        for parts in zip(*results, strict=True)
    )
    return logprobs, entropies


def row_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """log p of every token of a row [N] but the first, given those before it [N - 1].

    A model with an adapter goes through the layers that sample and train it.
    """
    backbone = backbone_of(model) if model.device.type == "cpu" else None
    if backbone is not None and backbone.has_adapter:
        return completion_logprobs(model, batch_of_row(ids), temperature=1.0, packed=True)[0][0]
    with dithered_casts(model):
        if not trust_of(model).head:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            return from_logits(logits, ids[1:], temperature=1.0)[0]
        return head(model, hidden_states(model, ids[None])[0, :-1], ids[1:], 1.0)[0]


def batch_of_row(ids: Tensor) -> Batch:
    """A row of tokens [N] of which each but the first is predicted."""
    ids, count, whole = ids.cpu()[None], len(ids) - 1, torch.zeros(1, dtype=torch.long)
    mask, zeros = torch.ones(1, count, dtype=torch.bool), torch.zeros(1, count)
    return Batch(ids[:, :1], whole + 1, ids[:, 1:], mask, whole + count, whole, zeros[:, 0], zeros, Size(1, count, 1))


def has_own_layers(model: PreTrainedModel) -> bool:
    """Packed rows go through our own layers: those of a CPU."""
    return model.device.type == "cpu" and supports(model)


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Last hidden states [B, L, H] of right-padded rows, before the head."""
    body = body_of(model)
    return body(input_ids=ids, use_cache=False).last_hidden_state
