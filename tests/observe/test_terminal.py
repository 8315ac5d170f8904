"""Is progress told where there is no terminal, with the time that is left?"""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from oncurve.observe import terminal


def test_a_file_gets_a_line_now_and_then_with_the_time_left_of_what_is_done_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    file = StringIO()
    with terminal.counting(Console(file=file), "evaluating") as tell:
        for seconds, done in ((0, 600), (3, 700), (60, 1000), (2, 1001), (240, 2600)):
            now[0] += seconds
            tell(done, 2600, f", {done // 10} correct")
    assert file.getvalue().splitlines() == [
        "evaluating: 1,000 of 2,600, 100 correct, about 4:12 left",
        "evaluating: 2,600 of 2,600, 260 correct",
    ]
