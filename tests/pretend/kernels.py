"""References on the CPU for what only CUDA computes. The pretend GPU runs them in its own memory.

They refuse what the real kernels refuse, or what those take without a word and read wrongly.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
PAGE_STEP = 256
"""Pages of keys that the flash kernel reads hold a multiple of these positions."""
_library = torch.library.Library("aten", "IMPL", "CPU")
Parts = list[tuple[slice, Tensor, Tensor]]
"""Queries of each run, and its keys and values."""


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Of queries [.., M, D] and keys [.., N, D] in float32; the last query sees the last key."""
    scores = q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, scores: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of queries, keys, values and scores, all [.., M or N, D], in float32."""
    p = (scores - logs[..., None]).exp()
    by_scores = p * (grad.float() @ v.float().transpose(-1, -2) - (grad.float() * out.float()).sum(-1, keepdim=True))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    by_q, by_k = by_scores @ k.float() * factor, by_scores.transpose(-1, -2) @ q.float() * factor
    return by_q, by_k, p.transpose(-1, -2) @ grad.float(), by_scores


def _no_random() -> tuple[Tensor, Tensor]:
    return torch.empty(2, dtype=torch.uint64), torch.empty(0, dtype=torch.uint64)


# Runs of any length: the flash kernel.


def _check_flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, **others: Any) -> None:
    if q.dtype not in HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not (q.dtype == k.dtype == v.dtype):
        raise RuntimeError("query and key must have the same dtype")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256, a multiple of 8")
    if any(part.stride(-1) != 1 for part in (q, k, v)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if q.shape[-2] % k.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    if dropout or any(value is not None for value in others.values()):
        raise NotImplementedError(f"the pretend GPU knows neither dropout nor {', '.join(others)}")


def _starts(starts: Tensor, longest: int, name: str) -> list[int]:
    if starts.dtype != torch.int32 or not starts.is_contiguous():
        raise RuntimeError(f"{name} must have dtype int32 and be contiguous")
    cuts = starts.tolist()
    if max((b - a for a, b in pairwise(cuts)), default=0) > longest:
        raise RuntimeError(
            f"a run of {name} is longer than the {longest} that were announced; the kernel leaves it out"
        )
    return cuts


def _runs(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor | None], longest: tuple[int, int],
    used: Tensor | None, table: Tensor | None,
) -> Parts:  # fmt: skip
    """What each run of queries reads. ``used`` says how many of its keys count, ``table`` in which pages they lie."""
    cuts = _starts(starts[0], longest[0], "cu_seqlens_q")
    if cuts[-1] > len(q):
        raise RuntimeError("queries end before their last run does")
    key_cuts = None if starts[1] is None else _starts(starts[1], longest[1] if used is None else 2**31, "cu_seqlens_k")
    if used is not None and (used.dtype != torch.int32 or len(used) != len(cuts) - 1):
        raise RuntimeError("seqused_k must have dtype int32 and one number for each run")
    parts: Parts = []
    for run, (first, last) in enumerate(pairwise(cuts)):
        if table is not None:
            if k.shape[1] % PAGE_STEP:
                raise RuntimeError(f"Paged KV cache block size must be divisible by {PAGE_STEP}")
            if used is None:
                raise RuntimeError("seqused_k must be provided if block_table is provided")
            count = int(used[run])
            pages = table[run, : math.ceil(count / k.shape[1])].long()
            keys, values = (part[pages].flatten(0, 1)[:count] for part in (k, v))
        else:
            if key_cuts is None:
                raise RuntimeError("cu_seqlens_k must be provided if block_table is not provided")
            begin = key_cuts[run]
            stop = (
                key_cuts[run + 1] if used is None else begin + int(used[run])
            )  # where the next run begins is not asked
            if stop > len(k):
                raise RuntimeError(f"run {run} reads keys up to {stop}; all of them end at {len(k)}")
            keys, values = k[begin:stop], v[begin:stop]
        if len(keys) > longest[1]:
            raise RuntimeError(
                f"run {run} has {len(keys)} keys, {longest[1]} were announced; the kernel leaves some out"
            )
        parts.append((slice(first, last), keys, values))
    return parts


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[N, kv_heads, D] as [heads, N, D]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor | None, k_starts: Tensor | None, longest_q: int, longest_k: int,
    dropout: float, causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``aten::_flash_attention_forward``; without starts its tensors are [B, M, heads, D]."""
    wide = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    _check_flash(q, k, v, dropout, alibi_slopes=alibi_slopes, **{n: None if w == -1 else w for n, w in wide.items()})
    if q_starts is None:
        return (*_dense_forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, scale), *_no_random(),
                torch.empty(0))  # fmt: skip
    heads = q.shape[1]
    out, logs = torch.empty_like(q).fill_(torch.nan), torch.full((heads, len(q)), torch.nan)
    for queries, keys, values in _runs(
        q, k, v, (q_starts, k_starts), (longest_q, longest_k), seqused_k, block_table
    ):  # fmt: skip
        scores = _scores(q[queries].transpose(0, 1), _by_head(keys, heads), scale, causal)
        mixed, sums = _mix(scores, _by_head(values, heads))
        out[queries], logs[:, queries] = mixed.transpose(0, 1).to(q.dtype), sums
    return out, logs, *_no_random(), torch.empty(0)


