"""What do the operations between matrix products compute? In torch alone: the definition that the kernels must meet.

``wide`` is float32, or float64 for models of that type: residuals, attention and statistics are computed in it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from oncurve.trunk.layout import Block, Layout

KEYS_AXIS = 3
"""Where the positions of a completion's keys lie in its cache."""


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


def own_cache(slots: int, positions: int, sizes: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for the keys [slots, kv_heads, D, positions] and values [slots, kv_heads, positions, D] of completions."""
    keys = torch.zeros(slots, sizes.kv_heads, sizes.head_size, positions, dtype=dtype)
    return keys, torch.zeros(slots, sizes.kv_heads, positions, sizes.head_size, dtype=dtype)


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
        caches[0][slot, :, :, :length] = turned.transpose(1, 2).to(caches[0].dtype)
        caches[1][slot, :, :length] = v.transpose(0, 1).to(caches[1].dtype)


def attend(
    qkv: Tensor, rotary: Rotary, places: Tensor, caches: tuple[Tensor, Tensor, Tensor, Tensor], sizes: Heads
) -> Tensor:
    """Attention of one new token per row to its prompt and its own past, which then holds it too: [R, heads D].

    ``places`` holds for each row its slot, its own tokens so far, its prompt's slot and the prompt's tokens. Keys lie
    as [slots, kv_heads, D, capacity], values as [slots, kv_heads, capacity, D].
    """
    own_keys, own_values, prompt_keys, prompt_values = caches
    d, rows = sizes.head_size, len(qkv)
    slots, past, prompts, lengths = places.unbind(1)
    q, k, v = qkv.to(rotary.cosine.dtype).split([sizes.heads * d, sizes.kv_heads * d, sizes.kv_heads * d], dim=1)
    everyone = torch.arange(rows)
    q = rotate(q.view(rows, 1, sizes.heads, d).transpose(1, 2), rotary, everyone).squeeze(2)
    k = rotate(k.view(rows, 1, sizes.kv_heads, d).transpose(1, 2), rotary, everyone).squeeze(2)
    own_keys[slots, :, :, past] = k.to(own_keys.dtype)
    own_values[slots, :, past] = v.view(rows, sizes.kv_heads, d).to(own_values.dtype)
    seen, width = int(past.max()) + 1, int(lengths.max())
    q = q.view(rows, sizes.kv_heads, -1, d).to(own_keys.dtype) * d**-0.5
    in_place = bool((slots == everyone).all())

    def mine(buffer: Tensor) -> Tensor:
        return buffer[:rows] if in_place else buffer.index_select(0, slots)

    scores = torch.cat(
        [_by_prompt(q, prompt_keys[..., :width], prompts), torch.matmul(q, mine(own_keys[..., :seen]))], dim=-1
    ).to(rotary.cosine.dtype)
    hidden = torch.cat([torch.arange(width) >= lengths[:, None], torch.arange(seen) > past[:, None]], dim=1)
    p = torch.softmax(scores.masked_fill_(hidden[:, None, None], -torch.inf), dim=-1).to(own_keys.dtype)
    mixed = _by_prompt(p[..., :width], prompt_values[:, :, :width], prompts)
    mixed = mixed + torch.matmul(p[..., width:], mine(own_values[:, :, :seen]))
    return mixed.reshape(rows, -1).to(qkv.dtype)


def _by_prompt(x: Tensor, shared: Tensor, prompts: Tensor) -> Tensor:
    """x [R, kv_heads, Q, A] @ shared[prompt] [kv_heads, A, B]: neighbours of one prompt share a product."""
    slots, counts = torch.unique_consecutive(prompts, return_counts=True)
    pieces = []
    for part, slot in zip(x.split(counts.tolist()), slots.tolist(), strict=True):
        together = part.transpose(0, 1).flatten(1, 2)  # [kv_heads, rows * Q, A]
        pieces.append(torch.matmul(together, shared[slot]).unflatten(1, part.shape[0:3:2]).transpose(0, 1))
    return torch.cat(pieces)
