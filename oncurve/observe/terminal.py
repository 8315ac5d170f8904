"""The console of the commands, and silencing what other libraries print."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from oncurve.wording import duration

if TYPE_CHECKING:
    from rich.console import Console


LIBRARY_OPTIONS = {
    "TOKENIZERS_PARALLELISM": "false",
    "THP_MEM_ALLOC_ENABLE": "1",  # torch asks for large pages: far fewer page faults
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",  # shapes of products whose code is kept, half a megabyte each
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables set for libraries, unless the environment has them already."""
EVERY_SECONDS = 5.0
"""Between two lines about progress, where there is no terminal."""


def console() -> Console:
    """The console that people read."""
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty())


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Around imports of large libraries, whose objects stay: looking for garbage among them would take a second."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@loading_libraries()
def quiet_libraries() -> None:
    """Give libraries their options, and keep their progress bars and advice out of the display."""
    for name, value in LIBRARY_OPTIONS.items():
        os.environ.setdefault(name, value)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def counting(out: Console, what: str) -> Iterator[Callable[..., None]]:
    """Show how much of something is done, with the time that is left: on a terminal in one line, else now and then.

    Gives a function of what is done, how much there is, and what else to say. What is done already when it is first
    called took no time of this one.
    """
    started, reported, before = time.monotonic(), time.monotonic(), -1
    with out.status(f"{what} ...") if out.is_terminal else nullcontext() as status:

        def tell(done: int, total: int, more: str = "") -> None:
            nonlocal reported, before
            now = time.monotonic()
            before = done if before < 0 else before
            text = f"{what}: {done:,} of {total:,}{more}"
            if before < done < total:
                text += f", about {duration((now - started) / (done - before) * (total - done))} left"
            if status is not None:
                status.update(text)
            elif now - reported > EVERY_SECONDS:
                reported = now
                out.print(text, markup=False, highlight=False)

        yield tell


def open_terminals() -> list[int]:
    """The numbers of standard input and outputs that are a terminal."""
    return [number for number in (0, 1, 2) if os.isatty(number)]


def leave_terminals(numbers: list[int]) -> None:
    """Write nothing more to terminals that were closed, where each line would be an error, and forget them."""
    for number in numbers:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, number)
        os.close(nothing)
    numbers.clear()
