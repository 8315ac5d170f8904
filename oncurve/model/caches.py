"""Key-value caches of the rows that are being sampled.

Those of prompts and of completions lie in separate buffers. A prompt is computed once and read by its group; a
completion has a slot of its own, whose buffer grows with the longest running row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LayerCache:
    """Keys and values of one layer, arranged as the operations want them."""

    own: Tensor
    """Keys and values of completions [2, slots, kv_heads, positions, D]."""
    prompt_keys: Tensor
    prompt_values: Tensor

    def __post_init__(self) -> None:
        self.own_keys, self.own_values = self.own.unbind()

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order in which kernels take them."""
        return self.own_keys, self.own_values, self.prompt_keys, self.prompt_values

    @property
    def positions(self) -> int:
        """Number of positions that a completion has room for."""
        return self.own.shape[3]

    def grow(self, positions: int) -> None:
        """Make room for so many positions (whole blocks) of each completion."""
        longer = self.own.new_zeros(*self.own.shape[:3], positions, self.own.shape[4])
        longer[:, :, :, : self.positions] = self.own
        self.own = longer
        self.own_keys, self.own_values = longer.unbind()

    def move(self, slots: Tensor, to: Tensor, positions: int) -> None:
        """Let the first positions of the completions in these slots lie in other slots."""
        cached = self.own[:, :, :, :positions]
        cached[:, to] = cached[:, slots]

    def row(self, slot: int, positions: int) -> Tensor:
        """A copy of the first positions (whole blocks) of a completion."""
        return self.own[:, slot, :, :positions].clone()

    def put_row(self, slot: int, copy: Tensor) -> None:
        """Put a copy into a slot."""
        self.own[:, slot, :, : copy.shape[2]] = copy

    def prompt(self, slot: int) -> tuple[Tensor, Tensor]:
        """A copy of a prompt."""
        return self.prompt_keys[slot].clone(), self.prompt_values[slot].clone()

    def put_prompt(self, slot: int, copy: tuple[Tensor, Tensor]) -> None:
        """Put a copy into a prompt's slot, of a cache with as many positions."""
        self.prompt_keys[slot], self.prompt_values[slot] = copy
