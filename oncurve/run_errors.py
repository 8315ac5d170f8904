"""Errors of a run: its checkpoints, its processes, and a stop from outside."""

from __future__ import annotations

from oncurve.core.errors import OncurveError, TrainingError


class CheckpointError(OncurveError, RuntimeError):
    """A model or checkpoint could not be read or written."""

    exit_code = 6


class LostProcess(TrainingError):
    """Another process of the run is gone; nothing is wrong with what this one was asked to do."""

    exit_code = 75
    """A failure that may pass, by the numbers of sysexits: whoever started the run may start it again."""


class Stopped(OncurveError):
    """The run was told to go by a signal, before or after its steps; or another process said already why it ends."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
