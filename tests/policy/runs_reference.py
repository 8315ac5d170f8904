"""What must a kernel for runs of any length compute? Run by run in plain torch, in float32 or float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from oncurve.model.packing import Layout, Runs

KINDS = (
    "ragged", "interleaved", "one group", "one row", "one token each", "an unread prompt", "an unread prompt between",
)  # fmt: skip
"""Batches whose layouts differ: where rows lie, and which prompts are read."""


class Reference:
    """The definition. What no run covers becomes nan, and tables that a kernel could not use fail."""

    def __init__(self) -> None:
        self.seen: list[tuple[Runs, torch.dtype]] = []
        """Runs and type of every forward call."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        self.seen.append((runs, q.dtype))
        assert q.dtype == k.dtype == v.dtype
        out = torch.full_like(q, torch.nan, dtype=wide(q))
        logs = q.new_full((q.shape[1], q.shape[0]), torch.nan, dtype=wide(q))
        for queries, keys in pairs(runs, q, k):
            scores = scores_of(q[queries], k[keys], causal, scale)
            logs[:, queries] = scores.logsumexp(-1)
            out[queries] = torch.einsum("hts,shd->thd", scores.softmax(-1), repeated(v[keys], q))
        return out.to(q.dtype), logs

    def backward(
        self,
        grad: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        kept: tuple[Tensor, Tensor],
        runs: Runs,
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv
        out, logs = kept[0].to(wide(q)), kept[1]
        by, queries_wide = grad.to(wide(q)), q.to(wide(q))
        grads = [torch.full_like(part, torch.nan, dtype=wide(q)) for part in qkv]
        for queries, keys in pairs(runs, q, k):
            p = (scores_of(q[queries], k[keys], causal, scale) - logs[:, queries, None]).exp()
            through_p = torch.einsum("thd,shd->hts", by[queries], repeated(v[keys], q))
            through_scores = p * (through_p - (by[queries] * out[queries]).sum(-1).T[..., None]) * factor(q, scale)
            grads[0][queries] = torch.einsum("hts,shd->thd", through_scores, repeated(k[keys], q))
            for to, weights, other in ((grads[1], through_scores, queries_wide), (grads[2], p, by)):
                of_heads = torch.einsum("hts,thd->shd", weights, other[queries])
                to[keys] = of_heads.unflatten(1, (k.shape[1], -1)).sum(2)
        grad_q, grad_k, grad_v = (part.to(q.dtype) for part in grads)
        return grad_q, grad_k, grad_v


def wide(x: Tensor) -> torch.dtype:
    """The type of scores and sums."""
    return torch.promote_types(x.dtype, torch.float32)


def pairs(runs: Runs, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """Runs of queries and of keys: none empty, none longer than announced, the last ones ending where q and k do."""
    assert runs.query_starts.dtype == runs.key_starts.dtype == torch.int32
    cuts = list(zip(runs.query_starts.tolist(), runs.key_starts.tolist(), strict=True))
    assert cuts[0] == (0, 0)
    assert cuts[-1] == (len(q), len(k))
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(cuts))
    assert max(c - a for (a, _), (c, _) in pairwise(cuts)) == runs.longest_queries
    assert max(d - b for (_, b), (_, d) in pairwise(cuts)) == runs.longest_keys
    return [(slice(a, c), slice(b, d)) for (a, b), (c, d) in pairwise(cuts)]


def factor(q: Tensor, scale: float | None) -> float:
    """What scores are multiplied by."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values once for each query head, in the wide type."""
    return x.to(wide(x)).repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def scores_of(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Scores of one run [heads, T, S]; what a causal query may not see is minus infinity."""
    scores = torch.einsum("thd,shd->hts", q.to(wide(q)), repeated(k, q)) * factor(q, scale)
    return scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf) if causal else scores


def heads_of(layout: Layout, *, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Random queries, keys and values of all tokens."""
    generator = torch.Generator().manual_seed(4)
    shapes = ((layout.ids.shape[1], count, size) for count in (heads, kv_heads, kv_heads))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
