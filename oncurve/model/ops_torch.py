"""Reference operations between matrix products, in torch alone: the definition that the kernels must meet.

``wide`` is float32, or float64 for models of that type: residuals, statistics, the softmax and the gradient of
attention are computed in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from oncurve.algorithm.precision import narrow, wide_product
from oncurve.model.packing import Layout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
AT_ONCE = 512
"""Rows that go through several operations one after another, while they lie in the processor's cache."""


class Rotary(Protocol):
    """Cosines and sines of the positions of all tokens, [N, D / 2] each, in the wide type."""

    @property
    def cosine(self) -> Tensor:
        """For every position."""
        ...

    @property
    def sine(self) -> Tensor:
        """For every position."""
        ...

    def turn(self) -> Tensor:
        """exp(i angle) [N, 1, D / 2], scaled as they are."""
        ...


class Heads(Protocol):
    """The sizes of attention."""

    @property
    def heads(self) -> int:
        """Number of query heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        ...

    @property
    def head_size(self) -> int:
        """Numbers of a head: D."""
        ...


def attend_with_sums(
    q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor | None = None, is_causal: bool = False
) -> Sequence[Tensor]:
    """Attention of queries [B, Q, T, D] to keys and values [B, Q, S, D], and the logarithms of the softmax's sums.

    ``hidden`` is added to the scores and fits [B, Q, T, S] when repeated.
    """
    if q.device.type == "cpu":
        return _flash(q, k, v, 0.0, is_causal, attn_mask=hidden)
    if hidden is not None:
        hidden = hidden.to(q.dtype).expand(*q.shape[:3], k.shape[2])
    mixed, logs, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, hidden, True, 0.0, is_causal)
    return mixed, logs[..., : q.shape[2]]  # the kernel fills up its queries


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, epsilon: float, out_type: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y, its root-mean-square norm times the weight, and 1 / rms [N], for the backward pass.

    There it is given as ``scale``, and need not be computed again.
    """
    total = x if y is None else x + y
    known = scale
    if known is None:
        known = torch.linalg.vector_norm(total, dim=-1).square_().div_(total.shape[-1]).add_(epsilon).rsqrt_()
    return total, (total * known[:, None]).mul_(weight).to(out_type), known


def norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_x: Tensor, grad_weight: Tensor) -> None:
    """Add the gradients of the norm: to grad_x scale (g w - xhat mean(g w xhat)), to grad_weight sum(g xhat)."""
    g = g.to(x.dtype)  # once, not in each product
    product = x * g
    shift = torch.mv(product, weight).mul_(scale.pow(3)).div_(-x.shape[-1])
    grad_weight += torch.mv(product.T, scale)
    grad_x += torch.mul(g, weight, out=product).mul_(scale[:, None]).addcmul_(x, shift[:, None])


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of rows that hold gate and up side by side."""
    pieces = _at_once(gate_up)
    if len(pieces) == 1:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    for part, to in zip(pieces, _at_once(out), strict=True):
        gate, up = part.chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), up, out=to)
    return out


def swiglu_backward(g: Tensor, gate_up: Tensor) -> Tensor:
    """silu(gate) * up once more; gate and up are overwritten with their gradients."""
    out = torch.empty_like(g)
    for grad, part, to in zip(_at_once(g), _at_once(gate_up), _at_once(out), strict=True):
        gate, up = part.chunk(2, dim=-1)
        silu = torch.nn.functional.silu(gate)
        torch.mul(silu, up, out=to)
        torch.ops.aten.silu_backward(up.mul_(grad), gate, grad_input=gate)
        torch.mul(grad, silu, out=up)
    return out


def head_matrix(weight: Tensor, dtype: torch.dtype, key: int | None = None) -> Tensor:
    """The head [V, H] as ``logits`` reads it, in the type of the product; ``key`` is that of its dither."""
    return narrow(weight, dtype, key)


def logits(hidden: Tensor, matrix: Tensor, vocabulary: int, out: Tensor | None = None) -> Tensor:
    """hidden @ weight.T [N, V], summed in float32 or better, in ``out`` if it is given; ``vocabulary`` is V."""
    return wide_product(hidden.to(matrix.dtype), matrix.T, out)


def attention(qkv: Tensor, rotary: Rotary, layout: Layout, sizes: Heads) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Attention of a packed sequence [N, heads D], and what ``attention_backward`` takes for ``kept``.

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
    for prompt, readers in layout.readers:
        q, k, v = _behind(parts, readers, prompt, sizes)
        part, part_logs = (x.transpose(0, 2).flatten(1, 2) for x in attend_with_sums(q, k, v))
        own_part, own_logs = mixed[readers], logs[readers]
        share = torch.sigmoid(part_logs - own_logs)[..., None]
        mixed[readers] = torch.lerp(own_part.to(share.dtype), part.to(share.dtype), share).to(mixed.dtype)
        logs[readers] = torch.logaddexp(own_logs, part_logs)
    out = mixed.flatten(1)
    return out, (out, logs)


def attention_backward(
    grad_mixed: Tensor,
    qkv: Tensor,
    saved: tuple[Tensor, Tensor],
    rotary: Rotary,
    layout: Layout,
    sizes: Heads,
) -> Tensor:
    """The gradient of queries, keys and values of all tokens [N, C], in the wide type.

    ``qkv`` is what ``attention`` was given, as it left it.
    """
    logs = saved[1]
    wide = qkv.to(logs.dtype)
    mixed, grad_out = (part.to(logs.dtype).unflatten(1, (sizes.heads, -1)) for part in (saved[0], grad_mixed))
    grad = logs.new_empty(qkv.shape)
    heads = grad.unflatten(1, (-1, sizes.head_size))
    for block in layout.blocks:
        rows, sums = _parts(block.take(wide), sizes), block.take(logs)
        if block.run is None:  # no probability where there is no query
            sums.flatten(0, 1).masked_fill_(~block.real[:, None], torch.inf)
        outer = (block.take(grad_out), block.take(mixed), sums)
        to = block.take(heads) if block.run is not None else logs.new_empty(*sums.shape[:2], *heads.shape[1:])
        for own, key, at in _by_key_head(rows, rows, sizes):
            g, out, sums = (part[:, :, own].transpose(1, 2) for part in outer)
            grad_q, *grads = _flash_backward(g, *at, out, sums, 0.0, True)
            to[:, :, own] = grad_q.transpose(1, 2)
            for head, part in zip((sizes.heads + key, key - sizes.kv_heads), grads, strict=True):
                first, *others = part.unbind(1)
                total = to[:, :, head].copy_(first)
                for other in others:
                    total.add_(other)
        if block.run is None:
            block.put(heads, to)
    parts, queries = _parts(wide, sizes), (sizes.kv_heads, -1)
    for prompt, readers in layout.readers:
        g, out, sums = (part[readers].unflatten(1, queries).transpose(0, 2) for part in (grad_out, mixed, logs))
        grad_q, *grads = _flash_backward(g, *_behind(parts, readers, prompt, sizes), out, sums, 0.0, False)
        heads[readers, : sizes.heads] += grad_q.transpose(0, 2).flatten(1, 2)
        heads[prompt, sizes.heads :] += torch.cat([part.sum(dim=0) for part in grads]).transpose(0, 1)
    for turned, turn in zip(_at_once(heads[:, : -sizes.kv_heads]), _at_once(rotary.turn()), strict=True):
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2))) * turn.conj()
        turned.unflatten(-1, (2, -1)).copy_(torch.view_as_real(pairs).transpose(-1, -2))
    return grad


def _at_once(x: Tensor) -> tuple[Tensor, ...]:
    """Rows in pieces that a processor's cache holds; a GPU takes all at once."""
    return x.split(AT_ONCE) if len(x) > AT_ONCE and not x.is_cuda else (x,)


