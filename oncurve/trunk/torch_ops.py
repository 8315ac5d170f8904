"""What do the operations between matrix products compute? In torch alone: the definition that the kernels must meet.

``wide`` is float32, or float64 for models of that type: residuals, attention and statistics are computed in it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from oncurve.trunk.layout import Block, Layout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def swiglu_backward(g: Tensor, gate_up: Tensor) -> Tensor:
    """silu(gate) * up once more; gate and up are overwritten with their gradients."""
    gate, up = gate_up.chunk(2, dim=-1)
    silu = torch.nn.functional.silu(gate)
    out = silu * up
    gate.copy_(torch.ops.aten.silu_backward(up.mul_(g), gate))
    torch.mul(g, silu, out=up)
    return out


def attention(qkv: Tensor, rotary: Rotary, layout: Layout, sizes: Heads) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What every token of a packed sequence gathers [N, heads D], and what ``attention_backward`` takes for ``kept``.

    Attention is computed in the wide type: each row's own tokens among themselves, then all tokens behind a prompt with
    it. The two parts are weighted by their shares of the softmax, whose logarithms of sums are kept [N, heads].
    """
    q, k, v = _turned(qkv, rotary, sizes)
    mixed, logs = torch.empty_like(q), q.new_empty(q.shape[:2])
    for block in layout.blocks:
        own, own_logs = _flash(*_padded(block, q, k, v, sizes), 0.0, True)
        places = block.queries[block.real]
        mixed[places], logs[places] = (_tokens(part)[block.real] for part in (own, own_logs))
    for prompt, places in layout.readers:
        part, part_logs = _flash(
            _stacked(q[places], sizes), _heads_first(k[prompt]), _heads_first(v[prompt]), 0.0, False
        )
        part, part_logs = _unstacked(part, sizes), _unstacked(part_logs[..., None], sizes)[..., 0]
        before, total = logs[places], torch.logaddexp(logs[places], part_logs)
        share = (before - total).exp_()[..., None]
        mixed[places] = (mixed[places] * share).addcmul_(part, (part_logs - total).exp_()[..., None])
        logs[places] = total
    out = mixed.flatten(1).to(qkv.dtype)
    return out, (out, logs)


def attention_backward(
    grad_mixed: Tensor,
    qkv: Tensor,
    kept: tuple[Tensor, Tensor],
    rotary: Rotary,
    layout: Layout,
    sizes: Heads,
) -> Tensor:
    """The gradient of queries, keys and values of all tokens [N, C], in the wide type."""
    q, k, v = _turned(qkv, rotary, sizes)
    mixed, g = (part.to(q.dtype).view_as(q) for part in (kept[0], grad_mixed))
    logs, shared = kept[1], sizes.heads // sizes.kv_heads
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for block in layout.blocks:
        padded_g, padded_mixed = (_rows(block, part) for part in (g, mixed))
        # infinite where there is no query: its probabilities become zero
        sums = logs.index_select(0, block.queries).masked_fill_(~block.real[:, None], torch.inf)
        sums = sums.unflatten(0, (block.rows, -1)).transpose(1, 2)
        grads = _flash_backward(padded_g, *_padded(block, q, k, v, sizes), padded_mixed, sums, 0.0, True)
        places = block.queries[block.real]
        grad_q[places] = _tokens(grads[0])[block.real]
        for to, grad in ((grad_k, grads[1]), (grad_v, grads[2])):
            to[places] = _tokens(grad)[block.real].unflatten(1, (-1, shared)).sum(dim=2)
    for prompt, places in layout.readers:
        at = (_stacked(q[places], sizes), _heads_first(k[prompt]), _heads_first(v[prompt]))
        sums = _stacked(logs[places][..., None], sizes)[..., 0]
        grads = _flash_backward(_stacked(g[places], sizes), *at, _stacked(mixed[places], sizes), sums, 0.0, False)
        grad_q[places] += _unstacked(grads[0], sizes)
        grad_k[prompt] += grads[1][0].transpose(0, 1)
        grad_v[prompt] += grads[2][0].transpose(0, 1)
    cosine, sine = whole_angles(rotary)
    return torch.cat([turn(grad_q, cosine, -sine), turn(grad_k, cosine, -sine), grad_v], dim=1).flatten(1)


