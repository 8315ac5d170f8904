"""Deadlines and backoff of calls to rollout servers."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds after which the trainer stops waiting for a server."""

    connect_seconds: float = 5.0
    """Opening a connection."""
    request_seconds: float = 600.0
    """The completions of one prompt."""
    push_seconds: float = 300.0
    """Each part of handing over weights: fetching them, loading them."""
    silent_seconds: float = 10.0
    """A server that gives no sign of life for so long is lost; it is asked four times in that time."""
    gone_seconds: float = 300.0
    """With no server ready for so long, the run saves and ends."""

    @property
    def heartbeat_seconds(self) -> float:
        """Between two questions to a server that is well."""
        return self.silent_seconds / 4


class Backoff:
    """Ever longer pauses between attempts, each a random share of its limit, so that clients do not come together."""

    def __init__(self, *, first: float = 0.2, longest: float = 5.0) -> None:
        self.first, self.longest = first, longest
        self._limit = first
        self._random = random.Random()

    def next(self) -> float:
        """Seconds until the next attempt."""
        pause = self._limit * (0.5 + self._random.random() / 2)
        self._limit = min(2 * self._limit, self.longest)
        return pause

    def reset(self) -> None:
        """An attempt succeeded."""
        self._limit = self.first