def _turn(qkv: Tensor, rotary: Rotary, sizes: Heads) -> None:
    """Turn queries and keys by their positions, in the wide type, and leave them in pairs.

    The order within heads is of no matter to the scores, as long as it is the same for both.
    """
    for heads, turn in zip(_at_once(_parts(qkv, sizes)[0]), _at_once(rotary.turn()), strict=True):
        turned = torch.complex(*heads.to(rotary.cosine.dtype).chunk(2, dim=-1)).mul_(turn)
        heads.copy_(torch.view_as_real(turned).flatten(-2))


def _parts(qkv: Tensor, sizes: Heads) -> tuple[Tensor, Tensor]:
    """Queries and keys [..., heads + kv_heads, D], values [..., kv_heads, D]."""
    queries_and_keys, values = qkv.unflatten(-1, (-1, sizes.head_size)).split(
        [sizes.heads + sizes.kv_heads, sizes.kv_heads], dim=-2
    )
    return queries_and_keys, values


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


def _behind(
    parts: tuple[Tensor, Tensor], readers: slice | Tensor, prompt: slice, sizes: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of all T queries behind a prompt, and of its S keys and values, which lie once for Q query heads.

    ``parts`` holds what ``_parts`` gives, by token. They become q [Q, kv_heads, T, D], k and v [Q, kv_heads, S, D].
    """
    q = parts[0][readers, : sizes.heads].unflatten(1, (sizes.kv_heads, -1)).transpose(0, 2)
    k, v = (
        part.transpose(0, 1).expand(len(q), -1, -1, -1) for part in (parts[0][prompt, sizes.heads :], parts[1][prompt])
    )
    return q, k, v


def paired(x: Tensor) -> Tensor:
    """The last dimension with the two numbers that a rotary embedding turns together next to each other."""
    return x.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)


def own_cache(slots: int, positions: int, sizes: Heads, dtype: torch.dtype) -> Tensor:
    """Room for keys and values of completions [2, slots, kv_heads, positions, D], on torch's default device."""
    return torch.zeros(2, slots, sizes.kv_heads, positions, sizes.head_size, dtype=dtype)


def prompt_cache(slots: int, positions: int, sizes: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same for prompts, keys and values apart."""
    keys, values = own_cache(slots, positions, sizes, dtype)
    return keys, values


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
