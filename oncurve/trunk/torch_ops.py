"""What do the operations between matrix products compute? In torch alone: the definition that the kernels must meet.

``wide`` is float32, or float64 for models of that type: residuals, attention and statistics are computed in it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from oncurve.trunk.layout import Block, Layout


class Rotary(Protocol):
    """Cosines and sines of the positions of all tokens, [N, D / 2] each, in the wide type."""

    cosine: Tensor
    sine: Tensor


class Heads(Protocol):
    """The sizes of attention."""

    heads: int
    kv_heads: int
    head_size: int


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, epsilon: float, out_type: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y, its root-mean-square norm times the weight, and 1 / rms for the backward pass [N]."""
    total = x if y is None else x + y
    scale = torch.rsqrt(total.square().mean(dim=-1) + epsilon)
    return total, (total * scale[:, None] * weight).to(out_type), scale


def norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_x: Tensor, grad_weight: Tensor) -> None:
    """Add the gradients of the norm: to grad_x scale (g w - xhat mean(g w xhat)), to grad_weight sum(g xhat)."""
    wide = g.to(x.dtype)
    normed = x * scale[:, None]
    weighted = wide * weight
    grad_x += scale[:, None] * (weighted - normed * (weighted * normed).mean(dim=-1, keepdim=True))
    grad_weight += (wide * normed).sum(dim=0)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of rows that hold gate and up side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def swiglu_backward(g: Tensor, gate_up: Tensor) -> Tensor:
    """silu(gate) * up once more; gate and up are overwritten with their gradients."""
    gate, up = gate_up.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    out = silu * up
    grad_gate = g * up * (sigmoid + silu * (1 - sigmoid))
    up.copy_(g * silu)
    gate.copy_(grad_gate)
    return out


def attention(qkv: Tensor, rotary: Rotary, layout: Layout, sizes: Heads) -> tuple[Tensor, list[Tensor]]:
    """What every token of a packed sequence gathers [N, heads D], and what ``attention_backward`` takes for ``kept``.

    Attention is computed in the wide type; what is kept are the probabilities of each block [R, heads, T, S + T].
    """
    mixed = qkv.new_empty(len(qkv), sizes.heads * sizes.head_size)
    kept = []
    for block in layout.blocks:
        q, k, v = _gather(qkv, rotary, block, sizes)
        scores = torch.bmm(_by_key(q, sizes), _flat(k).transpose(1, 2)).view(*q.shape[:3], -1)
        scores *= sizes.head_size**-0.5
        scores.masked_fill_(~block.visible()[:, None], -torch.inf)
        p = torch.softmax(scores, dim=-1, out=scores)
        o = torch.bmm(_by_key(p, sizes), _flat(v)).view_as(q).transpose(1, 2).reshape(len(block.queries), -1)
        mixed.index_copy_(0, block.queries[block.real], o[block.real].to(mixed.dtype))
        kept.append(p)
    return mixed, kept


def attention_backward(
    grad_mixed: Tensor,
    qkv: Tensor,
    kept: list[Tensor],
    rotary: Rotary,
    layout: Layout,
    sizes: Heads,
) -> Tensor:
    """The gradient of queries, keys and values of all tokens [N, C], in the wide type; ``kept`` is used up."""
    d = sizes.head_size
    grad_qkv = torch.zeros(qkv.shape, dtype=rotary.cosine.dtype)
    to_q, to_k, to_v = grad_qkv.split([sizes.heads * d, sizes.kv_heads * d, sizes.kv_heads * d], dim=1)
    for block in reversed(layout.blocks):
        p = kept.pop()
        q, k, v = _gather(qkv, rotary, block, sizes)
        g = grad_mixed.index_select(0, block.queries).to(q.dtype) * block.real[:, None]
        g = _by_key(g.view(block.rows, -1, sizes.heads, d).transpose(1, 2), sizes)
        by_key = _by_key(p, sizes)
        grad_v = torch.bmm(by_key.transpose(1, 2), g).view_as(v)
        grad_scores = torch.bmm(g, _flat(v).transpose(1, 2))  # of the probabilities, then in place of the scores
        grad_scores -= (grad_scores * by_key).sum(dim=-1, keepdim=True)
        grad_scores *= by_key
        grad_scores *= d**-0.5
        grad_q = torch.bmm(grad_scores, _flat(k)).view_as(q)
        grad_k = torch.bmm(grad_scores.transpose(1, 2), _by_key(q, sizes)).view_as(k)
        for to, places, grad in (
            (to_q, block.queries, rotate(grad_q, rotary, block.queries, back=True)),
            (to_k, block.keys, rotate(grad_k, rotary, block.keys, back=True)),
            (to_v, block.keys, grad_v),
        ):
            to.index_add_(0, places, grad.transpose(1, 2).reshape(len(places), -1))
    return grad_qkv


