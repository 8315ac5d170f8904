"""Does a person see how the run is doing, in a terminal and in a log file?"""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from oncurve.observe.progress import Progress, sparkline
from oncurve.wording import duration


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100), out


@pytest.mark.proves("F122")
def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    target, out = console(terminal=False)
    clock = Clock()
    with Progress(4, console=target, clock=clock) as progress:
        clock.now += 10
        progress.step(1, {"reward/mean": 0.5, "reward/correct": 0.25, "speed/tokens_per_second": 1234.0})
        progress.note("saved [bold]checkpoint[/bold] 1")
        progress.status("evaluating")
        clock.now += 10
        progress.step(2, {"reward/mean": math.nan, "evaluation/correct_fraction": 0.4})
    assert out.getvalue().splitlines() == [
        "step 1/4  reward 0.500  correct 25.0%  tokens/s 1,234  ETA 30s",
        "saved [bold]checkpoint[/bold] 1",
        "step 2/4  validation 40.0%  ETA 20s",
    ]


def test_without_a_terminal_long_work_is_said_now_and_then() -> None:
    target, out = console(terminal=False)
    clock = Clock()
    with Progress(4, console=target, clock=clock) as progress:
        for done in range(0, 500, 100):
            progress.status(f"measuring base: {done}/500")
            clock.now += 9
    assert out.getvalue() == "measuring base: 300/500\n"


def test_a_long_line_is_not_broken() -> None:
    target, out = console(terminal=False)
    with Progress(2, console=target) as progress:
        progress.note("x" * 300)
    assert out.getvalue() == "x" * 300 + "\n"


def test_in_a_terminal_the_panel_shows_step_values_and_the_last_evaluation() -> None:
    target, out = console(terminal=True)
    clock = Clock()
    with Progress(10, console=target, clock=clock) as progress:
        clock.now += 4
        progress.step(1, {"reward/mean": 0.1, "evaluation/correct_fraction": 0.125})
        clock.now += 4
        progress.step(2, {"reward/mean": 0.9, "reward/correct": 0.75})
        progress.note("a note")
    shown = out.getvalue()
    for piece in ("step 2/10", "ETA 32s", "0.900", "75.0%", "12.5%", "at step 1", "a note", "▁█"):
        assert piece in shown


def test_what_came_before_the_first_step_does_not_count_for_the_time_left() -> None:
    clock = Clock()
    progress = Progress(100, first_step=90, console=console(terminal=False)[0], clock=clock)
    assert progress.seconds_left() is None
    clock.now += 1000  # measuring the base model
    progress.step(91, {"time/step_seconds": 5.0})
    assert progress.seconds_left() == 45
    clock.now += 7
    assert progress.seconds_left() == 38
    progress.step(92, {"time/step_seconds": 5.0})
    assert progress.seconds_left() == 56
    clock.now += 100
    assert progress.seconds_left() == 0


def test_durations_are_written_like_a_person_would() -> None:
    assert [duration(s) for s in (0.0, 59.4, 59.6, 3599.0, 3600.0)] == ["0s", "59s", "1:00", "59:59", "1:00:00"]


def test_a_sparkline_averages_neighbours_to_fit() -> None:
    assert sparkline([0.0, 0.0, 1.0, 1.0], width=2) == "▁█"
    assert sparkline([math.nan, 5.0]) == "▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(value) for value in range(1000)], width=37)) == 37
