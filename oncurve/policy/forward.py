"""Log-probabilities of a batch's completion tokens under a model, padded or packed."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from oncurve.algorithm.logprobs import HeadOps, from_hidden, from_logits
from oncurve.algorithm.precision import arithmetic_type, head_type, in_full_precision
from oncurve.batch import Batch, Size
from oncurve.errors import TrainingError
from oncurve.model import forward_backward
from oncurve.model.agreement import Agreement, agreement, largest, of_size
from oncurve.model.ops import operations
from oncurve.model.ops_native import NativeOps
from oncurve.model.out_of_memory import first_line
from oncurve.model.packing import make_layout
from oncurve.model.weights import backbone_of, body_of, is_plain_head, supports
from oncurve.policy.flash_varlen import kernel_for
from oncurve.policy.packed_attention import ordinary_attention, packed_hidden, use_packed_attention

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest difference of log-probabilities in float32 that always counts as rounding."""
ROUNDINGS = 4.0
"""So many times as far from the exact result as padded rows are may packed rows be."""
FAILURES = (TypeError, ValueError, RuntimeError, NotImplementedError, KeyError, AttributeError)
"""What attention of an unknown model raises when it is given a layout, and a kernel where it cannot run."""


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


@torch.no_grad()
def enable_packing(model: PreTrainedModel, compute_type: torch.dtype = torch.float32) -> bool:
    """Prepare a model for packed batches and prove on a small one that it computes the same; False if it does not.

    Models with sliding windows, soft-capped scores or attention of their own keep the padded way. Where there is a
    kernel for runs of any length in the compute type, its gradient is proven as well, and without that proof packed
    attention goes on in blocks.
    """
    with in_full_precision(model):
        return _prove_packing(model, compute_type)


def _prove_packing(model: PreTrainedModel, compute_type: torch.dtype) -> bool:
    batch = example_batch(min(model.config.get_text_config().vocab_size, 64))
    try:
        use_packed_attention(model, in_blocks=True)
        found = _packed_agreement(model, batch)
        reason, level = f"packed rows give {found}", logging.INFO if found.holds else logging.WARNING
    except NotImplementedError as error:
        found, reason, level = None, f"attention of {type(model).__name__}: {_short(error)}", logging.INFO
    except FAILURES as error:
        found, reason, level = None, f"packed attention raised {_short(error)}", logging.WARNING
    if found is None or not found.holds:
        ordinary_attention(model)
        log.log(
            level,
            "rows are padded in training, not packed, so that each completion computes its prompt again and short rows "
            "are filled up to the longest: %s",
            reason,
        )
        return False
    log.info("%s", reason)
    use_packed_attention(model)
    if kernel_for(model.device, compute_type) is None:
        return True
    if objection := _objection(model, batch, compute_type):
        log.warning("packed attention goes on in blocks, slower and with more memory: the flash kernel %s", objection)
        use_packed_attention(model, in_blocks=True)
    return True


def _packed_agreement(model: PreTrainedModel, batch: Batch) -> Agreement:
    """Packed rows against padded ones in the type of the weights; what rounding does there, padded rows say when each
    is computed alone."""
    padded, packed = (completion_logprobs(model, batch, temperature=1.0, packed=way)[0] for way in (False, True))
    alone = torch.zeros_like(padded)
    for row in range(len(batch)):
        one = batch.select(torch.tensor([row]))
        found, _ = completion_logprobs(model, one, temperature=1.0)
        alone[row, : found.shape[1]] = found[0]
    return agreement("log-probabilities", packed, alone, padded, times=ROUNDINGS, floor=TOLERANCE, distance=largest)


def _objection(model: PreTrainedModel, batch: Batch, compute_type: torch.dtype) -> str | None:
    """What speaks against packed attention as it is now; None if it differs from the exact result as rounding does.

    How much rounding does, padded rows say themselves: in the compute type and in the type of the weights.
    """
    exact = _outcome(model, batch, packed=False)
    with torch.autocast(model.device.type, dtype=compute_type):
        padded = _outcome(model, batch, packed=False)
        try:
            packed = _outcome(model, batch, packed=True)
        except FAILURES as error:
            return f"raised {_short(error)}"
    least = torch.finfo(compute_type).eps
    for name, *parts in zip(("log-probabilities", "gradients"), packed, padded, exact, strict=True):
        found = agreement(name, *parts, times=ROUNDINGS, floor=least, distance=of_size)
        if not found.holds:
            return f"gives {found}"
        log.info("the flash kernel gives %s", found)
    return None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _outcome(model: PreTrainedModel, batch: Batch, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of their sum by a factor of each number of the embeddings.

    All layers have a part in it, and no weight gets a gradient.
    """
    factors: list[Tensor] = []

    def scale(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        factors.append(torch.ones_like(output[0, 0]).requires_grad_())
        return output * factors[-1]

    hook = model.get_input_embeddings().register_forward_hook(scale)
    try:
        with torch.enable_grad():
            logprobs, _ = completion_logprobs(model, batch, temperature=1.0, packed=packed)
            [gradient] = torch.autograd.grad(logprobs.sum(), factors)
    finally:
        hook.remove()
    return logprobs.detach().double(), gradient.double()


def example_batch(vocabulary: int) -> Batch:
    """Two groups of three ragged rows."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 1, 7, 2, 6, 3])
    prompts = torch.tensor([4, 4, 4, 2, 2, 2])
    mask = torch.arange(7)[None] < lengths[:, None]
    group_ids = torch.tensor([0, 0, 0, 1, 1, 1])
    prompt_ids = torch.randint(0, vocabulary, (2, 4), generator=generator)[group_ids]
    completion_ids = torch.randint(0, vocabulary, (6, 7), generator=generator)
    zeros = torch.zeros(6, 7)
    size = Size(6, int(mask.sum()), 2)
    return Batch(prompt_ids, prompts, completion_ids, mask, lengths, group_ids, torch.zeros(6), zeros, size)
