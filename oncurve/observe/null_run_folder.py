"""Stand-in for the run folder in processes that write nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oncurve.observe.record import RunFolder, rollouts_path
from oncurve.observe.sinks import Tracker
from oncurve.observe.tokens import TokenRecord
from oncurve.records import Group, Reward


class NullRunFolder(RunFolder):
    """The folder of a run that another process writes: the same calls, and no file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tracker = Tracker()

    def write_start(self, recipe: str, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Nothing."""

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def forget_row(self, step: int) -> None:
        """Nothing."""

    def write_status(self, step: int, phase: str) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def write_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        rewards: Sequence[Sequence[Reward]],
        advantages: Sequence[Sequence[float]] | None = None,
        *,
        tokens: TokenRecord | None = None,
    ) -> Path:
        """Nothing; where the other process writes it."""
        return rollouts_path(self.path, step)

    def write_evaluation(
        self, name: str, rows: Iterable[Mapping[str, Any]], summary: Mapping[str, Any], *, analysis: str | None = None
    ) -> Path:
        """Nothing; where the other process writes it."""
        return self.path / "evaluations" / f"{name}.jsonl"

    def log(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
