"""What do the operations between matrix products compute? In torch alone: the definition that the kernels must meet.

``wide`` is float32, or float64 for models of that type: residuals, statistics, the softmax and the gradient of
attention are computed in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from oncurve.trunk.layout import Layout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
AT_ONCE = 512
"""Rows that go through several operations one after another, while they lie in the processor's cache."""


class Rotary(Protocol):
    """Cosines and sines of the positions of all tokens, [N, D / 2] each, in the wide type."""

    @property
    def cosine(self) -> Tensor:
        """Of every position."""
        ...

    @property
    def sine(self) -> Tensor:
        """Of every position."""
        ...

    def turn(self) -> Tensor:
        """exp(i angle) [N, 1, D / 2], scaled as they are."""
        ...


class Heads(Protocol):
    """The sizes of attention."""

    @property
    def heads(self) -> int:
        """Of queries."""
        ...

    @property
    def kv_heads(self) -> int:
        """Of keys and values."""
        ...

    @property
    def head_size(self) -> int:
        """Numbers of a head: D."""
        ...


def attend_with_sums(
    q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor | None = None, is_causal: bool = False
) -> Sequence[Tensor]:
    """What queries [B, Q, T, D] gather from keys and values [B, Q, S, D], and the logarithms of the softmax's sums.

    ``hidden`` is added to the scores and fits [B, Q, T, S] when repeated.
    """
    if q.device.type == "cpu":
        return _flash(q, k, v, 0.0, is_causal, attn_mask=hidden)
    if hidden is not None:
        hidden = hidden.to(q.dtype).expand(*q.shape[:3], k.shape[2])
    mixed, logs, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, hidden, True, 0.0, is_causal)
    return mixed, logs[..., : q.shape[2]]  # the kernel fills up its queries


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, epsilon: float, out_type: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y, its root-mean-square norm times the weight, and 1 / rms for the backward pass [N]."""
    total = x if y is None else x + y
    scale = torch.linalg.vector_norm(total, dim=-1).square_().div_(total.shape[-1]).add_(epsilon).rsqrt_()
    return total, (total * scale[:, None]).mul_(weight).to(out_type), scale


def norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_x: Tensor, grad_weight: Tensor) -> None:
    """Add the gradients of the norm: to grad_x scale (g w - xhat mean(g w xhat)), to grad_weight sum(g xhat)."""
    product = x * g
    shift = torch.mv(product, weight).mul_(scale.pow(3)).div_(-x.shape[-1])
    grad_weight += torch.mv(product.T, scale)
    grad_x += torch.mul(g, weight, out=product).mul_(scale[:, None]).addcmul_(x, shift[:, None])


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of rows that hold gate and up side by side."""
    if len(gate_up) <= AT_ONCE or gate_up.is_cuda:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    for part, to in zip(gate_up.split(AT_ONCE), out.split(AT_ONCE), strict=True):
        gate, up = part.chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), up, out=to)
    return out


def swiglu_backward(g: Tensor, gate_up: Tensor) -> Tensor:
    """silu(gate) * up once more; gate and up are overwritten with their gradients."""
    out = torch.empty_like(g)
    for grad, part, to in zip(g.split(AT_ONCE), gate_up.split(AT_ONCE), out.split(AT_ONCE), strict=True):
        gate, up = part.chunk(2, dim=-1)
        silu = torch.nn.functional.silu(gate)
        torch.mul(silu, up, out=to)
        torch.ops.aten.silu_backward(up.mul_(grad), gate, grad_input=gate)
        torch.mul(grad, silu, out=up)
    return out