def _gather(qkv: Tensor, rotary: Rotary, block: Block, sizes: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q [R, heads, T, D], k and v [R, kv_heads, S + T, D] in the wide type, rotated by their positions."""
    d = sizes.head_size
    q, k, v = qkv.split([sizes.heads * d, sizes.kv_heads * d, sizes.kv_heads * d], dim=1)

    def take(part: Tensor, places: Tensor, heads: int) -> Tensor:
        picked = part.to(rotary.cosine.dtype).index_select(0, places)
        return picked.view(block.rows, -1, heads, d).transpose(1, 2)

    return (
        rotate(take(q, block.queries, sizes.heads), rotary, block.queries),
        rotate(take(k, block.keys, sizes.kv_heads), rotary, block.keys),
        take(v, block.keys, sizes.kv_heads).contiguous(),
    )


def _by_key(x: Tensor, sizes: Heads) -> Tensor:
    """[R, heads, T, X] as [R * kv_heads, heads / kv_heads * T, X]: query heads of one key head side by side."""
    return x.reshape(len(x) * sizes.kv_heads, -1, x.shape[-1])


def _flat(x: Tensor) -> Tensor:
    """[R, kv_heads, L, D] as [R * kv_heads, L, D]."""
    return x.reshape(-1, *x.shape[2:])


def rotate(x: Tensor, rotary: Rotary, places: Tensor, *, back: bool = False) -> Tensor:
    """Heads [R, heads, T, D] turned by the angle of their positions (rotary embedding), or back."""
    shape = (x.shape[0], 1, x.shape[2], -1)
    cosine, sine = (part.index_select(0, places).view(shape) for part in (rotary.cosine, rotary.sine))
    a, b = x.chunk(2, dim=-1)
    if back:
        sine = -sine
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Heads [N, heads, D] turned by angles [N, heads, D] whose first half of sines is negated: ``whole_angles``."""
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, dims=-1), sine)


def whole_angles(rotary: Rotary, sizes: Heads) -> tuple[Tensor, Tensor]:
    """Cosines and sines for ``turn`` of queries and keys side by side [N, heads + kv_heads, D].

    Those of queries also hold the factor D ** -0.5 of the scores.
    """
    scale = rotary.cosine.new_ones(sizes.heads + sizes.kv_heads, 1)
    scale[: sizes.heads] = sizes.head_size**-0.5
    cosine = torch.cat([rotary.cosine, rotary.cosine], dim=-1)
    sine = torch.cat([-rotary.sine, rotary.sine], dim=-1)
    return cosine[:, None] * scale, sine[:, None] * scale


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
    d = sizes.head_size
    for (start, length, *_), slot in zip(layout.spans.tolist(), slots.tolist(), strict=True):
        places = torch.arange(start, start + length)
        k, v = qkv[start : start + length, sizes.heads * d :].view(length, 2, sizes.kv_heads, d).unbind(1)
        turned = rotate(k.to(rotary.cosine.dtype).transpose(0, 1)[None], rotary, places)[0]
        caches[0][slot, :, :length] = turned
        caches[1][slot, :, :length] = v.transpose(0, 1)
