"""Stand-in for the run folder in processes that write nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oncurve.observe.record import RunFolder
from oncurve.observe.sinks import Tracker


def _nothing(*_: Any, **__: Any) -> Any:
    """Write nothing: another process does."""


class NullRunFolder(RunFolder):
    """The folder of a run that another process writes: the same calls, and no file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tracker = Tracker()

    write_start = write_metrics = forget_row = write_status = write_rollouts = write_evaluation = _nothing
    sync = log = close = _nothing
