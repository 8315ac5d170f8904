"""Self-checks of fast paths: used only if they compute on a small batch what the plain path does, up to rounding."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oncurve.core.batch import Batch
from oncurve.core.errors import first_line
from oncurve.model.agreement import Agreement, agreement, of_size
from oncurve.model.stand_in import FAILURES
from oncurve.policy.forward import completion_logprobs
from oncurve.policy.packed_attention import kernel_for, use_packed_attention

log = logging.getLogger(__name__)

ROUNDINGS = 4.0
"""So many times as far from the exact result as padded rows are may packed rows be."""


def disagreement(
    kinds: Iterable[tuple[str, Tensor, Tensor, Tensor]], subject: str, *, times: float, floor: float
) -> Agreement | None:
    """The first of (name, fast, plain, exact) in which the fast way is further from the exact result than rounding
    explains; None if there is none. The others go to the log after what is ``subject``."""
    for name, fast, plain, exact in kinds:
        result = agreement(name, fast, plain, exact, times=times, floor=floor, distance=of_size)
        if not result.holds:
            return result
        log.info("%s %s", subject, result)
    return None


def short(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {first_line(error)}"


def choose_kernel(model: PreTrainedModel, batch: Batch, compute_type: torch.dtype) -> str | None:
    """Let packed rows go through the kernel for runs of any length, if there is one here and it is right; what speaks
    against it, otherwise None. Without it they stay in blocks."""
    use_packed_attention(model)
    if kernel_for(model.device, compute_type) is None:
        return None
    if mismatch := _mismatch(model, batch, compute_type):
        use_packed_attention(model, in_blocks=True)
        return mismatch
    return None


def _mismatch(model: PreTrainedModel, batch: Batch, compute_type: torch.dtype) -> str | None:
    """The reason against packed attention as it is now; None if it differs from the exact result as rounding does.

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
    result = disagreement(kinds, "the flash kernel gives", times=ROUNDINGS, floor=least)
    return None if result is None else f"gives {result}"


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
