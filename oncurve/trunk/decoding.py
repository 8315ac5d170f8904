"""How is the next token of many rows computed, when rows of one group share the keys and values of their prompt?

The keys and values of prompts and of completions lie in separate buffers. A prompt is computed once and read by its
group; a completion has a slot of its own, whose buffer grows with the longest running row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oncurve.trunk.layout import Block, prompt_layout
from oncurve.trunk.native_ops import NativeOps
from oncurve.trunk.ops import operations
from oncurve.trunk.training import Angles, Pass
from oncurve.trunk.weights import Trunk, norm_heads, project

GROWTH = 64
"""Positions by which the buffers of completions grow at least; they double as long as that is more."""
PREFILL_TOKENS = 4096
"""Prompt tokens computed at one time."""


@dataclass
class LayerCache:
    """Keys [slots, kv_heads, D, positions] and values [slots, kv_heads, positions, D] of one layer."""

    own_keys: Tensor
    own_values: Tensor
    prompt_keys: Tensor
    prompt_values: Tensor

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order in which attention takes them."""
        return self.own_keys, self.own_values, self.prompt_keys, self.prompt_values


class Decoder:
    """Computes next-token logits from the current weights of a trunk, in a compute type."""

    def __init__(
        self,
        trunk: Trunk,
        head: Tensor,
        compute_type: torch.dtype,
        *,
        slots: int,
        prompt_slots: int,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None:
        """Room for ``slots`` rows of up to ``completion_tokens`` behind ``prompt_slots`` prompts."""
        self.trunk, self.head, self.compute_type = trunk, head, compute_type
        self.ops, self.wide_ops = operations(compute_type), operations(trunk.wide)
        self.weights = trunk.weights(compute_type)
        self.completion_tokens = completion_tokens
        self.angles = Angles(*trunk.rotary(torch.arange(prompt_tokens + completion_tokens)))
        self.capacity = min(GROWTH, completion_tokens)
        own = (slots, trunk.sizes.kv_heads)
        before = (prompt_slots, trunk.sizes.kv_heads)
        size = trunk.sizes.head_size
        self.caches = [
            LayerCache(
                torch.zeros(*own, size, self.capacity, dtype=compute_type),
                torch.zeros(*own, self.capacity, size, dtype=compute_type),
                torch.zeros(*before, size, prompt_tokens, dtype=compute_type),
                torch.zeros(*before, prompt_tokens, size, dtype=compute_type),
            )
            for _ in trunk.layers
        ]

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Compute prompts into prompt slots; the logits of the first completion token of each [P, V]."""
        logits = []
        start = 0
        while start < len(prompts):
            end, tokens = start + 1, len(prompts[start])
            while end < len(prompts) and tokens + len(prompts[end]) <= PREFILL_TOKENS:
                tokens += len(prompts[end])
                end += 1
            logits.append(self._prefill(prompts[start:end], slots[start:end]))
            start = end
        return torch.cat(logits)

    def _prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        layout = prompt_layout(prompts, torch.device("cpu"))
        slot_at = dict(zip([0, *(layout.predicts[:-1] + 1).tolist()], slots, strict=True))
        angles = Angles(*(part.index_select(0, layout.positions[0]) for part in (self.angles.cosine, self.angles.sine)))
        pass_ = Pass(layout, angles, self.trunk.sizes, self.ops, self.compute_type)
        residual, added = self.trunk.body.embed_tokens(layout.ids)[0].to(self.trunk.wide), None
        for layer, matrices, cache in zip(self.trunk.layers, self.weights, self.caches, strict=True):

            def store(block: Block, k: Tensor, v: Tensor, cache: LayerCache = cache) -> None:
                places = torch.tensor([slot_at[start] for start in block.spans[:, 0].tolist()])
                cache.prompt_keys[places, :, :, : block.own] = k.transpose(2, 3).to(self.compute_type)
                cache.prompt_values[places, :, : block.own] = v.to(self.compute_type)

            state = pass_.forward(layer, matrices, residual, added, store)
            residual, added = state.second, pass_.feed_forward(state, layer, matrices)
        return self._logits(residual.index_select(0, layout.predicts), added.index_select(0, layout.predicts))

    def step(self, tokens: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        """Logits [R, V] after one more token per row [R] at its position in the row [R].

        ``places`` holds for each row its slot, its tokens so far, its prompt's slot and the prompt's tokens [R, 4].
        """
        self._grow(int(places[:, 1].max()) + 1)
        sizes, ops = self.trunk.sizes, self.ops
        angles = Angles(self.angles.cosine.index_select(0, positions), self.angles.sine.index_select(0, positions))
        residual, added = self.trunk.body.embed_tokens(tokens).to(self.trunk.wide), None
        for layer, matrices, cache in zip(self.trunk.layers, self.weights, self.caches, strict=True):
            residual, x = self._add_norm(residual, added, layer.first_norm)
            qkv = project(x, matrices.qkv, matrices.qkv_bias)
            if layer.head_norms is not None:
                norm_heads(qkv, layer.head_norms, sizes)
            mixed = ops.attend(qkv, angles, places, cache.all(), sizes)
            residual, x = self._add_norm(residual, mixed @ matrices.output.T, layer.second_norm)
            added = ops.swiglu(project(x, matrices.gate_up)) @ matrices.down.T
        return self._logits(residual, added)

    def _add_norm(self, residual: Tensor, added: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The residual with what is added to it, in place where a kernel does it, and its norm."""
        if isinstance(self.ops, NativeOps):
            out = torch.empty(residual.shape, dtype=self.compute_type)
            self.ops.add_norm_into(residual, added, residual, weight, self.trunk.sizes.epsilon, out, None)
            return residual, out
        total, out, _ = self.ops.add_norm(residual, added, weight, self.trunk.sizes.epsilon, self.compute_type)
        return total, out

    def _logits(self, residual: Tensor, added: Tensor) -> Tensor:
        """In the wide type, as in training."""
        weight, epsilon = self.trunk.body.norm.weight, self.trunk.sizes.epsilon
        _, hidden, _ = self.ops.add_norm(residual, added, weight, epsilon, self.trunk.wide)
        return hidden @ self.head.T

    def _grow(self, needed: int) -> None:
        """Make the buffers of completions hold at least so many positions."""
        if needed <= self.capacity:
            return
        capacity = min(max(needed, self.capacity + GROWTH, 2 * self.capacity), self.completion_tokens)
        for cache in self.caches:
            keys, values = cache.own_keys, cache.own_values
            cache.own_keys = keys.new_zeros(*keys.shape[:3], capacity)
            cache.own_keys[..., : self.capacity] = keys
            cache.own_values = values.new_zeros(*values.shape[:2], capacity, values.shape[3])
            cache.own_values[:, :, : self.capacity] = values
        self.capacity = capacity

    def move(self, slots: Tensor) -> None:
        """Let the rows in these slots lie in slots 0, 1, ... in this order, so that attention without a kernel can read
        them in place."""
        for cache in self.caches:
            for buffer in (cache.own_keys, cache.own_values):
                buffer[: len(slots)] = buffer.index_select(0, slots)
