"""Errors that a user sees as a message instead of a traceback, and helpers to word them."""

from __future__ import annotations

import logging
import signal
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[1])


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "step"), counted(2000, "row")
    ('1 step', '2,000 rows')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The nearest of some names as a sentence with a space behind it; empty if none is near.

    >>> did_you_mean("tran", ["train", "test"])
    "Did you mean 'train'? "
    """
    known = list(names)
    near = get_close_matches(name, known, n=1) or [one for one in known if len(name) > 2 and one.startswith(name)]
    return f"Did you mean {near[0]!r}? " if near else ""


def listed(names: Iterable[str]) -> str:
    """Names in quotes with commas between them; "nothing" if there are none."""
    return ", ".join(repr(name) for name in names) or "nothing"


def shortened(text: str, characters: int = 120) -> str:
    """A text on one line, cut where it is longer than so many characters.

    >>> shortened("two\\nlines of text", 12)
    'two lines...'
    """
    flat = " ".join(text.split())
    return flat if len(flat) <= characters else f"{flat[: characters - 3]}..."


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


class CheckpointError(OncurveError, RuntimeError):
    """A model or checkpoint could not be read or written."""

    exit_code = 6


class TrainingError(OncurveError, RuntimeError):
    """The run cannot go on: a loss that is not finite, a batch without a token to train on."""

    exit_code = 7


class LostProcess(TrainingError):
    """Another process of the run is gone; nothing is wrong with what this one was asked to do."""

    exit_code = 75
    """A failure that may pass, by the numbers of sysexits: whoever started the run may start it again."""


class Stopped(OncurveError):
    """The run was told to go by a signal, before or after its steps; or another process said already why it ends."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


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
        return Failure("timeout", one_line(error), _trace(error))
    except (Exception, GeneratorExit) as error:
        if passing(error):
            raise
        if log:
            logger.debug("code that was called raised an exception", exc_info=True)
        return Failure("crashed", one_line(error), _trace(error))
    except SystemExit as error:
        return Failure("crashed", f"it called sys.exit({'' if error.code is None else error.code})", _trace(error))
    except KeyboardInterrupt as error:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Ctrl-C raises it too
            raise
        return Failure("crashed", "it raised KeyboardInterrupt", _trace(error))
    except BaseException as error:  # asyncio.CancelledError, and those of others
        if type(error).__module__.startswith("oncurve."):
            raise
        return Failure("crashed", f"it raised {one_line(error)}", _trace(error))


def _trace(error: BaseException) -> str:
    """The traceback without the frames of this package that lead to the code called; at most 4,000 characters."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [place for place, frame in enumerate(frames) if not frame.filename.startswith(_PACKAGE)]
    kept = frames[own[0] :] if own else frames
    text = "".join([*traceback.format_list(kept), *traceback.format_exception_only(error)])
    return _writable(text)[-4000:]


def one_line(error: BaseException) -> str:
    """An exception as one line of at most 300 characters."""
    text = _writable(" ".join(str(error).split()))[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _writable(text: str) -> str:
    """A text that stands in UTF-8: half a surrogate pair, which no file and no terminal takes, is escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