def _mix(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Means of values, and logarithms of sums; of nothing 0 and infinity, as the kernels have it."""
    sums = scores.logsumexp(-1)
    nothing = sums == -torch.inf
    mixed = (scores - sums.masked_fill(nothing, 0.0)[..., None]).exp() @ values.float()
    return mixed, sums.masked_fill(nothing, torch.inf)


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Of [B, heads, M, D]; the result lies in memory as [B, M, heads, D]."""
    readers = q.shape[1] // k.shape[1]
    keys, values = (part.repeat_interleave(readers, dim=1) for part in (k, v))
    mixed, sums = _mix(_scores(q, keys, scale, causal), values)
    return mixed.to(q.dtype).transpose(1, 2).contiguous(), sums


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, q_starts: Tensor, k_starts: Tensor,
    longest_q: int, longest_k: int, dropout: float, causal: bool, rng_state: Tensor, unused: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten::_flash_attention_backward`` of runs."""
    _check_flash(q, k, v, dropout, window_size_left=window_size_left, window_size_right=window_size_right)
    if not all(part.is_contiguous() for part in (grad, out, logs)):
        raise RuntimeError("the kernel reads gradient, output and logarithms as contiguous")
    if out.dtype != q.dtype or grad.dtype != q.dtype or logs.dtype != torch.float32:
        raise RuntimeError("output and gradient must have the type of the query, logarithms are float32")
    heads = q.shape[1]
    grads = [torch.full(part.shape, torch.nan) for part in (q, k, v)]
    for queries, keys, values in _runs(q, k, v, (q_starts, k_starts), (longest_q, longest_k), None, None):
        first = (keys.data_ptr() - k.data_ptr()) // (k.stride(0) * k.element_size())
        own = slice(first, first + len(keys))
        by_head, kept = (q[queries], out[queries], grad[queries]), logs[:, queries]
        query, output, by = (part.transpose(0, 1) for part in by_head)
        scores = _scores(query, _by_head(keys, heads), scale, causal)
        by_q, by_k, by_v, _ = _gradients(
            by, query, _by_head(keys, heads), _by_head(values, heads), output, kept, scores, scale
        )  # fmt: skip
        grads[0][queries] = by_q.transpose(0, 1)
        for place, found in ((1, by_k), (2, by_v)):
            grads[place][own] = found.transpose(0, 1).unflatten(1, (k.shape[1], -1)).sum(2)
    by_q, by_k, by_v = (part.to(q.dtype) for part in grads)
    return by_q, by_k, by_v


# Attention of [B, heads, M, D], which torch.nn.functional chooses among by itself.


def dense_flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """``aten::_scaled_dot_product_flash_attention``."""
    _check_flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout)
    out, logs = _dense_forward(q, k, v, causal, scale)
    return out.transpose(1, 2), logs, None, None, q.shape[2], k.shape[2], *_no_random(), torch.empty(0)


def dense_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, q_starts: Any, k_starts: Any,
    longest_q: int, longest_k: int, dropout: float, causal: bool, seed: Any, offset: Any, *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    readers = q.shape[1] // k.shape[1]
    keys, values = (part.repeat_interleave(readers, dim=1) for part in (k, v))
    scores = _scores(q, keys, scale, causal)
    by_q, by_k, by_v, _ = _gradients(grad, q, keys, values, out, logs, scores, scale)
    by_k, by_v = (part.unflatten(1, (k.shape[1], readers)).sum(2) for part in (by_k, by_v))
    return by_q.to(q.dtype), by_k.to(q.dtype), by_v.to(q.dtype)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_logs: bool, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten::_scaled_dot_product_efficient_attention``."""
    _check_efficient(q, k, v, bias, dropout)
    scores = _scores(q, k, scale, causal)
    if bias is not None:
        scores = scores + bias.float()
    mixed, logs = _mix(scores, v)
    out = mixed.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    seed, offset = torch.empty((), dtype=torch.long), torch.empty((), dtype=torch.long)
    if not with_logs:
        return out, logs[..., :0].clone(), seed, offset
    padded = torch.full((*logs.shape[:2], math.ceil(logs.shape[2] / 32) * 32), torch.inf)
    padded[..., : logs.shape[2]] = logs
    return out, padded, seed, offset


def _check_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> None:
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in (*HALF, torch.float32):
        raise RuntimeError("Expected query, key, and value to have the same dtype, float32, float16 or bfloat16")
    if q.shape[1] != k.shape[1]:
        raise RuntimeError("Expected query.size(1) to equal key.size(1): this kernel has no groups of queries")
    if bias is not None and bias.dtype != q.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")
    if bias is not None and bias.shape != (*q.shape[:3], k.shape[2]):
        raise RuntimeError(f"attn_bias of {tuple(bias.shape)} is not expanded to {(*q.shape[:3], k.shape[2])}")
    if bias is not None and (
        bias.stride(-1) != 1 or any(one % (16 // bias.element_size()) for one in bias.stride()[:3])
    ):
        raise RuntimeError(
            "attn_bias is not correctly aligned (strideH). attn_bias.stride(1) should be a multiple of 8"
        )
    if dropout:
        raise NotImplementedError("the pretend GPU knows no dropout in attention")


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, logs: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, wanted: list[bool], causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """``aten::_scaled_dot_product_efficient_attention_backward``."""
    scores = _scores(q, k, scale, causal)
    if bias is not None and bias.numel():
        scores = scores + bias.float()
    by_q, by_k, by_v, by_scores = _gradients(grad, q, k, v, out, logs[..., : q.shape[2]], scores, scale)
    return by_q.to(q.dtype), by_k.to(q.dtype), by_v.to(q.dtype), by_scores.to(q.dtype) if wanted[3] else None


# Products of half-width matrices with sums in float32.


def wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``aten::mm.dtype`` and ``aten::bmm.dtype``."""
    if a.dtype not in HALF or a.dtype != b.dtype or dtype != torch.float32:
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    return a.float() @ b.float()


def install() -> None:
    """Register them."""
    for name, reference in {
        "_flash_attention_forward": flash_forward,
        "_flash_attention_backward": flash_backward,
        "_scaled_dot_product_flash_attention": dense_flash,
        "_scaled_dot_product_flash_attention_backward": dense_flash_backward,
        "_scaled_dot_product_efficient_attention": efficient,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
        "mm.dtype": wide_mm,
        "bmm.dtype": wide_mm,
    }.items():
        _library.impl(name, reference)
