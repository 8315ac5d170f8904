"""Key-value caches of the rows that are being sampled.

Those of prompts and of completions lie in separate buffers. A prompt is computed once and read by its group; a
completion has a slot of its own, whose buffer grows with the longest running row. Few rows behind short prompts may be
joined with a copy of theirs: then each row lies in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """Keys and values of one layer, arranged as the operations want them."""

    own: Tensor
    """Keys and values of completions [2, slots, kv_heads, positions, D]."""
    prompt_keys: Tensor
    prompt_values: Tensor
    front: int = field(default=0, init=False)
    """Positions before the own tokens: room for a copy of the prompt, once rows are joined with theirs."""

    def __post_init__(self) -> None:
        self.own_keys, self.own_values = self.own.unbind()

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order in which kernels take them."""
        return self.own_keys, self.own_values, self.prompt_keys, self.prompt_values

    @property
    def positions(self) -> int:
        """Those that a completion has room for."""
        return self.own.shape[3]

    def grow(self, positions: int) -> None:
        """Make room for so many positions (whole blocks) of each completion."""
        longer = self.own.new_zeros(*self.own.shape[:3], positions, self.own.shape[4])
        longer[:, :, :, : self.positions] = self.own
        self.own = longer
        self.own_keys, self.own_values = longer.unbind()

    def move(self, slots: Tensor, to: Tensor, positions: int) -> None:
        """Let the first positions of the completions in these slots lie in other slots."""
        held = self.own[:, :, :, :positions]
        held[:, to] = held[:, slots]

    def row(self, slot: int, positions: int) -> Tensor:
        """A copy of the first positions (whole blocks) of a completion."""
        return self.own[:, slot, :, :positions].clone()

    def put_row(self, slot: int, held: Tensor) -> None:
        """Put a copy into a slot."""
        self.own[:, slot, :, : held.shape[2]] = held

    def prompt(self, slot: int) -> tuple[Tensor, Tensor]:
        """A copy of a prompt."""
        return self.prompt_keys[slot].clone(), self.prompt_values[slot].clone()

    def put_prompt(self, slot: int, held: tuple[Tensor, Tensor]) -> None:
        """Put a copy into a prompt's slot, of a cache with as many positions."""
        self.prompt_keys[slot], self.prompt_values[slot] = held

    def holds(self, rows: int, positions: int) -> bool:
        """Whether the buffer of completions has the numbers of so many rows of so many positions."""
        return rows * positions <= self.own.shape[1] * self.positions

    def join(self, slots: Tensor, prompts: Tensor, *, room: int, front: int, tokens: int, positions: int) -> None:
        """Arrange the buffer of completions anew, for the rows in these slots alone, each behind a copy of its prompt.

        They lie in slots 0, 1, ... of ``room``, each of ``front`` positions of its prompt's slot and ``positions`` of
        its own, of which ``tokens`` are kept. Prompts' buffers are given back.
        """
        (_, _, kv_heads, _, d), count = self.own.shape, len(slots)
        kept, shape = self.own[:, slots, :, :tokens], torch.Size((2, room, kv_heads, front + positions, d))
        self.own = self.own.view(-1)[: shape.numel()].view(shape)
        self.own_keys, self.own_values = self.own.unbind()
        for to, prompt in zip((self.own_keys, self.own_values), (self.prompt_keys, self.prompt_values), strict=True):
            to[:count, :, :front] = prompt[prompts, :, :front]
        self.own[:, :count, :, front : front + tokens] = kept
        self.prompt_keys = self.prompt_values = self.prompt_keys.new_empty(0, *self.prompt_keys.shape[1:])
        self.front = front
