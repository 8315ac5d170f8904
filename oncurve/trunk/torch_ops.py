"""What do the operations between matrix products compute? In torch alone: the definition that the kernels must meet.

``wide`` is float32, or float64 for models of that type: residuals, attention and statistics are computed in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from oncurve.trunk.layout import Layout

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

    def by_head(self, heads: int, /) -> tuple[Tensor, Tensor]:
        """Both once for each head [N, heads, D / 2]."""
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
    parts = _turned(qkv, rotary, sizes)
    mixed = parts.new_empty(len(qkv), sizes.heads, sizes.head_size)
    logs = parts.new_empty(mixed.shape[:2])
    for block in layout.blocks:
        rows = block.take(parts)
        for own, _, _, at in _by_key_head(rows, rows, sizes):
            for to, part in zip((mixed, logs), _flash(*at, 0.0, True), strict=True):
                block.put(to[:, own], part.transpose(1, 2))
    for prompt, places in layout.readers:
        for own, _, _, at in _by_key_head(parts[places][None], parts[prompt][None], sizes):
            part, part_logs = (x[0].transpose(0, 1) for x in _flash(*at, 0.0, False))
            total = torch.logaddexp(logs[places, own], part_logs)
            of_own, of_prompt = ((part - total).exp_()[..., None] for part in (logs[places, own], part_logs))
            mixed[places, own] = (mixed[places, own] * of_own).addcmul_(part, of_prompt)
            logs[places, own] = total
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
    parts, logs = _turned(qkv, rotary, sizes), kept[1]
    mixed, g = (part.to(parts.dtype).unflatten(1, (sizes.heads, -1)) for part in (kept[0], grad_mixed))
    grads = torch.empty_like(parts)
    for block in layout.blocks:
        rows, sums = block.take(parts), block.take(logs)
        if block.run is None:  # no probability where there is no query
            sums.flatten(0, 1).masked_fill_(~block.real[:, None], torch.inf)
        outer = [block.take(part) for part in (g, mixed)] + [sums]
        for own, key, value, at in _by_key_head(rows, rows, sizes):
            grad_q, grad_k, grad_v = _flash_backward_of([part[:, :, own] for part in outer], at, is_causal=True)
            for to, grad in ((own, grad_q), (key, grad_k), (value, grad_v)):
                block.put(grads[:, to], grad)
    for prompt, places in layout.readers:
        outer = [part[places][None] for part in (g, mixed, logs)]
        for own, key, value, at in _by_key_head(parts[places][None], parts[prompt][None], sizes):
            grad_q, grad_k, grad_v = _flash_backward_of([part[:, :, own] for part in outer], at, is_causal=False)
            grads[places, own] += grad_q[0]
            grads[prompt, key] += grad_k[0]
            grads[prompt, value] += grad_v[0]
    out = torch.empty_like(grads)
    turn(grads[:, : -sizes.kv_heads], *_angles(rotary, sizes), out=out[:, : -sizes.kv_heads], back=True)
    out[:, -sizes.kv_heads :] = grads[:, -sizes.kv_heads :]
    return out.flatten(1)


def _turned(qkv: Tensor, rotary: Rotary, sizes: Heads) -> Tensor:
    """Heads of queries, keys and values [N, heads + 2 kv_heads, D] in the wide type, turned by their positions."""
    heads = qkv.unflatten(1, (-1, sizes.head_size))
    out = torch.empty(heads.shape, dtype=rotary.cosine.dtype)
    turn(heads[:, : -sizes.kv_heads].to(out.dtype), *_angles(rotary, sizes), out=out[:, : -sizes.kv_heads])
    out[:, -sizes.kv_heads :] = heads[:, -sizes.kv_heads :]
    return out


def _angles(rotary: Rotary, sizes: Heads) -> tuple[Tensor, Tensor]:
    return rotary.by_head(sizes.heads + sizes.kv_heads)


def _by_key_head(
    readers: Tensor, read: Tensor, sizes: Heads
) -> Iterator[tuple[slice, int, int, tuple[Tensor, Tensor, Tensor]]]:
    """For each key head: the places among all heads of its queries, of its keys and of its values, and their numbers.

    ``readers`` [B, T, heads + 2 kv_heads, D] and ``read`` [B, S, ...] give q [B, Q, T, D], k and v [B, Q, S, D], where
    keys and values lie once for their Q query heads.
    """
    shared = sizes.heads // sizes.kv_heads
    for head in range(sizes.kv_heads):
        own, key, value = slice(head * shared, (head + 1) * shared), sizes.heads + head, head - sizes.kv_heads
        k, v = (read[:, None, :, place].expand(-1, shared, -1, -1) for place in (key, value))
        yield own, key, value, (readers[:, :, own].transpose(1, 2), k, v)


def _flash_backward_of(
    outer: Sequence[Tensor], at: tuple[Tensor, Tensor, Tensor], *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [B, T, Q, D], keys and values [B, S, D]; ``outer``: gradient, output and its logarithms."""
    g, mixed, sums = (part.transpose(1, 2) for part in outer)
    grad_q, grad_k, grad_v = _flash_backward(g, *at, mixed, sums, 0.0, is_causal)
    return grad_q.transpose(1, 2), grad_k.sum(dim=1), grad_v.sum(dim=1)


def turn(x: Tensor, cosine: Tensor, sine: Tensor, *, out: Tensor | None = None, back: bool = False) -> Tensor:
    """Heads [N, heads, D] turned by the angles of their positions (rotary embedding), or back.

    a cos - b sin, b cos + a sin for the halves a and b of a head, with angles [N, heads, D / 2]
    """
    out = torch.empty_like(x) if out is None else out
    sign, (a, b), (to_a, to_b) = -1 if back else 1, x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cosine, out=to_a).addcmul_(b, sine, value=-sign)
    torch.mul(b, cosine, out=to_b).addcmul_(a, sine, value=sign)
    return out


def paired(x: Tensor) -> Tensor:
    """The last dimension with the two numbers that a rotary embedding turns together next to each other."""
    return x.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)


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
    """Write the keys and values of a layout's prompts, in the order of ``layout.spans``, to slots of the caches.

    Keys are stored in pairs, as a decode step reads them.
    """
    k, v = _turned(qkv, rotary, sizes)[:, sizes.heads :].chunk(2, dim=1)
    k = paired(k)
    for (start, length, *_), slot in zip(layout.spans.tolist(), slots.tolist(), strict=False):
        for cache, part in zip(caches, (k, v), strict=True):
            cache[slot, :, :length] = part[start : start + length].transpose(0, 1)
