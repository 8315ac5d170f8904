"""Log-probabilities and entropies of tokens from the model's last hidden states.

Logits are made for a chunk of tokens at a time and made again in the backward pass, so that no tensor of all tokens by
the whole vocabulary is ever alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oncurve.algorithm.precision import narrow, wide_product

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at one time."""
CPU_CHUNK_TOKENS = 256
"""The same on a CPU, whose caches hold the logits of a small vocabulary then."""
RELEASED_BYTES = 32 * 2**20
"""Bytes of a block from which on the C library gives it back to the system when it is freed."""


@runtime_checkable
class HeadOps(Protocol):
    """The arithmetic on a chunk of logits, which a compiled kernel may do in one pass."""

    def head_matrix(self, weight: Tensor, dtype: torch.dtype, key: int | None = None) -> Tensor:
        """The head [V, H] as ``logits`` reads it, which multiplies in that type if nothing else is faster; ``key`` is
        that of its dither."""
        ...

    def logits(self, hidden: Tensor, matrix: Tensor, vocabulary: int, out: Tensor | None = None) -> Tensor:
        """hidden @ weight.T [N, V], summed in float32 or better, in ``out`` if it is given; ``vocabulary`` is V."""
        ...

    def head(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """log p of each target, the entropy of each row and the logarithm of its normalizer."""
        ...

    def head_backward(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The gradient of the logits, in their place; ``saved`` are normalizer and entropy."""
        ...


class TorchHeadOps:
    """The same in torch."""

    def head_matrix(self, weight: Tensor, dtype: torch.dtype, key: int | None = None) -> Tensor:
        """See ``HeadOps``."""
        return narrow(weight, dtype, key)

    def logits(self, hidden: Tensor, matrix: Tensor, vocabulary: int, out: Tensor | None = None) -> Tensor:
        """See ``HeadOps``."""
        return wide_product(hidden, matrix.T, out)

    def head(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """See ``HeadOps``."""
        scaled = logits if temperature == 1 else logits / temperature
        log_p = torch.log_softmax(scaled, dim=-1)
        logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
        normalizer = scaled.gather(1, targets[:, None]).squeeze(1) - logprobs
        return logprobs, -log_p.exp().mul_(log_p).sum(dim=-1), normalizer

    def head_backward(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
    ) -> Tensor:
        """d log p_target / dz = (onehot - p) / T;  dH / dz = -p (log p + H) / T"""
        (normalizer, entropy), (grad_logprobs, grad_entropy) = saved, grads
        log_p = (logits if temperature == 1 else logits.div_(temperature)).sub_(normalizer[:, None])
        own = grad_logprobs / temperature
        if grad_entropy.any():
            p = log_p.exp()
            grad = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None] / -temperature).sub_(own[:, None]).mul_(p)
        else:
            grad = log_p.exp_().mul_(-own[:, None])
        grad[torch.arange(len(grad), device=grad.device), targets] += own
        return grad


def from_hidden(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    ops: HeadOps | None = None,
    key: int | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """The same as ``from_logits(hidden @ weight.T, ...)`` without holding all logits.

    Products are in the type of ``hidden``, whatever autocast says, forward and backward; logits in float32 or better.
    ``chunk_tokens`` are computed at one time, or what suits the device. ``ops`` computes on a chunk of logits;
    torch does if None. A head that is rounded to 16 bits is dithered where its ``key`` is given.
    """
    chunk_tokens = chunk_tokens or (CPU_CHUNK_TOKENS if hidden.device.type == "cpu" else CHUNK_TOKENS)
    settings = temperature, chunk_tokens, ops or TorchHeadOps(), key
    return _ChunkedHead.apply(hidden, weight, targets, *settings)  # type: ignore[return-value]


class _ChunkedHead(torch.autograd.Function):
    """The language-model head with its logits recomputed in backward, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        ops: HeadOps,
        key: int | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.chunk_tokens, ctx.ops, ctx.key = temperature, chunk_tokens, ops, key
        with torch.autocast(hidden.device.type, enabled=False):
            return _ChunkedHead._forward(ctx, hidden, weight, targets)

    @staticmethod
    def _forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        matrix = ctx.ops.head_matrix(weight.detach(), hidden.dtype, ctx.key)
        logprobs, entropy, normalizer = hidden.new_empty(3, len(hidden), dtype=wide)
        for rows, room in _chunks(hidden, len(weight), ctx.chunk_tokens):
            logits = ctx.ops.logits(hidden[rows], matrix, len(weight), room)
            logprobs[rows], entropy[rows], normalizer[rows] = ctx.ops.head(logits, targets[rows], ctx.temperature)
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        return logprobs, entropy.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return _ChunkedHead._backward(ctx, *gradients)

    @staticmethod
    def _backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = (gradient.contiguous() for gradient in gradients)
        matrix = ctx.ops.head_matrix(weight, hidden.dtype, ctx.key)
        compute_weight = narrow(weight, hidden.dtype, ctx.key)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        product = _room(hidden, ctx.chunk_tokens, *weight.shape) if grad_weight is not None else None
        for rows, room in _chunks(hidden, len(weight), ctx.chunk_tokens):
            logits = ctx.ops.logits(hidden[rows], matrix, len(weight), room)
            saved, grads = (normalizer[rows], entropy[rows]), (grad_logprobs[rows], grad_entropy[rows])
            grad = ctx.ops.head_backward(logits, targets[rows], ctx.temperature, saved, grads).to(hidden.dtype)
            grad_hidden[rows] = grad @ compute_weight
            if grad_weight is not None:
                grad_weight += wide_product(grad.T, hidden[rows], product).to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunks(hidden: Tensor, vocabulary: int, chunk_tokens: int) -> Iterator[tuple[slice, Tensor | None]]:
    """Rows of hidden states, chunk by chunk, and room for their logits."""
    room = _room(hidden, chunk_tokens, chunk_tokens, vocabulary)
    for start in range(0, len(hidden), chunk_tokens):
        rows = slice(start, min(start + chunk_tokens, len(hidden)))
        yield rows, None if room is None else room[: rows.stop - start]


def _room(hidden: Tensor, chunk_tokens: int, *shape: int) -> Tensor | None:
    """Memory for a product that every chunk makes, in float32 or better; None where a fresh tensor is as fast.

    On a CPU the C library gives large blocks back when they are freed, and the system clears every page of the next
    one, which takes as long as a third of the product.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    is_large = math.prod(shape) * wide.itemsize > RELEASED_BYTES
    is_used_again = is_large and len(hidden) > chunk_tokens and hidden.device.type == "cpu"
    return hidden.new_empty(shape, dtype=wide) if is_used_again else None
