"""The rows of a batch while they are sampled: what each has read and written, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oncurve.core.records import FinishReason
from oncurve.core.requests import Request
from oncurve.core.sampler import Sampled

SLOT, PAST, PROMPT_SLOT, PROMPT_TOKENS = range(4)
"""Columns of ``Rows.places``."""
COMPACT_BELOW = 0.75
"""Rows are moved together when those that run fill no more than this share of the rows that are computed."""


@dataclass(frozen=True)
class BufferSizes:
    """Sizes of a batch's buffers."""

    rows: int
    """Completions, each in a slot of its own."""
    prompts: int
    prompt_tokens: int
    """Tokens of the longest prompt."""
    completion_tokens: int
    """Tokens of the longest completion, with its earlier turns."""


class Rows:
    """The rows of a batch, by numbers that stay theirs until they leave, wherever their slots lie.

    Every method takes and gives arrays of such numbers. A number is used again; a row's ``serial`` never is.
    """

    def __init__(self, sizes: BufferSizes) -> None:
        count = sizes.rows
        self.running = np.zeros(0, dtype=np.int64)
        """Rows that run, in the order of the batch."""
        self.places = np.zeros((count, 4), dtype=np.int64)
        """Arguments of ``LayerDecoder.step`` for each: slot, decoded tokens, prompt's slot, prompt's tokens."""
        self.tokens = np.zeros((count, sizes.completion_tokens), dtype=np.int64)
        self.logprobs = np.zeros((count, sizes.completion_tokens), dtype=np.float32)
        self.lengths, self.begins, self.limits = np.zeros((3, count), dtype=np.int64)
        """Tokens behind the prompt; those of them from earlier turns; tokens that may be written behind these."""
        self.keys = np.zeros(count, dtype=np.uint64)
        self.serials = np.full(count, -1, dtype=np.int64)
        """Tells a row from those that had its number before; -1 where there is none."""
        self.owners: dict[int, tuple[Request, int]] = {}
        """The request of each, and its place there."""
        self._next_serial = 0
        self._unused = list(range(count - 1, -1, -1))
        self._free = list(range(count - 1, -1, -1))
        """Slots without a row."""

    @property
    def num_free(self) -> int:
        """Slots without a row."""
        return len(self._free)

    def enter(self, request: Request, first: int, count: int, *, prompt_slot: int) -> np.ndarray:
        """Rows for completions of a request from the place ``first`` on; ``start`` gives them slots."""
        rows = np.array([self._unused.pop() for _ in range(count)], dtype=np.int64)
        own = request.own
        self.keys[rows] = request.keys[first : first + count]
        self.limits[rows] = request.params.max_completion_tokens
        self.begins[rows] = self.lengths[rows] = len(own)
        self.tokens[rows, : len(own)] = own
        past = [request.rows[place].num_tokens for place in range(first, first + count)] if own else 0
        self.places[rows] = (-1, 0, prompt_slot, len(request.prompt.token_ids))
        self.places[rows, PAST] = past
        self.serials[rows] = np.arange(self._next_serial, self._next_serial + count)
        self._next_serial += count
        for place, row in enumerate(rows.tolist(), first):
            self.owners[row] = request, place
        return rows

    def start(self, rows: np.ndarray) -> None:
        """Let rows run, each in a free slot."""
        self.places[rows, SLOT] = [self._free.pop() for _ in rows]
        self.running = np.concatenate([self.running, rows])

    def are_there(self, rows: np.ndarray, serials: np.ndarray) -> np.ndarray:
        """Which of these rows have not left since they had these serials."""
        return self.serials[rows] == serials

    def record(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Write down the next token of some rows; how many tokens each has written by now."""
        at = self.lengths[rows]
        self.tokens[rows, at], self.logprobs[rows, at] = tokens, logprobs
        self.lengths[rows] = at + 1
        return at + 1 - self.begins[rows]

    def recent(self, row: int, tokens: int) -> list[int]:
        """The last tokens that a row has written, at most so many."""
        length = int(self.lengths[row])
        return self.tokens[row, max(int(self.begins[row]), length - tokens) : length].tolist()

    def leave(self, row: int) -> tuple[Request, int]:
        """Free the number and the slot of a row; whose it was. ``drop_left`` takes it out of those that run."""
        if (slot := int(self.places[row, SLOT])) >= 0:
            self._free.append(slot)
        self._unused.append(row)
        self.serials[row] = -1
        return self.owners.pop(row)

    def drop_left(self) -> None:
        """Let only those run that have not left."""
        self.running = self.running[self.serials[self.running] >= 0]

    def result(self, row: int, reason: FinishReason) -> Sampled:
        """The tokens of a row, and why it ended."""
        written = slice(self.begins[row], self.lengths[row])
        return self.tokens[row, written].tolist(), self.logprobs[row, written].tolist(), reason

    @property
    def are_sparse(self) -> bool:
        """The running rows should lie closer together."""
        running = self.running
        return bool(len(running)) and len(running) <= COMPACT_BELOW * (self.places[running, SLOT].max() + 1)

    def compact(self) -> tuple[np.ndarray, np.ndarray]:
        """Let the running rows fill the first slots: which slots' rows must move, and to where."""
        slots, count = self.places[self.running, SLOT], len(self.running)
        is_beyond = slots >= count
        moved, to = slots[is_beyond], np.setdiff1d(np.arange(count), slots)
        slots[is_beyond] = to
        self.places[self.running, SLOT] = slots
        self.running = self.running[np.argsort(slots)]
        self._free = list(range(len(self.places) - 1, count - 1, -1))
        return moved, to
