"""Does `oncurve check` leave nothing behind?"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app

RECIPE = """\
model: embedded
data: {type: word_problems, limit: 60}
rewards:
  - {type: custom, function: "rewards.py:right", isolate: true}
  - {type: custom, function: "rewards.py:stopping"}
"""
REWARDS = """\
def right(completion, answer):
    return float(answer in completion)

def stopping(completion, answer):
    {stopping}
"""


def children() -> set[str]:
    """Processes that this one has started and that still run."""
    listed = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return {pid for pid in listed.split() if "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are listed by /proc, which Linux has")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_grader_is_left_when_a_check_ends_or_is_stopped(
    is_stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if is_stopped:  # whoever starts the tests may have taken Ctrl-C away, as a shell does in the background
        monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    Path("rewards.py").write_text(REWARDS.format(stopping="raise KeyboardInterrupt" if is_stopped else "return 0.0"))
    Path("recipe.yaml").write_text(RECIPE, encoding="utf-8")
    before = children()
    done = CliRunner().invoke(app, ["check", "recipe.yaml"])
    assert ("OK, with 1 warning" in done.output) is not is_stopped  # this reward can be cheated
    assert children() <= before
