"""FlashAttention over runs of any length, without padding, masks or copies of keys.

Own tokens attend to each other, causally, and tokens behind a prompt to that prompt: two calls. Each gives the mean of
the values that it saw and the logarithm of the sum that its softmax divided by. Both together are the two means, each
weighted by its share of the two sums. In the backward pass each part is exact by itself, given output and logarithm of
both together: it takes the probabilities exp(score - logarithm) and, by query, the product of output and gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oncurve.algorithm.precision import HALF
from oncurve.model.decode_flash import HEAD_STEP, LARGEST_HEAD
from oncurve.model.packing import Layout, Runs


class Flash:
    """Torch's own flash kernel, which needs a CUDA device.

    Attention of runs: q [M, heads, D] to k and v [N, kv_heads, D], as ``runs`` cuts M and N.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of every query [M, heads, D], and the logarithms of its sums of exp(score) [heads, M].

        Raises NotImplementedError where torch gives the logarithms in another shape.
        """
        out, logs, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, runs.query_starts, runs.key_starts, runs.longest_queries, runs.longest_keys, 0.0, causal, False,
            scale=scale,
        )  # fmt: skip
        if logs.shape != (q.shape[1], q.shape[0]):
            raise NotImplementedError(f"torch {torch.__version__} pads the logarithms of the flash kernel")
        return out, logs

    def backward(
        self,
        grad: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        saved: tuple[Tensor, Tensor],
        runs: Runs,
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; ``saved`` is what ``forward`` gave, or the same for these and further keys."""
        out, logs = (part.contiguous() for part in saved)  # the kernel reads both without asking for their strides
        no_dropout = (grad.new_empty(2, dtype=torch.uint64), grad.new_empty(0))
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), *qkv, out, logs, runs.query_starts, runs.key_starts, runs.longest_queries,
            runs.longest_keys, 0.0, causal, *no_dropout, scale=scale,
        )  # fmt: skip


def kernel_for(device: torch.device, product_type: torch.dtype) -> Flash | None:
    """The kernel for products of a type on a device; None where there is none."""
    return Flash() if device.type == "cuda" and product_type in HALF else None


def fits(query: Tensor, value: Tensor) -> bool:
    """The kernel knows heads of these sizes; the size is the last dimension."""
    size = query.shape[-1]
    return size == value.shape[-1] and size % HEAD_STEP == 0 and size <= LARGEST_HEAD


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, kernel: Flash, *, scale: float | None) -> Tensor:
    """Attention of every token of a packed sequence [N, heads, D]."""
    return _Attention.apply(q, k, v, layout.own_runs, layout.prompt_runs, kernel, scale)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """Both calls and their merging."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own: Runs,
        prompts: Runs | None,
        kernel: Flash,
        scale: float | None,
    ) -> Tensor:
        out, logs = kernel.forward(q, k, v, own, causal=True, scale=scale)
        if prompts is not None:
            readers, read = prompts.queries, prompts.keys
            qkv = (_take(q, readers), _take(k, read), _take(v, read))
            part, part_logs = kernel.forward(*qkv, prompts, causal=False, scale=scale)
            own_part, own_logs = _take(out, readers), _take(logs, readers, dim=1)
            share = torch.sigmoid(part_logs - own_logs).T.unsqueeze(-1)
            _put(out, readers, torch.lerp(own_part.to(share.dtype), part.to(share.dtype), share).to(out.dtype))
            _put(logs, readers, torch.logaddexp(own_logs, part_logs), dim=1)
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.own, ctx.prompts, ctx.kernel, ctx.scale = own, prompts, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, logs = ctx.saved_tensors
        kernel: Flash = ctx.kernel
        grads = kernel.backward(grad, (q, k, v), (out, logs), ctx.own, causal=True, scale=ctx.scale)
        if ctx.prompts is not None:
            readers, read = ctx.prompts.queries, ctx.prompts.keys
            qkv = (_take(q, readers), _take(k, read), _take(v, read))
            saved = (_take(out, readers), _take(logs, readers, dim=1))
            parts = kernel.backward(_take(grad, readers), qkv, saved, ctx.prompts, causal=False, scale=ctx.scale)
            for whole, indices, part in zip(grads, (readers, read, read), parts, strict=True):
                _put(whole, indices, _take(whole, indices) + part)
        return *grads, None, None, None, None


def _take(x: Tensor, indices: slice | Tensor, dim: int = 0) -> Tensor:
    """The values at some indices; without a copy where they are a slice."""
    if isinstance(indices, slice):
        return x.narrow(dim, indices.start, indices.stop - indices.start)
    return x.index_select(dim, indices)


def _put(to: Tensor, indices: slice | Tensor, x: Tensor, dim: int = 0) -> None:
    """The way back."""
    if isinstance(indices, slice):
        to.narrow(dim, indices.start, indices.stop - indices.start).copy_(x)
    else:
        to.index_copy_(dim, indices, x)
