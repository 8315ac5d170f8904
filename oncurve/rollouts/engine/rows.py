"""State of each completion while a batch is sampled, and admission of the next ones.

Rows wait in order. A row starts when a slot is free, together with as many others as there is room for; the slot and,
after the last row of its group, the prompt's slot are handed on when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from oncurve.errors import SamplerError
from oncurve.model.decode_memory import prompts_held
from oncurve.records import FinishReason
from oncurve.rollouts.base import SamplingParams

ADMIT_SHARE = 0.25
"""Waiting rows start when this share of all slots is free: starting a few at a time would read few prompts at once."""


@dataclass(frozen=True)
class Capacity:
    """How much is held at one time."""

    slots: int
    """Completions."""
    prompt_slots: int
    """Prompts."""

    @classmethod
    def of(
        cls,
        *,
        num_prompts: int,
        group_size: int,
        prompt_tokens: int,
        completion_tokens: int,
        max_rows: int,
        kv_tokens: int | None,
    ) -> Capacity:
        """As many rows as the limit on rows and the budget of positions allow.

        Raises SamplerError if the budget does not hold one row.
        """
        slots = min(num_prompts * group_size, max_rows)
        prompts = partial(prompts_held, num_prompts=num_prompts, group_size=group_size)
        if kv_tokens is not None:
            while slots > 0 and slots * completion_tokens + prompts(slots) * prompt_tokens > kv_tokens:
                slots -= 1
            if slots == 0:
                raise SamplerError(
                    f"rollouts.kv_tokens is {kv_tokens}, but one completion of up to {completion_tokens} tokens behind "
                    f"a prompt of {prompt_tokens} needs {completion_tokens + prompts(1) * prompt_tokens}. Raise it"
                )
        return cls(slots, prompts(slots))


class Rows:
    """The completions of one call: their tokens so far, and which run in which slot."""

    def __init__(self, num_prompts: int, group_size: int, room: Capacity, params: SamplingParams) -> None:
        total = num_prompts * group_size
        self.params, self.room, self.group_size = params, room, group_size
        self.prompt_of = np.repeat(np.arange(num_prompts), group_size)
        self.tokens = np.zeros((total, params.max_completion_tokens), dtype=np.int64)
        self.logprobs = np.zeros((total, params.max_completion_tokens), dtype=np.float32)
        self.lengths = np.zeros(total, dtype=np.int64)
        self.reasons: list[FinishReason | None] = [None] * total
        self.running = np.zeros(0, dtype=np.int64)
        """Rows that run, in the order of the batch."""
        self.slots = np.zeros(0, dtype=np.int64)
        """The slot of each of them."""
        self._next = 0
        self._free = list(range(room.slots - 1, -1, -1))
        self._free_prompts = list(range(room.prompt_slots - 1, -1, -1))
        self.prompt_slots = np.full(num_prompts, -1, dtype=np.int64)
        """Where each prompt lies; -1 while it is not held."""
        self._unfinished = np.full(num_prompts, group_size, dtype=np.int64)
        self._whole: list[int] = []

    @property
    def is_done(self) -> bool:
        """Nothing runs and nothing waits."""
        return not len(self.running) and self.none_waits

    def admit(self) -> tuple[np.ndarray, list[int]]:
        """Rows that start now, and the prompts among theirs that must be read first. They join by ``start``."""
        first, fresh = self._next, []
        free = len(self._free)
        if len(self.running) and free < max(1, int(ADMIT_SHARE * self.room.slots)):
            return np.zeros(0, dtype=np.int64), []
        while self._next < len(self.prompt_of) and self._next - first < free:
            prompt = int(self.prompt_of[self._next])
            if self.prompt_slots[prompt] < 0:
                if not self._free_prompts:
                    break
                self.prompt_slots[prompt] = self._free_prompts.pop()
                fresh.append(prompt)
            self._next += 1
        return np.arange(first, self._next), fresh

    def has_started(self, prompt: int) -> bool:
        """No row of the prompt waits."""
        return self._next >= (prompt + 1) * self.group_size

    def start(self, rows: np.ndarray) -> None:
        """Let rows run, each in a free slot."""
        slots = [self._free.pop() for _ in rows]
        self.running = np.concatenate([self.running, rows])
        self.slots = np.concatenate([self.slots, np.array(slots, dtype=np.int64)])

    def record(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Write down the next token of some rows."""
        at = self.lengths[rows]
        self.tokens[rows, at], self.logprobs[rows, at] = tokens, logprobs
        self.lengths[rows] += 1

    def recent(self, row: int, tokens: int) -> list[int]:
        """The last tokens of a row, at most so many."""
        length = int(self.lengths[row])
        return self.tokens[row, max(0, length - tokens) : length].tolist()

    def finish(self, rows: np.ndarray, stopped: np.ndarray) -> np.ndarray:
        """Mark rows that ended with their newest token or at their last; which of ``rows`` go on."""
        full = self.lengths[rows] >= self.params.max_completion_tokens
        over = stopped | full
        for place in np.flatnonzero(over):
            row = int(rows[place])
            self.reasons[row] = "stop" if stopped[place] else "length"
            prompt = int(self.prompt_of[row])
            self._unfinished[prompt] -= 1
            if not self._unfinished[prompt]:
                self._whole.append(prompt)
                self._free_prompts.append(int(self.prompt_slots[prompt]))
                self.prompt_slots[prompt] = -1
        return ~over

    def keep(self, goes_on: np.ndarray) -> None:
        """Drop the running rows that ended, and free their slots."""
        self._free.extend(self.slots[~goes_on].tolist())
        self.running, self.slots = self.running[goes_on], self.slots[goes_on]

    @property
    def none_waits(self) -> bool:
        """Every row has started."""
        return self._next == len(self.prompt_of)

    def fill(self) -> tuple[np.ndarray, np.ndarray]:
        """Let as many rows run in the first slots: which slots' rows must move, and to where."""
        count = len(self.slots)
        is_beyond = self.slots >= count
        moved, to = self.slots[is_beyond], np.setdiff1d(np.arange(count), self.slots)
        self.slots = self.slots.copy()
        self.slots[is_beyond] = to
        order = np.argsort(self.slots)
        self.running, self.slots = self.running[order], self.slots[order]
        self._free = list(range(self.room.slots - 1, count - 1, -1))
        return moved, to

    def take_whole(self) -> list[int]:
        """Prompts whose last row has ended since this was asked before."""
        whole, self._whole = self._whole, []
        return whole

    def group(self, prompt: int) -> list[tuple[list[int], list[float], FinishReason]]:
        """The results of all rows of a prompt."""
        first = prompt * self.group_size
        return [self.result(row) for row in range(first, first + self.group_size)]

    def result(self, row: int) -> tuple[list[int], list[float], FinishReason]:
        """Tokens, log-probabilities and reason of a completion that ended."""
        length = int(self.lengths[row])
        reason = self.reasons[row] or "abort"
        return self.tokens[row, :length].tolist(), self.logprobs[row, :length].tolist(), reason


def ends(tokens: np.ndarray, end_ids: Sequence[int]) -> np.ndarray:
    """Which tokens end a completion."""
    return (tokens[:, None] == np.asarray(end_ids, dtype=np.int64)).any(axis=1)
