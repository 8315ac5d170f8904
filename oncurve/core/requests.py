"""Requests for completions, and the rows in which they are sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from oncurve.core.records import FinishReason, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

Sampled = tuple[list[int], list[float], FinishReason]
"""Tokens of a completion, their log-probabilities, and why it ended."""
SLOT, PAST, PROMPT_SLOT, PROMPT_TOKENS = range(4)
"""Columns of ``Rows.addresses``."""
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


@dataclass(eq=False)
class PromptState:
    """A prompt, shared by the rows of its group."""

    token_ids: tuple[int, ...]
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Its keys and values layer by layer, as the batch that read it had them; none before a row has left."""
    num_rows: int = 0
    """Rows that are not over."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.copies)


@dataclass(eq=False)
class RowState:
    """A row from turn to turn."""

    prompt: PromptState | None = None
    """The prompt before its first turn."""
    num_tokens: int = 0
    """Tokens behind the prompt that were decoded when it left."""
    copies: list[Tensor] = field(default_factory=list)
    """Their keys and values layer by layer; none where they had to make room."""
    num_bytes: int = 0

    def begin(self, prompt: PromptState) -> None:
        """Belong to a prompt."""
        if self.prompt is None:
            self.prompt = prompt
            prompt.num_rows += 1

    def make_room(self) -> None:
        """Give the keys and values up; they can be made again."""
        self.copies, self.num_bytes = [], 0

    def end(self) -> None:
        """The row is over; the last one of a prompt gives that up as well."""
        self.make_room()
        if self.prompt is not None:
            self.prompt.num_rows -= 1
            if not self.prompt.num_rows:
                self.prompt.copies = []
            self.prompt = None


@dataclass(eq=False)
class Request:
    """Completions that one caller waits for."""

    token_ids: tuple[int, ...]
    keys: np.ndarray
    """The random stream of each completion."""
    params: SamplingParams
    end_ids: tuple[int, ...]
    on_done: Callable[[list[Sampled]], object] | None = None
    """Called with all completions when the last of them has ended."""
    on_row: Callable[[int, Sampled], object] | None = None
    """Called once for each completion when it has ended, with its index among ``keys``."""
    on_tokens: Callable[[list[int]], object] | None = None
    """Called after each token with what the only completion of the request has so far."""
    rows: tuple[RowState, ...] = ()
    """Cache that each completion goes on from, and keeps for its next turn; empty for completions of one turn."""
    keeps: bool = False
    """Its rows go on later also where the limit on tokens ended them."""
    started: int = 0
    """Completions that run or have ended."""
    sampled: dict[int, Sampled] = field(default_factory=dict)
    """Completions that have ended, by their indices."""
    versions: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    """Which weights sampled each completion, from which of its tokens on, where weights may change meanwhile."""
    read_under: str = ""
    """Label of the weights that read the prompt."""
    prompt: PromptState = field(init=False)
    _reported: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        known = self.rows[0].prompt if self.rows else None
        self.prompt = known or PromptState(self.token_ids)
        for row in self.rows:
            row.begin(self.prompt)

    @property
    def count(self) -> int:
        """Number of completions."""
        return len(self.keys)

    @property
    def own(self) -> tuple[int, ...]:
        """Tokens of earlier turns and the answers to them."""
        return self.token_ids[len(self.prompt.token_ids) :]

    @property
    def positions(self) -> int:
        """Positions behind the prompt that a completion may fill."""
        return len(self.own) + self.params.max_completion_tokens

    def read_again(self) -> None:
        """Take all tokens for the prompt: rows do not go on from what earlier turns left."""
        for row in self.rows:
            row.end()
        self.rows, self.prompt = (), PromptState(self.token_ids)

    def again(self) -> Request:
        """Forget what was sampled: the same streams give it once more."""
        self.sampled.clear()
        self.started = 0
        return self

    def give(self, index: int, sampled: Sampled) -> bool:
        """Put a completion at its index; True if it was the last one."""
        self.sampled[index] = sampled
        if self.on_row is not None and index not in self._reported:
            self._reported.add(index)
            self.on_row(index, sampled)
        if len(self.sampled) < self.count:
            return False
        if self.on_done is not None:
            self.on_done([self.sampled[index] for index in range(self.count)])
        return True


class Rows:
    """The rows of a batch, by numbers that stay theirs until they leave, wherever their slots lie.

    Every method takes and gives arrays of such numbers. A number is used again; a row's ``serial`` never is.
    """

    def __init__(self, sizes: BufferSizes) -> None:
        count = sizes.rows
        self.running = np.zeros(0, dtype=np.int64)
        """Rows that run, in the order of the batch."""
        self.addresses = np.zeros((count, 4), dtype=np.int64)
        """``addresses`` of ``Decoder.hidden``: slot, decoded tokens, slot of the prompt, tokens of the prompt."""
        self.tokens = np.zeros((count, sizes.completion_tokens), dtype=np.int64)
        self.logprobs = np.zeros((count, sizes.completion_tokens), dtype=np.float32)
        self.lengths, self.begins, self.limits = np.zeros((3, count), dtype=np.int64)
        """Tokens behind the prompt; those of them from earlier turns; tokens that may be written behind these."""
        self.keys = np.zeros(count, dtype=np.uint64)
        self.serials = np.full(count, -1, dtype=np.int64)
        """Tells a row from those that had its number before; -1 where there is none."""
        self.owners: dict[int, tuple[Request, int]] = {}
        """The request of each, and its index there."""
        self._next_serial = 0
        self._unused = list(range(count - 1, -1, -1))
        self._free = list(range(count - 1, -1, -1))
        """Slots without a row."""

    @property
    def num_free(self) -> int:
        """Slots without a row."""
        return len(self._free)

    def enter(self, request: Request, first: int, count: int, *, prompt_slot: int) -> np.ndarray:
        """Rows for completions of a request from the index ``first`` on; ``start`` gives them slots."""
        rows = np.array([self._unused.pop() for _ in range(count)], dtype=np.int64)
        own = request.own
        self.keys[rows] = request.keys[first : first + count]
        self.limits[rows] = request.params.max_completion_tokens
        self.begins[rows] = self.lengths[rows] = len(own)
        self.tokens[rows, : len(own)] = own
        past = [request.rows[index].num_tokens for index in range(first, first + count)] if own else 0
        self.addresses[rows] = (-1, 0, prompt_slot, len(request.prompt.token_ids))
        self.addresses[rows, PAST] = past
        self.serials[rows] = np.arange(self._next_serial, self._next_serial + count)
        self._next_serial += count
        for index, row in enumerate(rows.tolist(), first):
            self.owners[row] = request, index
        return rows

    def start(self, rows: np.ndarray) -> None:
        """Let rows run, each in a free slot."""
        self.addresses[rows, SLOT] = [self._free.pop() for _ in rows]
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
        if (slot := int(self.addresses[row, SLOT])) >= 0:
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
        return bool(len(running)) and len(running) <= COMPACT_BELOW * (self.addresses[running, SLOT].max() + 1)

    def compact(self) -> tuple[np.ndarray, np.ndarray]:
        """Let the running rows fill the first slots: which slots' rows must move, and to where."""
        slots, count = self.addresses[self.running, SLOT], len(self.running)
        is_beyond = slots >= count
        moved, to = slots[is_beyond], np.setdiff1d(np.arange(count), slots)
        slots[is_beyond] = to
        self.addresses[self.running, SLOT] = slots
        self.running = self.running[np.argsort(slots)]
        self._free = list(range(len(self.addresses) - 1, count - 1, -1))
        return moved, to