def _turned(qkv: Tensor, rotary: Rotary, sizes: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, heads, D], k and v [N, kv_heads, D] in the wide type, turned by their positions."""
    wide = qkv.to(rotary.cosine.dtype).unflatten(1, (-1, sizes.head_size))
    q, k = turn(wide[:, : -sizes.kv_heads], *whole_angles(rotary)).split([sizes.heads, sizes.kv_heads], dim=1)
    return q, k, wide[:, -sizes.kv_heads :]


def _padded(block: Block, q: Tensor, k: Tensor, v: Tensor, sizes: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Own tokens of a block's rows [R, heads, T, D]; keys and values stand once for each of their query heads."""
    shared = sizes.heads // sizes.kv_heads
    spread = (part.repeat_interleave(shared, dim=1) for part in (k, v))
    return _rows(block, q), *(_rows(block, part) for part in spread)  # type: ignore[return-value]


def _rows(block: Block, x: Tensor) -> Tensor:
    """[N, heads, D] as [R, heads, T, D]; padding holds what stands at place 0."""
    return x.index_select(0, block.queries).unflatten(0, (block.rows, -1)).transpose(1, 2)


def _tokens(x: Tensor) -> Tensor:
    """[R, heads, T, ...] as [R * T, heads, ...]."""
    return x.transpose(1, 2).flatten(0, 1)


def _stacked(x: Tensor, sizes: Heads) -> Tensor:
    """[n, heads, D] as [1, kv_heads, n * heads / kv_heads, D]: all that reads one key head side by side."""
    return x.unflatten(1, (sizes.kv_heads, -1)).transpose(0, 1).flatten(1, 2)[None]


def _unstacked(x: Tensor, sizes: Heads) -> Tensor:
    """The way back."""
    return x[0].unflatten(1, (-1, sizes.heads // sizes.kv_heads)).transpose(0, 1).flatten(1, 2)


def _heads_first(x: Tensor) -> Tensor:
    """[S, kv_heads, D] as [1, kv_heads, S, D]."""
    return x.transpose(0, 1)[None]


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Heads [N, heads, D] turned by the angles of their positions (rotary embedding), given as by ``whole_angles``."""
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, dims=-1), sine)


def whole_angles(rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all numbers of a head [N, 1, D]; the sines of the first half are negated."""
    cosine = torch.cat([rotary.cosine, rotary.cosine], dim=-1)
    sine = torch.cat([-rotary.sine, rotary.sine], dim=-1)
    return cosine[:, None], sine[:, None]


def own_cache(slots: int, positions: int, sizes: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for the keys and the values of completions [slots, kv_heads, positions, D] each."""
    keys, values = torch.zeros(2, slots, sizes.kv_heads, positions, sizes.head_size, dtype=dtype)
    return keys, values


def prompt_cache(slots: int, positions: int, sizes: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same for prompts."""
    return own_cache(slots, positions, sizes, dtype)


def store_prompts(
    qkv: Tensor, rotary: Rotary, layout: Layout, slots: Tensor, caches: tuple[Tensor, Tensor], sizes: Heads
) -> None:
    """Write the keys and values of a layout's prompts, in the order of ``layout.spans``, to slots of the caches."""
    _, k, v = _turned(qkv, rotary, sizes)
    for (start, length, *_), slot in zip(layout.spans.tolist(), slots.tolist(), strict=False):
        for cache, part in zip(caches, (k, v), strict=True):
            cache[slot, :, :length] = part[start : start + length].transpose(0, 1)
