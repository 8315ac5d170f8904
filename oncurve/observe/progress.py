"""Progress of a run: a live display in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from oncurve.wording import decimals, duration, percent, whole

_BARS = "▁▂▃▄▅▆▇█"
NOISE = 1e-5
"""Curves that nowhere leave this distance from 0 are drawn as a flat line."""
_HELD_OUT, _HELD_OUT_REWARD = "evaluation/correct_fraction", "evaluation/mean_reward"
_Form = Callable[[float], str]
_PANEL: tuple[tuple[tuple[str, str, _Form], ...], ...] = (
    (
        ("errors", "reward/error_fraction", lambda value: percent(value) if value else ""),
        ("length", "completion/mean_tokens", lambda value: f"{value:.0f}"),
        ("cut off", "completion/truncated_fraction", lambda value: f"{value:.0%}"),
        ("no signal", "group/zero_signal_fraction", lambda value: f"{value:.0%}"),
        ("entropy", "policy/entropy", lambda value: f"{value:.3g}"),
        ("kl", "policy/kl", lambda value: f"{value:.2g}"),
        ("gradient", "policy/gradient_norm", lambda value: f"{value:.2g}"),
    ),
    (
        ("sample", "speed/sampled_tokens_per_second", lambda value: f"{value:,.0f} tokens/s"),
        ("train", "speed/trained_tokens_per_second", lambda value: f"{value:,.0f} tokens/s"),
        ("step", "time/step_seconds", lambda value: f"{value:.3g} s"),
        ("memory", "memory/process_gib", lambda value: f"{value:.2f} GiB"),
        ("gpu", "memory/gpu_gib", lambda value: f"{value:.2f} GiB"),
    ),
)
"""The lines of the panel below reward and accuracy: how the policy does, then how fast."""
_ROWS: tuple[tuple[str, str, _Form], ...] = (
    ("loss", "sft/loss", decimals),
    ("reward", "reward/mean", decimals),
    ("correct", "reward/correct", percent),
    ("errors", "reward/error_fraction", lambda value: percent(value) if value else ""),
    ("no signal", "group/zero_signal_fraction", lambda value: f"{value:.0%}"),
    ("length", "completion/mean_tokens", lambda value: f"{value:.0f}"),
    ("tokens/s", "speed/tokens_per_second", whole),
)


QUIET_SECONDS = 20.0
"""Without a panel, work inside a step is a line of its own if nothing was printed for so long."""


class Progress:
    """Step, time left, reward, accuracy, speed by phase, memory and alarms of a run, as a context manager.

    In a terminal and in a notebook a panel of a few lines that is redrawn in place; otherwise one line of text per
    step, which is also what ends up in a log file. Not safe for use from several threads.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        console: Console | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``first_step``: steps done before, by a run that is resumed. ``live`` None asks the console."""
        self.console = console or Console()
        self._total = total_steps
        self._first = first_step
        self._done = first_step
        self._clock = clock
        self._started = clock()
        self._step_times: tuple[tuple[int, float], float] | None = (
            None  # (first step shown, when), when the last one was
        )
        self._latest: dict[str, float] = {}
        self._rewards: list[float] = []
        self._alarms: list[tuple[int, str]] = []
        self._evaluated: tuple[int, str] | None = None
        self._status, self._reported = "", self._started
        is_live = self.console.is_terminal if live is None else live
        self._live: Live | NotebookDisplay | None = None
        if live is None and self.console.is_jupyter:
            self._live = NotebookDisplay(self._panel, clock=clock)
        elif is_live:
            self._live = Live(console=self.console, get_renderable=self._panel, refresh_per_second=4)

    def __enter__(self) -> Progress:
        self._started = self._clock()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status = ""
        if self._live is not None:
            self._live.stop()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step; ``step`` counts steps done. Metrics that are missing keep their last value."""
        self._done = step
        now = self._clock()
        self._step_times = (self._step_times[0] if self._step_times else (step, now)), now
        self._latest.update(metrics)
        self._status = ""
        if math.isfinite(reward := metrics.get("reward/mean", math.nan)):
            self._rewards.append(reward)
        if math.isfinite(accuracy := metrics.get(_HELD_OUT, math.nan)):
            self._evaluated = (step, percent(accuracy))
        elif math.isfinite(mean := metrics.get(_HELD_OUT_REWARD, math.nan)):
            self._evaluated = (step, f"{mean:.3f}")
        if self._live is None:
            self._print(self.line(metrics))
        elif isinstance(self._live, NotebookDisplay):
            self._live.refresh()

    def note(self, text: str) -> None:
        """Prints something that stays: above the live display, or as a line."""
        self._print(text)

    def alarm(self, step: int, text: str) -> None:
        """Prints what the doctor says of a step, and keeps its first words in the panel."""
        self._alarms.append((step, text))
        self._print(text)

    def status(self, text: str) -> None:
        """The work inside the step, such as "evaluating 128/500": in the panel, or as a line where long none came."""
        self._status = text
        if isinstance(self._live, NotebookDisplay):
            self._live.refresh(at_once=False)
        elif self._live is None and self._clock() - self._reported > QUIET_SECONDS:
            self._print(text)

    def line(self, metrics: Mapping[str, float]) -> str:
        """One step as one line of plain text."""
        cells = [f"step {self._done}/{self._total}"]
        values = ((name, form(metrics[key])) for name, key, form in _ROWS if _is_number(metrics.get(key)))
        cells += [f"{name} {value}" for name, value in values if value]
        if _is_number(metrics.get(_HELD_OUT)):
            cells.append(f"validation {percent(metrics[_HELD_OUT])}")
        if (left := self.seconds_left()) is not None:
            cells.append(f"ETA {duration(left)}")
        return "  ".join(cells)

    def seconds_left(self) -> float | None:
        """Seconds until the last step: the steps left at the mean wall time between steps, evaluations included.

        What came before the first step, such as measuring the base model, does not count. None before that step.
        """
        if self._step_times is None:
            return None
        (first_step, first), last = self._step_times
        if self._done > first_step:
            per_step = (last - first) / (self._done - first_step)
        else:
            per_step = self._latest.get("time/step_seconds", (last - self._started) / max(1, self._done - self._first))
        return max(0.0, per_step * (self._total - self._done) - (self._clock() - last))

    def _print(self, text: str) -> None:
        self._reported = self._clock()
        self.console.print(Text(text), soft_wrap=True)

    def _panel(self) -> RenderableType:
        """Quiet on purpose: what changes stands at fixed places, and colour is kept for what asks for attention."""
        lines: list[RenderableType] = [self._head()]
        if self._latest:
            lines.append(self._results())
            lines += [row for cells in _PANEL if (row := self._row(cells)) is not None]
        if self._alarms:
            lines.append(self._alarm_line())
        return Padding(Group(*lines), (1, 0, 0, 1))

    def _head(self) -> RenderableType:
        left = self.seconds_left()
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {self._done}/{self._total}", style="bold"),
            ProgressBar(self._total or 1, self._done, width=30, complete_style="blue", finished_style="green"),
            Text(f"{self._done / max(1, self._total):.0%}"),
            Text(duration(self._clock() - self._started), style="dim"),
            Text("" if left is None else f"ETA {duration(left)}"),
            Text(self._status or ("" if self._latest else "waiting for the first step"), style="dim"),
        )
        return head

    def _results(self) -> RenderableType:
        """Reward with its curve, and how much is right, in training and held out."""
        cells: list[str | tuple[str, str]] = []
        if _is_number(reward := self._latest.get("reward/mean")):
            cells += [("reward ", "dim"), (f"{reward:.3f}", "bold"), f"  {sparkline(self._rewards, width=24)}   "]
        if _is_number(correct := self._latest.get("reward/correct")):
            cells += [("correct ", "dim"), (percent(correct), "bold"), "   "]
        if self._evaluated is not None:
            step, result = self._evaluated
            cells += [("validation ", "dim"), (result, "bold green"), (f" at step {step}", "dim")]
        return Text.assemble(*cells)

    def _row(self, cells: Sequence[tuple[str, str, _Form]]) -> RenderableType | None:
        known = ((name, form(self._latest[key])) for name, key, form in cells if _is_number(self._latest.get(key)))
        values = [(name, value) for name, value in known if value]
        if not values:
            return None
        return Text.assemble(*(piece for name, value in values for piece in ((f"{name} ", "dim"), f"{value}   ")))

    def _alarm_line(self) -> RenderableType:
        step, text = self._alarms[-1]
        before = f"{len(self._alarms)} alarms, the last " if len(self._alarms) > 1 else ""
        line = f"{before}at step {step}: {text.split(' [', 1)[0]}"
        return Text(line, style="yellow", no_wrap=True, overflow="ellipsis")


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """A curve in one line of text, lowest value at the bottom; neighbours are averaged to fit ``width``.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    size = min(width, len(finite))
    edges = [round(number * len(finite) / size) for number in range(size + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if max(abs(mean) for mean in means) < NOISE:
        span = 0.0  # rounding errors are no curve
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 0] for mean in means)


SECONDS_BETWEEN = 0.25
"""Between two refreshments that nothing important asks for."""
_FORMAT = '<pre style="line-height: 1.3; white-space: pre; overflow-x: auto">{code}</pre>'


class NotebookDisplay:
    """A display in a notebook, as ``rich.live.Live`` is in a terminal."""

    def __init__(self, render: Callable[[], RenderableType], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._render, self._clock = render, clock
        self._handle: Any = None
        self._written_at = 0.0

    def start(self) -> None:
        """Show it in the cell that runs."""
        from IPython.display import HTML, display

        self._handle = display(HTML(as_html(self._render())), display_id=True)
        self._written_at = self._clock()

    def refresh(self, *, at_once: bool = True) -> None:
        """Show it as it is now; unless ``at_once``, only if it was not shown a moment ago."""
        if self._handle is None or (not at_once and self._clock() - self._written_at < SECONDS_BETWEEN):
            return
        from IPython.display import HTML

        self._handle.update(HTML(as_html(self._render())))
        self._written_at = self._clock()

    def stop(self) -> None:
        """Leave it as it is at the end."""
        self.refresh()
        self._handle = None


def as_html(renderable: RenderableType, *, width: int = 110) -> str:
    """A console's output as HTML that brings its colours along."""
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True, force_jupyter=False)
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format=_FORMAT)
