"""How do torch's own operations compute all layers of a decode step? Slot by slot, in few and large products.

What is computed are the first slots of the caches, those of rows that ended among them until the running rows are moved
together: everything is read and written where it lies, and products come in few different sizes, for each of which
torch would prepare code of its own.

A step of a small model spends its time on calls, not on numbers, so they are few. The two numbers that a rotary
embedding turns together lie next to each other, as one complex number: queries and keys are in that order here, and
prompts' keys are stored in it, which leaves every score as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from oncurve.trunk.caches import LayerCache
from oncurve.trunk.ops import Ops
from oncurve.trunk.torch_ops import Rotary, paired
from oncurve.trunk.weights import LayerParameters, LayerWeights, Sizes, Trunk, norm_heads, project

SHARE = 8
"""The slots that are computed come in at most so many different numbers."""
Product = Callable[[Tensor], Tensor]
"""x [R, inputs] to x @ W.T + b [R, outputs]."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Which slots read which prompt, as a table of slots by prompt; it pads with slot 0."""

    table: Tensor | None
    """[P * G]; None where the slots stand in it in their order."""
    back: Tensor | None
    """The place of each slot in the table [span]."""
    prompts: int
    """P: the prompt slots 0, 1, ... that are read."""
    width: int
    """Tokens of the longest prompt."""
    leading: tuple[int, ...]
    """How the slots are arranged where they are not in the table: (P, G) if they stand in it in their order."""

    @classmethod
    def of(cls, slots: np.ndarray, prompts: np.ndarray, *, width: int, span: int) -> Groups:
        """From the slot and the prompt's slot of each row [R]."""
        sizes = np.bincount(prompts)
        count, most = len(sizes), int(sizes.max())
        order = np.argsort(prompts, kind="stable")
        first = np.cumsum(sizes) - sizes
        places = prompts[order] * most + np.arange(len(order)) - first[prompts[order]]
        table, back = np.zeros(count * most, dtype=np.int64), np.zeros(span, dtype=np.int64)
        table[places], back[slots[order]] = slots[order], places
        if len(table) == span and np.array_equal(table, np.arange(span)):
            return cls(None, None, count, width, (count, most))
        return cls(torch.from_numpy(table), torch.from_numpy(back), count, width, (span,))

    def together(self, x: Tensor) -> Tensor:
        """[*leading, kv_heads, Q, A] as [P * kv_heads, G * Q, A]: the slots of a prompt side by side."""
        picked = x if self.table is None else x.index_select(0, self.table).unflatten(0, (self.prompts, -1))
        prompts, rows, kv_heads, queries, width = picked.shape
        return picked.transpose(1, 2).reshape(prompts * kv_heads, rows * queries, width)

    def apart(self, x: Tensor, kv_heads: int, queries: int) -> Tensor:
        """The way back."""
        spread = x.view(self.prompts, kv_heads, -1, queries, x.shape[-1]).transpose(1, 2)
        return spread if self.back is None else spread.flatten(0, 1).index_select(0, self.back)


