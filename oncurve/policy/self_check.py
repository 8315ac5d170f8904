"""Self-checks of fast paths: used only if they compute on a small batch what the plain path does, up to rounding."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oncurve.algorithm.logprobs import from_logits
from oncurve.algorithm.precision import HALF, in_full_precision
from oncurve.batch import Batch, Size
from oncurve.model.agreement import Agreement, agreement, largest, of_size
from oncurve.model.head import head
from oncurve.model.out_of_memory import first_line
from oncurve.model.weights import use_own_forward, uses_own_forward
from oncurve.policy.flash_varlen import kernel_for
from oncurve.policy.forward import completion_logprobs, hidden_states
from oncurve.policy.packed_attention import ordinary_attention, use_packed_attention

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest difference of log-probabilities in float32 that always counts as rounding; a real one is near 1e-6."""
HALF_TOLERANCE = 1e-2
"""The same where some weights have half the width."""
PLAIN_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Layers that mix tokens by attention alone; others, such as convolutions, carry a state across packed rows."""
ROUNDINGS = 4.0
"""So many times as far from the exact result as padded rows are may packed rows be."""
PADDED = (
    "rows are padded in training, not packed, so that each completion computes its prompt again and short rows are "
    "filled up to the longest"
)
FAILURES = (TypeError, ValueError, RuntimeError, NotImplementedError, KeyError, AttributeError)
"""What attention of an unknown model raises when it is given a layout, and a kernel where it cannot run."""


def disagreement(
    kinds: Iterable[tuple[str, Tensor, Tensor, Tensor]], said: str, *, times: float, floor: float
) -> Agreement | None:
    """The first of (name, fast, plain, exact) in which the fast way is further from the exact result than rounding
    explains; None if there is none. The others go to the log after what is ``said``."""
    for name, fast, plain, exact in kinds:
        found = agreement(name, fast, plain, exact, times=times, floor=floor, distance=of_size)
        if not found.holds:
            return found
        log.info("%s %s", said, found)
    return None


def short(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {first_line(error)}"


@torch.no_grad()
def prove_head(model: PreTrainedModel) -> None:
    """Compare the log-probabilities of a few tokens with those of the model's own forward pass.

    Where they differ, for a model that does something between its layers and its logits that is not known here, its own
    pass computes them from now on, in training and in sampling.
    """
    config = model.config.get_text_config()
    ids = torch.arange(1, 10, device=model.device)[None] % config.vocab_size
    was_training = model.training
    model.eval()
    try:
        with in_full_precision(model):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            own, _ = from_logits(logits, ids[0, 1:], temperature=1.0)
            try:
                ours, _ = head(model, hidden_states(model, ids)[0, :-1], ids[0, 1:], 1.0)
                found = f"differ by {float((ours - own).abs().max()):.2g}"
                is_equal = bool(((ours - own).abs() <= _tolerance(model)).all())
            except FAILURES as error:
                found, is_equal = f"raised {short(error)}", False
    finally:
        model.train(was_training)
    if not is_equal:
        use_own_forward(model)
        log.warning(
            "logits are computed by the model's own forward pass, at the cost of memory and time: the head of %s is "
            "more than is known here of it, whose log-probabilities %s",
            type(model).__name__,
            found,
        )


def _tolerance(model: PreTrainedModel) -> float:
    is_half = any(parameter.dtype in HALF for parameter in model.parameters())
    return HALF_TOLERANCE if is_half else TOLERANCE


def packing_objection(model: PreTrainedModel) -> str | None:
    """What of a model's configuration forbids to lay rows end to end, whatever a few short ones would show; or None."""
    config = model.config.get_text_config()
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if kind not in PLAIN_LAYERS]
    if kinds:
        return f"it has layers of the kind {kinds[0]}"
    if getattr(config, "index_topk", None):
        return "its attention chooses tokens by an index"
    if uses_own_forward(model):
        return "its logits come from its own forward pass"
    return None


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
    if reason := packing_objection(model):
        log.warning("%s: %s", PADDED, reason)
        return False
    batch = example_batch(min(model.config.get_text_config().vocab_size, 64))
    try:
        use_packed_attention(model, in_blocks=True)
        found = _packed_agreement(model, batch)
        reason, level = f"packed rows give {found}", logging.INFO if found.holds else logging.WARNING
    except NotImplementedError as error:
        found, reason, level = None, f"attention of {type(model).__name__}: {short(error)}", logging.INFO
    except FAILURES as error:
        found, reason, level = None, f"packed attention raised {short(error)}", logging.WARNING
    if found is None or not found.holds:
        ordinary_attention(model)
        log.log(
            level,
            "%s: %s",
            PADDED,
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
    floor = _tolerance(model)
    return agreement("log-probabilities", packed, alone, padded, times=ROUNDINGS, floor=floor, distance=largest)


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
            return f"raised {short(error)}"
    least = torch.finfo(compute_type).eps
    names = ("log-probabilities", "gradients")
    kinds = zip(names, packed, padded, exact, strict=True)
    found = disagreement(kinds, "the flash kernel gives", times=ROUNDINGS, floor=least)
    return None if found is None else f"gives {found}"


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
