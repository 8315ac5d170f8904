"""How do torch's own operations compute all layers of a decode step? Slot by slot, in few and large products.

What is computed are the first slots of the caches, those of rows that ended among them until the running rows are moved
together: everything is read and written where it lies, and products come in few different sizes, for each of which
torch would prepare code of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oncurve.trunk import torch_ops
from oncurve.trunk.caches import LayerCache
from oncurve.trunk.ops import Ops
from oncurve.trunk.torch_ops import Rotary
from oncurve.trunk.weights import LayerWeights, Sizes, Trunk, norm_heads, project

SHARE = 8
"""The slots that are computed come in at most so many different numbers."""


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

    @classmethod
    def of(cls, slots: Tensor, prompts: Tensor, *, width: int, span: int) -> Groups:
        """From the slot and the prompt's slot of each row [R]."""
        count = int(prompts.max()) + 1
        sizes = torch.bincount(prompts, minlength=count)
        order = torch.argsort(prompts, stable=True)
        first = torch.cumsum(sizes, 0) - sizes
        most = int(sizes.max())
        places = prompts[order] * most + torch.arange(len(order)) - first[prompts[order]]
        table, back = torch.zeros(count * most, dtype=torch.long), torch.zeros(span, dtype=torch.long)
        table[places], back[slots[order]] = slots[order], places
        is_plain = len(table) == span and bool((table == torch.arange(span)).all())
        return cls(None if is_plain else table, None if is_plain else back, count, width)

    def together(self, x: Tensor) -> Tensor:
        """[span, kv_heads, Q, A] as [P * kv_heads, G * Q, A]: the slots of a prompt side by side."""
        picked = x if self.table is None else x.index_select(0, self.table)
        return picked.unflatten(0, (self.prompts, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def apart(self, x: Tensor, like: Tensor) -> Tensor:
        """The way back: [P * kv_heads, G * Q, A] as [span, kv_heads, Q, A], the middle of which is that of ``like``."""
        kv_heads, queries = like.shape[1:3]
        spread = x.view(self.prompts, kv_heads, -1, queries, x.shape[-1]).transpose(1, 2).flatten(0, 1)
        return spread if self.back is None else spread.index_select(0, self.back)


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
    """Which positions of prompts and of own tokens a slot does not see [span, 1, 1, S + T]; None if it sees all."""
    cosine: Tensor
    """[span, heads + kv_heads, D / 2], with what scales the scores in those of queries; zero in slots without a row."""
    sine: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """The rows of what was computed for all slots."""
        return x if self.slots is None else x.index_select(0, self.slots)


class TorchLayers:
    """All layers for one token per row, in torch alone: the definition that the kernels must meet."""

    def __init__(
        self, trunk: Trunk, weights: Sequence[LayerWeights], ops: Ops, compute_type: torch.dtype, *, slots: int
    ) -> None:
        """For rows in up to ``slots`` slots; attention is torch's, norms and SwiGLU are those of ``ops``."""
        self.trunk, self.weights, self.ops, self.compute_type, self.slots = trunk, weights, ops, compute_type, slots
        self._groups: tuple[Tensor, Groups] | None = None

    def __call__(self, residual: Tensor, rotary: Rotary, places: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        """One more token per row: residual [R, H] to the normed output of the last layer [R, H] in the wide type."""
        turn = self._turn(rotary, places)
        added, sizes = None, self.trunk.sizes
        residual = residual if turn.slots is None else _spread(residual, turn.slots, turn.span)
        for layer, matrices, cache in zip(self.trunk.layers, self.weights, caches, strict=True):
            residual, x = self._add_norm(residual, added, layer.first_norm, self.compute_type)
            qkv = project(x, matrices.qkv, matrices.qkv_bias)
            if layer.head_norms is not None:
                norm_heads(qkv, layer.head_norms, sizes)
            mixed = attend(qkv, turn, cache, sizes)
            residual, x = self._add_norm(residual, mixed @ matrices.output.T, layer.second_norm, self.compute_type)
            added = self.ops.swiglu(project(x, matrices.gate_up)) @ matrices.down.T
        return turn.gather(self._add_norm(residual, added, self.trunk.body.norm.weight, self.trunk.wide)[1])

    def _add_norm(
        self, residual: Tensor, added: Tensor | None, weight: Tensor, out_type: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return self.ops.add_norm(residual, added, weight, self.trunk.sizes.epsilon, out_type)[:2]

    def _turn(self, rotary: Rotary, places: Tensor) -> Turn:
        """What this step reads and writes; see ``Decoder.step`` for ``places``."""
        slots, past, lengths = places[:, 0], places[:, 1], places[:, 3]
        span = self._span(int(slots.max()) + 1)
        is_plain = span == len(slots) and bool((slots == torch.arange(span)).all())
        groups = self._read(places, span)
        seen = int(past.max()) + 1
        is_even, is_full = bool((past == seen - 1).all()), bool((lengths == groups.width).all())
        hidden = None
        if not (is_even and is_full):
            hidden = torch.zeros(span, groups.width + seen, dtype=torch.bool)
            hidden[slots, : groups.width] = torch.arange(groups.width) >= lengths[:, None]
            hidden[slots, groups.width :] = torch.arange(seen) > past[:, None]
            hidden = hidden[:, None, None]
        heads = self.trunk.sizes.heads + self.trunk.sizes.kv_heads
        angles = [part * self._scale() for part in rotary.by_head(heads)]
        rows, (cosine, sine) = (None, angles) if is_plain else (slots, [_spread(part, slots, span) for part in angles])
        return Turn(span, rows, seen - 1 if is_even else (slots, past), seen, groups, hidden, cosine, sine)

    def _scale(self) -> Tensor:
        """What scales queries and keys [heads + kv_heads, 1]."""
        sizes = self.trunk.sizes
        scale = torch.ones(sizes.heads + sizes.kv_heads, 1, dtype=self.trunk.wide)
        scale[: sizes.heads] = sizes.head_size**-0.5
        return scale

    def _span(self, used: int) -> int:
        """Slots to compute so that the first ``used`` are among them."""
        step = 8 * -(-self.slots // (8 * SHARE))
        return min(-(-used // step) * step, self.slots)

    def _read(self, places: Tensor, span: int) -> Groups:
        """Who reads which prompt; it changes only when rows come, go or move."""
        key = torch.cat([places[:, [0, 2, 3]].flatten(), torch.tensor([span])])
        if self._groups is None or not torch.equal(self._groups[0], key):
            self._groups = key, Groups.of(places[:, 0], places[:, 2], width=int(places[:, 3].max()), span=span)
        return self._groups[1]


def _spread(x: Tensor, slots: Tensor, span: int) -> Tensor:
    """Rows [R, ...] at their slots, zeros elsewhere [span, ...]."""
    return x.new_zeros(span, *x.shape[1:]).index_copy_(0, slots, x)


def attend(qkv: Tensor, turn: Turn, cache: LayerCache, sizes: Sizes) -> Tensor:
    """Attention of one new token per slot to its prompt and its own past, which then holds it too: [span, heads D].

    Slots without a row are written to as well: a row that starts there sees nothing of it.
    """
    span, d, groups = turn.span, sizes.head_size, turn.groups
    own_keys, own_values, prompt_keys, prompt_values = cache.all()
    wide = qkv.to(turn.cosine.dtype)
    turned = torch_ops.turn(wide[:, : sizes.query_width + sizes.kv_width].view(span, -1, d), turn.cosine, turn.sine)
    k, v = turned[:, sizes.heads :], wide[:, -sizes.kv_width :].view(span, -1, d)
    if isinstance(turn.past, int):
        own_keys[:span, :, turn.past], own_values[:span, :, turn.past] = k, v
    else:
        slots, past = turn.past
        own_keys[slots, :, past], own_values[slots, :, past] = (x[slots].to(own_keys.dtype) for x in (k, v))
    q = turned[:, : sizes.heads].reshape(span, sizes.kv_heads, -1, d)
    own = [_read(buffer[:span, :, : turn.seen], wide.dtype) for buffer in (own_keys, own_values)]
    shared = [_read(buffer[: groups.prompts, :, : groups.width], wide.dtype) for buffer in (prompt_keys, prompt_values)]
    to_prompt = groups.apart(torch.bmm(groups.together(q), shared[0].transpose(1, 2)), q)
    to_own = torch.bmm(q.flatten(0, 1), own[0].transpose(1, 2)).view(*q.shape[:3], -1)
    scores = torch.cat([to_prompt, to_own], dim=-1)
    if turn.hidden is not None:
        scores.masked_fill_(turn.hidden, -torch.inf)
    p = torch.softmax(scores, dim=-1)
    from_prompt = groups.apart(torch.bmm(groups.together(p[..., : groups.width]), shared[1]), q)
    mixed = torch.baddbmm(from_prompt.flatten(0, 1), p[..., groups.width :].flatten(0, 1), own[1])
    return mixed.view(span, -1).to(qkv.dtype)


def _read(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values of some slots [slots * kv_heads, positions, D] in the type of attention, in place if they are."""
    return buffer.flatten(0, 1).to(dtype)