@dataclass(frozen=True, eq=False)
class Turn:
    """What one decode step reads and writes, the same for every layer."""

    span: int
    """Slots that are computed."""
    slots: Tensor | None
    """The slot of each row [R]; None where they are 0, 1, ... and no others are computed."""
    past: int | tuple[Tensor, Tensor]
    """Where the new token goes: one position of all slots, or slots and their positions."""
    seen: int
    """Own positions up to the newest token of any row."""
    groups: Groups
    hidden: Tensor | None
    """Which positions of prompts and of own tokens a slot does not see [*leading, 1, 1, S + T]; None: it sees all."""
    angles: Tensor
    """exp(i angle) of every pair [span, heads + kv_heads, D / 2], with what scales the scores in those of queries; zero
    in slots without a row."""

    def gather(self, x: Tensor) -> Tensor:
        """The rows of what was computed for all slots."""
        return x if self.slots is None else x.index_select(0, self.slots)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer as a decode step wants it; norms are in the wide type and times sqrt(H)."""

    first_norm: Tensor
    qkv: Product
    """To queries, keys and values, queries and keys in pairs."""
    head_norms: tuple[Tensor, Tensor] | None
    output: Product
    second_norm: Tensor
    gate_up: Product
    down: Product

    @classmethod
    @torch.no_grad()
    def of(cls, parameters: LayerParameters, matrices: LayerWeights, sizes: Sizes) -> Layer:
        """From what the model holds and its matrices in the compute type."""
        norms, bias = parameters.head_norms, matrices.qkv_bias
        return cls(
            first_norm=_scaled(parameters.first_norm),
            qkv=matrix_product(_in_pairs(matrices.qkv, sizes), None if bias is None else _in_pairs(bias, sizes)),
            head_norms=None if norms is None else (paired(norms[0]), paired(norms[1])),
            output=matrix_product(matrices.output),
            second_norm=_scaled(parameters.second_norm),
            gate_up=_side_by_side(matrices.gate_up),
            down=matrix_product(matrices.down),
        )


class TorchLayers:
    """All layers for one token per row, in torch alone: the definition that the kernels must meet."""

    def __init__(
        self, trunk: Trunk, weights: Sequence[LayerWeights], ops: Ops, compute_type: torch.dtype, *, slots: int
    ) -> None:
        """For rows in up to ``slots`` slots; the MLP is that of ``ops``."""
        self.sizes, self.wide = trunk.sizes, trunk.wide
        self.ops, self.compute_type, self.slots = ops, compute_type, slots
        self.layers = [Layer.of(*of, trunk.sizes) for of in zip(trunk.layers, weights, strict=True)]
        self.last_norm = _scaled(trunk.body.norm.weight.detach())
        width = len(self.last_norm)
        self._least_norm = torch.tensor((width * trunk.sizes.epsilon) ** 0.5, dtype=self.wide)
        self._scale = torch.ones(trunk.sizes.heads + trunk.sizes.kv_heads, 1, dtype=self.wide)
        self._scale[: trunk.sizes.heads] = trunk.sizes.head_size**-0.5
        self._groups: tuple[np.ndarray, int, Groups] | None = None

    def __call__(self, residual: Tensor, rotary: Rotary, places: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        """One more token per row: residual [R, H] to the normed output of the last layer [R, H] in the wide type."""
        turn = self._turn(rotary, places.numpy())
        added = None
        residual = residual if turn.slots is None else _spread(residual, turn.slots, turn.span)
        for layer, cache in zip(self.layers, caches, strict=True):
            residual, x = self._add_norm(residual, added, layer.first_norm)
            qkv = layer.qkv(x.to(self.compute_type))
            if layer.head_norms is not None:
                norm_heads(qkv, layer.head_norms, self.sizes)
            mixed = attend(qkv.to(self.wide), turn, cache, self.sizes).to(self.compute_type)
            residual, x = self._add_norm(residual, layer.output(mixed), layer.second_norm)
            added = layer.down(self.ops.swiglu(layer.gate_up(x.to(self.compute_type))))
        return turn.gather(self._add_norm(residual, added, self.last_norm)[1])

    def _add_norm(self, residual: Tensor, added: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum x, and w x / sqrt(mean(x^2) + epsilon) as sqrt(H) w x / hypot(|x|, sqrt(H epsilon))."""
        total = residual if added is None else added.to(self.wide).add_(residual)
        norm = torch.linalg.vector_norm(total, dim=-1, keepdim=True).hypot_(self._least_norm)
        return total, torch.mul(total, weight).div_(norm)

    def _turn(self, rotary: Rotary, places: np.ndarray) -> Turn:
        """What this step reads and writes; see ``Decoder.step`` for ``places``."""
        slots, past, lengths = places[:, 0], places[:, 1], places[:, 3]
        span = self._span(int(slots.max()) + 1)
        is_plain = span == len(slots) and np.array_equal(slots, np.arange(span))
        groups = self._read(places, span)
        seen = int(past.max()) + 1
        is_even, is_full = bool((past == seen - 1).all()), bool((lengths == groups.width).all())
        hidden = None
        if not (is_even and is_full):
            shut = np.zeros((span, groups.width + seen), dtype=np.bool_)
            shut[slots, : groups.width] = np.arange(groups.width) >= lengths[:, None]
            shut[slots, groups.width :] = np.arange(seen) > past[:, None]
            hidden = torch.from_numpy(shut).view(*groups.leading, 1, 1, -1)
        angles = rotary.turn() * self._scale
        rows = None if is_plain else torch.from_numpy(np.ascontiguousarray(slots))
        return Turn(
            span,
            rows,
            seen - 1 if is_even else (torch.from_numpy(slots), torch.from_numpy(past)),
            seen,
            groups,
            hidden,
            angles if rows is None else _spread(angles, rows, span),
        )

    def _span(self, used: int) -> int:
        """Slots to compute so that the first ``used`` are among them."""
        step = 8 * -(-self.slots // (8 * SHARE))
        return min(-(-used // step) * step, self.slots)

    def _read(self, places: np.ndarray, span: int) -> Groups:
        """Who reads which prompt; it changes only when rows come, go or move."""
        key = places[:, [0, 2, 3]]
        if self._groups is None or self._groups[1] != span or not np.array_equal(self._groups[0], key):
            groups = Groups.of(places[:, 0], places[:, 2], width=int(places[:, 3].max()), span=span)
            self._groups = key, span, groups
        return self._groups[2]


def matrix_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The product with a matrix, which is arranged for it now where torch would do that again at every call."""
    if weight.dtype != torch.bfloat16 or not _can_arrange():
        return partial(torch.nn.functional.linear, weight=weight, bias=bias)
    arranged = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, arranged, bias, "none", [], "")


def _side_by_side(weights: tuple[Tensor, ...]) -> Product:
    return matrix_product(*weights) if len(weights) == 1 else lambda x: project(x, weights)


@lru_cache
def _can_arrange() -> bool:
    """This build of torch, on this processor, multiplies bfloat16 matrices that were arranged beforehand."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _in_pairs(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Rows of queries, keys and values in one tensor [C, ...], those of queries and keys in pairs within each head."""
    qkv = parts[0] if len(parts) == 1 else torch.cat([part.detach() for part in parts])
    turned = sizes.query_width + sizes.kv_width
    heads = qkv[:turned].view(-1, sizes.head_size, *qkv.shape[1:])
    order = paired(torch.arange(sizes.head_size))
    return torch.cat([heads.index_select(1, order).flatten(0, 1), qkv[turned:]])


def _scaled(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) * len(weight) ** 0.5


def _spread(x: Tensor, slots: Tensor, span: int) -> Tensor:
    """Rows [R, ...] at their slots, zeros elsewhere [span, ...]."""
    return x.new_zeros(span, *x.shape[1:]).index_copy_(0, slots, x)


def attend(qkv: Tensor, turn: Turn, cache: LayerCache, sizes: Sizes) -> Tensor:
    """Attention of one new token per slot to its prompt and its own past, which then holds it too: [span, heads D].

    ``qkv`` [span, C] is overwritten. Slots without a row are written to as well: a row that starts there sees nothing
    of it.
    """
    span, kv_heads, d, groups = turn.span, sizes.kv_heads, sizes.head_size, turn.groups
    queries, width = sizes.heads // kv_heads, sizes.query_width
    own_keys, own_values, prompt_keys, prompt_values = cache.all()
    torch.view_as_complex(qkv[:, : width + sizes.kv_width].view(span, -1, d // 2, 2)).mul_(turn.angles)
    k, v = (qkv[:, start : start + sizes.kv_width].view(span, kv_heads, d) for start in (width, width + sizes.kv_width))
    if isinstance(turn.past, int):
        own_keys.select(2, turn.past)[:span].copy_(k)
        own_values.select(2, turn.past)[:span].copy_(v)
    else:
        slots, past = turn.past
        own_keys[slots, :, past], own_values[slots, :, past] = (x[slots].to(own_keys.dtype) for x in (k, v))
    q = qkv[:, :width].view(*groups.leading, kv_heads, queries, d)
    own = [_read(buffer[:span, :, : turn.seen], qkv.dtype) for buffer in (own_keys, own_values)]
    shared = [_read(buffer[: groups.prompts, :, : groups.width], qkv.dtype) for buffer in (prompt_keys, prompt_values)]
    to_prompt = groups.apart(torch.bmm(groups.together(q), shared[0].transpose(1, 2)), kv_heads, queries)
    to_own = torch.bmm(q.reshape(-1, queries, d), own[0].transpose(1, 2)).view(*q.shape[:-1], -1)
    scores = torch.cat([to_prompt, to_own], dim=-1)
    if turn.hidden is not None:
        scores.masked_fill_(turn.hidden, -torch.inf)
    p = torch.softmax(scores, dim=-1)
    from_prompt = groups.apart(torch.bmm(groups.together(p[..., : groups.width]), shared[1]), kv_heads, queries)
    from_own = torch.bmm(p[..., groups.width :].reshape(-1, queries, turn.seen), own[1])
    return from_own.view(q.shape).add_(from_prompt).view(span, -1)


def _read(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values of some slots [slots * kv_heads, positions, D] in the type of attention, in place if they are."""
    return buffer.flatten(0, 1).to(dtype)
