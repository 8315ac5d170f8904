"""Keys and values of rows that wait for an answer, outside the batch.

A row that returns goes on from its own. Where they had to make room, its tokens are decoded again one by one, by the
same sums: with compiled kernels what a row gives does not depend on the rows beside it, so both ways give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor

KEPT_BYTES = 2**30
"""Upper limit for all waiting rows and their prompts together."""


@dataclass(eq=False)
class KeptPrompt:
    """A prompt, shared by the rows of its group."""

    token_ids: tuple[int, ...]
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Its keys and values layer by layer, as the batch that read it had them; none before a row has left."""
    num_rows: int = 0
    """Rows that are not over."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.held)


@dataclass(eq=False)
class KeptRow:
    """A row from turn to turn."""

    prompt: KeptPrompt | None = None
    """The prompt before its first turn."""
    num_tokens: int = 0
    """Tokens behind the prompt that were decoded when it left."""
    held: list[Tensor] = field(default_factory=list)
    """Their keys and values layer by layer; none where they had to make room."""
    num_bytes: int = 0

    def begin(self, prompt: KeptPrompt) -> None:
        """Belong to a prompt."""
        if self.prompt is None:
            self.prompt = prompt
            prompt.num_rows += 1

    def make_room(self) -> None:
        """Give the keys and values up; they can be made again."""
        self.held, self.num_bytes = [], 0

    def end(self) -> None:
        """The row is over; the last one of a prompt gives that up as well."""
        self.make_room()
        if self.prompt is not None:
            self.prompt.num_rows -= 1
            if not self.prompt.num_rows:
                self.prompt.held = []
            self.prompt = None


class RowMemory:
    """Rows that are kept; those that left first make room."""

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._rows: WeakKeyDictionary[KeptRow, None] = WeakKeyDictionary()
        """In the order in which they left."""
        self._at_most = 0
        """Bytes, with what ended since they were counted."""

    def keep(self, row: KeptRow, held: list[Tensor], num_tokens: int) -> None:
        """Remember what a row has computed."""
        row.held, row.num_tokens = held, num_tokens
        row.num_bytes = sum(part.nbytes for part in held)
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
