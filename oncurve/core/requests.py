"""A request for completions of one prompt, and who hears of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from oncurve.core.records import SamplingParams
from oncurve.core.sampler import Sampled
from oncurve.sample.row_memory import KeptPrompt, KeptRow


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
    """Called once for each completion when it has ended, with its place among ``keys``."""
    on_tokens: Callable[[list[int]], object] | None = None
    """Called after each token with what the only completion of the request has so far."""
    rows: tuple[KeptRow, ...] = ()
    """Cache that each completion goes on from, and keeps for its next turn; empty for completions of one turn."""
    keeps: bool = False
    """Its rows go on later also where the limit on tokens ended them."""
    started: int = 0
    """Completions that run or have ended."""
    sampled: dict[int, Sampled] = field(default_factory=dict)
    """Completions that have ended, by their places."""
    versions: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    """Which weights sampled each completion, from which of its tokens on, where weights may change meanwhile."""
    read_under: str = ""
    """Label of the weights that read the prompt."""
    prompt: KeptPrompt = field(init=False)
    _reported: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        known = self.rows[0].prompt if self.rows else None
        self.prompt = known or KeptPrompt(self.token_ids)
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
        self.rows, self.prompt = (), KeptPrompt(self.token_ids)

    def again(self) -> Request:
        """Forget what was sampled: the same streams give it once more."""
        self.sampled.clear()
        self.started = 0
        return self

    def give(self, place: int, sampled: Sampled) -> bool:
        """Put a completion in its place; True if it was the last one."""
        self.sampled[place] = sampled
        if self.on_row is not None and place not in self._reported:
            self._reported.add(place)
            self.on_row(place, sampled)
        if len(self.sampled) < self.count:
            return False
        if self.on_done is not None:
            self.on_done([self.sampled[place] for place in range(self.count)])
        return True
