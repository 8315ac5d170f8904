"""The versions of the weights that sampled a completion which grows turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class VersionSpans:
    """The versions that sampled a completion which grows turn by turn."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, start: int, spans: Sequence[tuple[int, int]]) -> None:
        """The spans of a turn, counted from its own first token, which is token ``start`` of the completion."""
        for first, version in spans:
            if not self._spans:
                self._spans.append((0, version))
            elif version != self._spans[-1][1]:
                self._spans.append((start + first, version))

    def facts(self, version: int) -> dict[str, Any]:
        """``policy_version`` and ``versions`` of the completion; ``version`` where no turn said which was its own."""
        oldest = min((number for _, number in self._spans), default=version)
        return {"policy_version": oldest, "versions": tuple(self._spans) if len(self._spans) > 1 else ()}
