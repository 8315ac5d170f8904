"""Running out of memory, said in one message where nothing smaller can be tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from oncurve.core.errors import OncurveError, Shortage


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
