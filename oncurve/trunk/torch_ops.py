"""What do the operations between matrix products compute? In torch alone: the definition that the kernels must meet.

``wide`` is float32, or float64 for models of that type: residuals, attention and statistics are computed in it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from oncurve.trunk.layout import Block


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


def gather(qkv: Tensor, rotary: Rotary, block: Block, sizes: Heads) -> tuple[Tensor, Tensor, Tensor]:
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


def rotate(x: Tensor, rotary: Rotary, places: Tensor, *, back: bool = False) -> Tensor:
    """Heads [R, heads, T, D] turned by the angle of their positions (rotary embedding), or back."""
    shape = (x.shape[0], 1, x.shape[2], -1)
    cosine, sine = (part.index_select(0, places).view(shape) for part in (rotary.cosine, rotary.sine))
    a, b = x.chunk(2, dim=-1)
    if back:
        sine = -sine
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


def gather_backward(
    grads: tuple[Tensor, Tensor, Tensor], rotary: Rotary, block: Block, sizes: Heads, grad_qkv: Tensor
) -> None:
    """Add the gradients of q, k and v to those of the tokens they came from [N, C]."""
    grad_q, grad_k, grad_v = grads
    d = sizes.head_size
    q, k, v = grad_qkv.split([sizes.heads * d, sizes.kv_heads * d, sizes.kv_heads * d], dim=1)

    def put(part: Tensor, places: Tensor, grad: Tensor) -> None:
        part.index_add_(0, places, grad.transpose(1, 2).reshape(len(places), -1))

    put(q, block.queries, rotate(grad_q, rotary, block.queries, back=True))
    put(k, block.keys, rotate(grad_k, rotary, block.keys, back=True))
    put(v, block.keys, grad_v)


def scatter(o: Tensor, block: Block, out: Tensor) -> None:
    """Write o [R, heads, T, D] to the rows' own tokens in out [N, heads D], without the padding."""
    flat = o.transpose(1, 2).reshape(len(block.queries), -1)
    out.index_copy_(0, block.queries[block.real], flat[block.real].to(out.dtype))


def scatter_backward(g: Tensor, block: Block, sizes: Heads, wide: torch.dtype) -> Tensor:
    """The gradient of o [R, heads, T, D], zero on padding."""
    picked = g.index_select(0, block.queries).to(wide) * block.real[:, None]
    return picked.view(block.rows, -1, sizes.heads, sizes.head_size).transpose(1, 2).contiguous()


def softmax(scores: Tensor, block: Block, scale: float) -> Tensor:
    """Probabilities of [R, heads, T, S + T] scores, in place: a token sees its prompt and its row up to itself."""
    scores *= scale
    scores.masked_fill_(~block.visible()[:, None], -torch.inf)
    return torch.softmax(scores, dim=-1, out=scores)


def softmax_backward(g: Tensor, p: Tensor, scale: float) -> Tensor:
    """The gradient of the scores, in place of that of the probabilities: p (g - sum(p g)) scale."""
    g -= (g * p).sum(dim=-1, keepdim=True)
    return g.mul_(p).mul_(scale)


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
