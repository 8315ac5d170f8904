"""Key-value cache of the rows that are running: buffers written in place, which shrink with the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class BufferLayer(DynamicLayer):
    """Keys and values of one attention layer in a buffer of fixed capacity, so that a new token copies nothing else."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new positions and return all of them, as views of the buffers."""
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            rows, heads, _, width = key_states.shape
            self._keys = key_states.new_empty(rows, heads, self.capacity, width)
            self._values = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
            self.is_initialized = True
        end = self.length + key_states.shape[2]
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self.length = end
        return self._view()

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Positions written so far."""
        return self.length

    def take(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        self._keys, self._values = self._keys[rows], self._values[rows]
        self._view()


class RowCache(Cache):
    """The cache of all layers for a batch of rows of equal length."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.buffers = [BufferLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.buffers))

    def take(self, rows: Tensor) -> None:
        """Keep these rows in every layer: expand a prompt to its group, or drop rows that finished."""
        for layer in self.buffers:
            layer.take(rows)


def left_pad(sequences: list[tuple[int, ...]], *, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids padded on the left to equal length, and the mask of real tokens: [P, S] each."""
    width = max(len(ids) for ids in sequences)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(sequences), width), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, width - len(sequence) :] = 1
    return ids.to(device), mask.to(device)
