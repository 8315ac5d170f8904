"""Errors of a run: its checkpoints, its processes, a stop from outside, and memory that runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from oncurve.core.errors import OncurveError, Shortage, TrainingError


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


@contextmanager
def memory_error_as(kind: type[OncurveError], message: str) -> Iterator[None]:
    """While it lasts, running out of memory is an error of this kind: the message, and what was found."""
    with Shortage() as shortage:
        yield
        return
    raise kind(f"{message} ({shortage.reason})")


def call_with_memory_error(command: Callable[[], object]) -> None:
    """Run a command; where nothing else is known about it, running out of memory is one message."""
    with memory_error_as(
        OncurveError,
        "there is not enough memory. Set policy.gradient_checkpointing=true, train an adapter (policy.lora.rank=16), "
        "or take a smaller model; `oncurve plan` says what a recipe takes",
    ):
        command()
