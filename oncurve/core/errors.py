"""Errors: messages for a user, code of others that fails, and running out of memory."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from traceback import clear_frames
from types import TracebackType
from typing import TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[1])


class OncurveError(Exception):
    """A problem with a message for the user: where it is, what was found, what to do.

    Commands print the message and end with ``exit_code``.
    """

    exit_code = 1


class ConfigError(OncurveError, ValueError):
    """The recipe asks for something that cannot be done."""

    exit_code = 2


class DataError(OncurveError, ValueError):
    """A data set is missing, empty, or lacks what the recipe needs."""

    exit_code = 3


class RewardError(OncurveError, RuntimeError):
    """Grading failed for more completions than the recipe allows."""

    exit_code = 4


class SamplerError(OncurveError, RuntimeError):
    """Completions could not be sampled."""

    exit_code = 5


class TrainingError(OncurveError, RuntimeError):
    """The run cannot go on: a loss that is not finite, a batch without a token to train on."""

    exit_code = 7


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why somebody else's code gave no value."""

    error: str
    """The kind of failure: "timeout" or "crashed"."""
    detail: str
    """The exception, in one line."""
    trace: str = field(default="", compare=False)
    """Its traceback, from that code on."""


def attempt(
    call: Callable[[], T], *, log: bool = True, passing: Callable[[BaseException], bool] = lambda error: False
) -> T | Failure:
    """The result of a call into code that somebody else wrote, or why there is none; what is ``passing`` is raised.

    This is the one boundary of the project that catches every exception, also those that would end the program. A
    reward function, a tool or an environment is often written by someone else, and its mistake must neither end a run
    of many hours nor pass for a wrong answer.
    """
    try:
        return call()
    except TimeoutError as error:
        return Failure("timeout", single_line(error), _trace(error))
    except (Exception, GeneratorExit) as error:
        if passing(error):
            raise
        if log:
            logger.debug("code that was called raised an exception", exc_info=True)
        return Failure("crashed", single_line(error), _trace(error))
    except SystemExit as error:
        return Failure("crashed", f"it called sys.exit({'' if error.code is None else error.code})", _trace(error))
    except KeyboardInterrupt as error:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Ctrl-C raises it too
            raise
        return Failure("crashed", "it raised KeyboardInterrupt", _trace(error))
    except BaseException as error:  # asyncio.CancelledError, and those of others
        if type(error).__module__.startswith("oncurve."):
            raise
        return Failure("crashed", f"it raised {single_line(error)}", _trace(error))


def _trace(error: BaseException) -> str:
    """The traceback without the frames of this package that lead to the code called; at most 4,000 characters."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [index for index, frame in enumerate(frames) if not frame.filename.startswith(_PACKAGE)]
    rest = frames[own[0] :] if own else frames
    text = "".join([*traceback.format_list(rest), *traceback.format_exception_only(error)])
    return _writable(text)[-4000:]


def single_line(error: BaseException) -> str:
    """An exception as one line of at most 300 characters."""
    text = _writable(" ".join(str(error).split()))[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _writable(text: str) -> str:
    """A text that stands in UTF-8: half a surrogate pair, which no file and no terminal takes, is escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


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
