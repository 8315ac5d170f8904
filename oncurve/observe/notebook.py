"""A display in a notebook's cell that changes in place: HTML, without a widget."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType

SECONDS_BETWEEN = 0.25
"""Between two refreshments that nothing important asks for."""
_FORMAT = '<pre style="line-height: 1.3; white-space: pre; overflow-x: auto">{code}</pre>'


class NotebookDisplay:
    """What ``rich.live.Live`` is in a terminal."""

    def __init__(self, render: Callable[[], RenderableType], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._render, self._clock = render, clock
        self._handle: Any = None
        self._shown = 0.0

    def start(self) -> None:
        """Show it in the cell that runs."""
        from IPython.display import HTML, display

        self._handle = display(HTML(as_html(self._render())), display_id=True)
        self._shown = self._clock()

    def refresh(self, *, at_once: bool = True) -> None:
        """Show it as it is now; unless ``at_once``, only if it was not shown a moment ago."""
        if self._handle is None or (not at_once and self._clock() - self._shown < SECONDS_BETWEEN):
            return
        from IPython.display import HTML

        self._handle.update(HTML(as_html(self._render())))
        self._shown = self._clock()

    def stop(self) -> None:
        """Leave it as it is at the end."""
        self.refresh()
        self._handle = None


def as_html(renderable: RenderableType, *, width: int = 110) -> str:
    """What a console would show, as HTML that brings its colours along."""
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True, force_jupyter=False)
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format=_FORMAT)