def attention(qkv: Tensor, rotary: Rotary, layout: Layout, sizes: Heads) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What every token of a packed sequence gathers [N, heads D], and what ``attention_backward`` takes for ``kept``.

    Queries and keys in ``qkv`` are replaced by those turned by their positions. Products are in the type of ``qkv``,
    scores and their softmax in the wide type: each row's own tokens among themselves, then all tokens behind a prompt
    with it. The two parts are weighted by their shares of the softmax, whose logarithms of sums are kept [N, heads].
    """
    _turn(qkv, rotary, sizes)
    parts = _parts(qkv, sizes)
    mixed = qkv.new_empty(len(qkv), sizes.heads, sizes.head_size)
    logs = rotary.cosine.new_empty(mixed.shape[:2])
    for block in layout.blocks:
        rows = [block.take(part) for part in parts]
        for own, _, at in _by_key_head(rows, rows, sizes):
            for to, part in zip((mixed, logs), attend_with_sums(*at, is_causal=True), strict=True):
                block.put(to[:, own], part.transpose(1, 2))
    for prompt, places in layout.readers:
        for own, _, at in _by_key_head(_one_row(parts, places), _one_row(parts, prompt), sizes):
            part, part_logs = (x[0].transpose(0, 1) for x in attend_with_sums(*at))
            own_logs = logs[places, own]
            share = torch.sigmoid(part_logs - own_logs)[..., None]
            mixed[places, own] = torch.lerp(mixed[places, own].to(share.dtype), part.to(share.dtype), share)
            logs[places, own] = torch.logaddexp(own_logs, part_logs)
    out = mixed.flatten(1)
    return out, (out, logs)


def attention_backward(
    grad_mixed: Tensor,
    qkv: Tensor,
    kept: tuple[Tensor, Tensor],
    rotary: Rotary,
    layout: Layout,
    sizes: Heads,
) -> Tensor:
    """The gradient of queries, keys and values of all tokens [N, C], in the wide type.

    ``qkv`` is what ``attention`` was given, as it left it.
    """
    logs = kept[1]
    parts = _parts(qkv.to(logs.dtype), sizes)
    mixed, g = (part.to(logs.dtype).unflatten(1, (sizes.heads, -1)) for part in (kept[0], grad_mixed))
    out = logs.new_empty(qkv.shape)
    heads = out.unflatten(1, (-1, sizes.head_size))
    grads, grad_values = logs.new_empty(parts[0].shape), heads[:, -sizes.kv_heads :]
    for block in layout.blocks:
        rows, sums = [block.take(part) for part in parts], block.take(logs)
        if block.run is None:  # no probability where there is no query
            sums.flatten(0, 1).masked_fill_(~block.real[:, None], torch.inf)
        outer = [block.take(part) for part in (g, mixed)] + [sums]
        for own, key, at in _by_key_head(rows, rows, sizes):
            grad_q, grad_k, grad_v = _flash_backward_of([part[:, :, own] for part in outer], at, is_causal=True)
            block.put(grads[:, own], grad_q)
            block.put(grads[:, sizes.heads + key], grad_k)
            block.put(grad_values[:, key], grad_v)
    for prompt, places in layout.readers:
        outer = [part[places][None] for part in (g, mixed, logs)]
        for own, key, at in _by_key_head(_one_row(parts, places), _one_row(parts, prompt), sizes):
            grad_q, grad_k, grad_v = _flash_backward_of([part[:, :, own] for part in outer], at, is_causal=False)
            grads[places, own] += grad_q[0]
            grads[prompt, sizes.heads + key] += grad_k[0]
            grad_values[prompt, key] += grad_v[0]
    pairs = torch.view_as_complex(grads.unflatten(-1, (-1, 2))).mul_(rotary.turn().conj())
    halves = heads[:, : -sizes.kv_heads].unflatten(-1, (2, -1))
    halves.copy_(torch.view_as_real(pairs).transpose(-1, -2))
    return out


def _turn(qkv: Tensor, rotary: Rotary, sizes: Heads) -> None:
    """Turn queries and keys by their positions, in the wide type, and leave them in pairs.

    The order within heads is of no matter to the scores, as long as it is the same for both.
    """
    heads = _parts(qkv, sizes)[0]
    turned = torch.complex(*heads.to(rotary.cosine.dtype).chunk(2, dim=-1)).mul_(rotary.turn())
    heads.copy_(torch.view_as_real(turned).flatten(-2))


def _parts(qkv: Tensor, sizes: Heads) -> tuple[Tensor, Tensor]:
    """Queries and keys [N, heads + kv_heads, D], values [N, kv_heads, D]."""
    queries_and_keys, values = qkv.unflatten(1, (-1, sizes.head_size)).split(
        [sizes.heads + sizes.kv_heads, sizes.kv_heads], dim=1
    )
    return queries_and_keys, values


def _one_row(parts: tuple[Tensor, Tensor], places: slice | Tensor) -> list[Tensor]:
    return [part[places][None] for part in parts]


def _by_key_head(
    readers: Sequence[Tensor], read: Sequence[Tensor], sizes: Heads
) -> Iterator[tuple[slice, int, tuple[Tensor, Tensor, Tensor]]]:
    """For each key head: which query heads read it, its number, and the numbers of queries, keys and values.

    ``readers`` and ``read`` hold what ``_parts`` gives, by row [B, T, ...] and [B, S, ...]. They become
    q [B, Q, T, D], k and v [B, Q, S, D], where keys and values lie once for their Q query heads.
    """
    shared = sizes.heads // sizes.kv_heads
    for key in range(sizes.kv_heads):
        own = slice(key * shared, (key + 1) * shared)
        at = (read[0][:, None, :, sizes.heads + key], read[1][:, None, :, key])
        k, v = (part.expand(-1, shared, -1, -1) for part in at)
        yield own, key, (readers[0][:, :, own].transpose(1, 2), k, v)


def _flash_backward_of(
    outer: Sequence[Tensor], at: tuple[Tensor, Tensor, Tensor], *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [B, T, Q, D], keys and values [B, S, D]; ``outer``: gradient, output and its logarithms."""
    g, mixed, sums = (part.transpose(1, 2) for part in outer)
    grad_q, grad_k, grad_v = _flash_backward(g, *at, mixed, sums, 0.0, is_causal)
    return grad_q.transpose(1, 2), grad_k.sum(dim=1), grad_v.sum(dim=1)


def paired(x: Tensor) -> Tensor:
    """The last dimension with the two numbers that a rotary embedding turns together next to each other."""
    return x.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)


def own_cache(slots: int, positions: int, sizes: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for keys and values of completions [slots, kv_heads, positions, D] each, on torch's default device."""
    keys, values = torch.zeros(2, slots, sizes.kv_heads, positions, sizes.head_size, dtype=dtype)
    return keys, values


def prompt_cache(slots: int, positions: int, sizes: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same for prompts."""
    return own_cache(slots, positions, sizes, dtype)


def store_prompts(
    qkv: Tensor, rotary: Rotary, layout: Layout, slots: Tensor, caches: tuple[Tensor, Tensor], sizes: Heads
) -> None:
    """Write the keys and values of a layout's prompts, in the order of ``layout.spans``, to slots of the caches.

    Keys are stored in pairs, as a decode step reads them.
    """
    turned = qkv.to(rotary.cosine.dtype, copy=True)
    _turn(turned, rotary, sizes)
    queries_and_keys, v = _parts(turned, sizes)
    k = queries_and_keys[:, sizes.heads :]
    for (start, length, *_), slot in zip(layout.spans.tolist(), slots.tolist(), strict=False):
        for cache, part in zip(caches, (k, v), strict=True):
            cache[slot, :, :length] = part[start : start + length].transpose(0, 1)
