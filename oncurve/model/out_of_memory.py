"""Running out of memory: how it is recognized, forgiven once there is something smaller to try, and said otherwise."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import clear_frames
from types import TracebackType

from oncurve.core.errors import OncurveError

TEXTS = ("out of memory", "can't allocate memory", "not enough memory")
"""Words in torch's error for a failed allocation, on a GPU and on a CPU."""


def is_out_of_memory(error: BaseException) -> bool:
    """An allocation failed, on a GPU or in the memory of the CPU."""
    if isinstance(error, OncurveError):  # which may say so in its message
        return False
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)


class Shortage:
    """A context that forgives running out of memory, and nothing else.

    Whoever tries something smaller does it behind the context: the error is gone there, and with its traceback all
    that the functions which failed held.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        """The first line of what was said when memory ran out; None while it has not."""

    def __enter__(self) -> Shortage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.reason = first_line(error)
        clear_frames(trace)  # a function may hold the error that it raised, and with it itself
        return True


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


def first_line(error: BaseException) -> str:
    """The beginning of what an error says, in one line."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines[0]) <= 200 else lines[0][:200].rpartition(". ")[0] or lines[0][:200]


def release() -> None:
    """Drop what only reference cycles hold, and hand the memory that is kept for reuse back to the device."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
