"""Does a run that is told to go save itself in time, and end with the status that schedulers understand?"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nursery import Nursery

SIGNALS = (
    (1, "sample", signal.SIGTERM, 143),
    (2, "grade", signal.SIGUSR1, 143),
    (3, "train", signal.SIGINT, 130),
    (5, "evaluate", signal.SIGTERM, 143),
    (7, "save", signal.SIGTERM, 143),
    (8, "measure", signal.SIGTERM, 143),
)
"""Steps done, phase, signal and the exit code that it must give."""


@pytest.mark.proves("F129")
@pytest.mark.nightly
def test_a_signal_in_any_phase_saves_the_last_step_and_is_resumed_to_the_same_bits(
    nursery: Nursery,
    recipe: Callable[..., Path],
    finished: Path,
    kill_at: Callable[..., bool],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    child = nursery.start("train", recipe(tmp_path, run={"save_every_steps": 100}))
    for step, phase, number, expected in SIGNALS:
        assert kill_at(child, run, step=step, phase=phase, number=number), child.output
        assert child.wait() == expected, child.output
        assert "Traceback" not in child.output
        saved = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))
        rows = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert saved in (rows[-1], rows[-1] + 1), "nothing that was done is lost; the last row may miss its measurement"
        child = nursery.start("resume", run)
    assert child.wait() == 0, child.output
    assert_same(run, finished)


def test_a_signal_between_two_updates_of_a_step_finishes_the_step(
    nursery: Nursery, recipe: Callable[..., Path], kill_at: Callable[..., bool], tmp_path: Path
) -> None:
    child = nursery.start("train", recipe(tmp_path, run={"completions_per_update": 1, "save_every_steps": 0}))
    assert kill_at(child, tmp_path / "run", step=1, phase="train", delay_seconds=0.03, number=signal.SIGTERM)
    assert child.wait() == 143
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    rows = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert saved == [f"step_{rows[-1]:06d}"] or rows[-1] + 1 == int(saved[0][5:])


def test_a_second_signal_leaves_at_once(
    nursery: Nursery, recipe: Callable[..., Path], kill_at: Callable[..., bool], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef slow(completion):\n"
        "    try:\n        time.sleep(30)\n    except BaseException:\n        time.sleep(30)\n    return 1.0\n"
    )
    tree = recipe(tmp_path)
    words = f"rewards=[{{type: custom, function: '{tmp_path / 'slow.py'}:slow', isolate: false, timeout_seconds: 60}}]"
    child = nursery.start("train", tree, words)
    run = tmp_path / "run"
    while not (run / "status.json").exists() and child.is_running():
        pass
    child.kill(signal.SIGTERM)
    while "SIGTERM: stopping" not in child.output and child.is_running():
        pass
    child.kill(signal.SIGTERM)
    status = child.wait()
    assert status in (143, -signal.SIGTERM), "the second signal may find the process already on its way out"
    assert status != 143 or "left at once" in child.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_is_no_traceback(
    number: signal.Signals, nursery: Nursery, recipe: Callable[..., Path], kill_at: Callable[..., bool], tmp_path: Path
) -> None:
    child = nursery.start("train", recipe(tmp_path))
    assert kill_at(child, tmp_path / "run", step=0, phase="measure", number=number)
    assert child.wait() == 128 + number
    assert "Traceback" not in child.output
