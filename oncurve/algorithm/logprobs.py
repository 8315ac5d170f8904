"""What are the log-probabilities and entropies of tokens, given the model's last hidden states?

Logits are made for a chunk of tokens at a time and made again in the backward pass, so that no tensor of all tokens by
the whole vocabulary is ever alive.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at one time."""


def from_logits(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"], *, temperature: float = 1.0
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target and entropy of each distribution, in float32 or better, at the temperature.

    log p = z_target / T - logsumexp(z / T);  H = logsumexp(z / T) - sum(p z / T)
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normalizer = torch.logsumexp(scaled, dim=-1)
    logprobs = scaled.gather(1, targets[:, None]).squeeze(1) - normalizer
    entropy = normalizer - (torch.softmax(scaled, dim=-1) * scaled).sum(dim=-1)
    return logprobs, entropy


def from_hidden(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """The same as ``from_logits(hidden @ weight.T, ...)`` without holding all logits."""
    return _ChunkedHead.apply(hidden, weight, targets, temperature, chunk_tokens)  # type: ignore[return-value]


class _ChunkedHead(torch.autograd.Function):
    """The language-model head with its logits recomputed in backward, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        pieces = [
            from_logits(part @ weight.to(part.dtype).T, part_targets, temperature=temperature)
            for part, part_targets in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        ]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        empty = hidden.new_zeros(0, dtype=wide)
        logprobs = torch.cat([piece[0] for piece in pieces]) if len(hidden) else empty
        entropy = torch.cat([piece[1] for piece in pieces]) if len(hidden) else empty.clone()
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        grad_logprobs, grad_entropy = gradients
        compute_weight = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            logits = hidden[rows] @ compute_weight.T
            scaled = logits.to(grad_logprobs.dtype) / ctx.temperature
            log_p = torch.log_softmax(scaled, dim=-1)
            p = log_p.exp()
            entropy = -(p * log_p).sum(dim=-1, keepdim=True)
            # d log p_target / dz = onehot - p;  dH / dz = -p (log p + H)
            grad = -p * (grad_logprobs[rows, None] + grad_entropy[rows, None] * (log_p + entropy))
            grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ compute_weight
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden[rows]).to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None
