"""Where do the keys and values of rows lie while they are sampled?

Those of prompts and of completions lie in separate buffers. A prompt is computed once and read by its group; a
completion has a slot of its own, whose buffer grows with the longest running row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK = 32
"""Buffers hold a multiple of so many positions: kernels read whole blocks."""


@dataclass
class LayerCache:
    """Keys and values of one layer, arranged as the operations want them."""

    own_keys: Tensor
    own_values: Tensor
    prompt_keys: Tensor
    prompt_values: Tensor

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order in which attention takes them."""
        return self.own_keys, self.own_values, self.prompt_keys, self.prompt_values

    def grow(self, positions: int) -> None:
        """Make room for so many positions (whole blocks) of each completion."""
        self.own_keys = _longer(self.own_keys, positions)
        self.own_values = _longer(self.own_values, positions)

    def move(self, slots: Tensor, positions: int) -> None:
        """Let the first positions of the completions in these slots lie in slots 0, 1, ... in this order."""
        for buffer in (self.own_keys, self.own_values):
            held = buffer[:, :, :positions]
            held[: len(slots)] = held.index_select(0, slots)


def _longer(buffer: Tensor, positions: int) -> Tensor:
    slots, heads, before, width = buffer.shape
    longer = buffer.new_zeros(slots, heads, positions, width)
    longer[:, :, :before] = buffer
    return longer


def whole_blocks(positions: int) -> int:
    """Positions, rounded up to whole blocks."""
    return -(-positions // BLOCK) * BLOCK
