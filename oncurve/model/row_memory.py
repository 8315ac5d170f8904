"""Keys and values of rows that wait for an answer, outside the batch.

A row that returns goes on from its own. Where they had to make room, its tokens are decoded again one by one, by the
same sums: with compiled kernels what a row gives does not depend on the rows beside it, so both ways give equal bits.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor

from oncurve.core.requests import PromptState, RowState
from oncurve.model.decoding import LayerDecoder

MAX_CACHED_BYTES = 2**30
"""Upper limit for all waiting rows and their prompts together."""


class RowMemory:
    """Rows that are kept; those that left first make room."""

    def __init__(self, limit_bytes: int = MAX_CACHED_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._rows: WeakKeyDictionary[RowState, None] = WeakKeyDictionary()
        """In the order in which they left."""
        self._at_most = 0
        """Bytes, with what ended since they were counted."""

    def keep(self, row: RowState, copies: list[Tensor], num_tokens: int) -> None:
        """Remember what a row has computed."""
        row.copies, row.num_tokens = copies, num_tokens
        row.num_bytes = sum(part.nbytes for part in copies)
        self._rows.pop(row, None)
        self._rows[row] = None
        self._at_most += row.num_bytes + (row.prompt.num_bytes if row.prompt is not None else 0)
        if self._at_most > self.limit_bytes:
            self._make_room()

    def _make_room(self) -> None:
        while self._rows and self._num_bytes() > self.limit_bytes:
            oldest = next(iter(self._rows))
            oldest.make_room()
            del self._rows[oldest]
        self._at_most = self._num_bytes()

    def _num_bytes(self) -> int:
        prompts = {row.prompt for row in self._rows if row.prompt is not None}
        return sum(row.num_bytes for row in self._rows) + sum(prompt.num_bytes for prompt in prompts)


class LayerKeeper:
    """Takes keys and values of rows out of a decoder into a memory, and puts them back."""

    def __init__(self, decoder: LayerDecoder, memory: RowMemory) -> None:
        self.decoder, self.memory = decoder, memory

    def keep(self, row: RowState, prompt: PromptState, addresses: tuple[int, int, int]) -> None:
        """See ``RowKeeper``."""
        slot, past, prompt_slot = addresses
        if not self.decoder.takes_prompt(prompt.copies):
            prompt.copies = self.decoder.prompt(prompt_slot)
        self.memory.keep(row, self.decoder.row(slot, past), past)

    def put_row(self, slot: int, row: RowState) -> bool:
        """See ``RowKeeper``."""
        if row.copies:
            self.decoder.put_row(slot, row.copies)
        return bool(row.copies)

    def put_prompt(self, slot: int, prompt: PromptState) -> bool:
        """See ``RowKeeper``."""
        return self.decoder.put_prompt(slot, prompt.copies)
