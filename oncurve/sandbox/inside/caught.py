"""Messages for whatever a program may raise."""

from __future__ import annotations

from types import TracebackType
from typing import Any

MAX_TEXT_CHARACTERS = 300


class Caught:
    """Takes whatever is raised in its block, ``SystemExit`` included, and keeps it in ``error``."""

    error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as a message: the names of its class and base classes, its text, the program's line."""
    names = [kind.__name__ for kind in type(error).__mro__ if kind is not object]
    return {"k": "raise", "names": names[:20], "text": text_of(error), "line": _line_of(error)}


def text_of(error: BaseException) -> str:
    """The text of an exception, in one line; empty if its class cannot even say that."""
    with Caught():
        return " ".join(str(error).split())[:MAX_TEXT_CHARACTERS]
    return ""


def _line_of(error: BaseException) -> int:
    """The last line that ran in the program itself."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith("<program"):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
