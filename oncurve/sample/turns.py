"""Sampling turn by turn: what can go on from tokens, one row apart from all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from oncurve.core.decoder import Decoders
from oncurve.core.records import SamplingParams
from oncurve.core.requests import Request, RowState, Sampled
from oncurve.core.sampler import PolicyView, end_token_ids
from oncurve.core.scheduler import RowScheduler
from oncurve.model.allocator import give_back


class Deliver(Protocol):
    """Takes a turn that was sampled."""

    def __call__(self, index: int, sampled: Sampled, spans: Sequence[tuple[int, int]] = (), /) -> None:
        """The turn's index among the keys of its request. Where weights may change under turns, ``spans`` has the first
        token of each version in the turn, and its number."""
        ...


@dataclass(frozen=True)
class Ask:
    """Turns that begin with the same tokens."""

    token_ids: tuple[int, ...]
    keys: tuple[int, ...]
    """The random stream of each turn."""
    max_tokens: int
    deliver: Deliver
    rows: tuple[RowState, ...] = ()
    """Cache that each turn goes on from, and leaves its own in, where the sampler keeps keys and values."""


class Turns(Protocol):
    """Samples turns while it is open."""

    def ask(self, ask: Ask) -> None:
        """Sample this; never waits."""
        ...

    def advance(self) -> bool:
        """Do a piece of the work that happens in this thread; False if there is none."""
        ...

    def close(self) -> None:
        """Give up what is still under way."""
        ...


class TurnSampler(Protocol):
    """A sampler that can open turns."""

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Sample from these weights from now on."""
        ...

    def turns(self, params: SamplingParams, *, step: int, post: Callable[[Callable[[], None]], None]) -> Turns:
        """Turns of the current weights. What other threads have to deliver goes through ``post``."""
        ...

    def close(self) -> None:
        """Give back what was taken."""
        ...


class EngineTurns:
    """Turns in this process: rows enter and leave the batch at every token.

    On a CPU a row that comes back goes on from the keys and values that it left with; a GPU reads it again.
    """

    def __init__(self, policy: PolicyView, params: SamplingParams, decoders: Decoders) -> None:
        self.policy, self.params = policy, params
        self.end_ids = end_token_ids(policy.model, policy.tokenizer)
        self._scheduler = RowScheduler(policy, decoders)
        self._finished: list[tuple[Ask, int, Sampled]] = []
        self._was_training = policy.model.training
        policy.model.eval()

    def ask(self, ask: Ask) -> None:
        """Sample this with whatever else runs."""
        params = self.params.limited_to(ask.max_tokens)
        rows = ask.rows if self.policy.model.device.type == "cpu" else ()
        request = Request(
            ask.token_ids,
            np.array(ask.keys, dtype=np.uint64),
            params,
            self.end_ids,
            on_row=lambda index, sampled: self._finished.append((ask, index, sampled)),
            rows=rows,
        )
        self._scheduler.add(request)

    def advance(self) -> bool:
        """One token for every row in the batch."""
        if not self._scheduler.has_work:
            return False
        self._scheduler.turn()
        finished, self._finished = self._finished, []
        for ask, index, sampled in finished:
            ask.deliver(index, sampled)
        return True

    def close(self) -> None:
        """Give the memory back."""
        self._scheduler.forget()
        self.policy.model.train(self._was_training)
        give_back()
