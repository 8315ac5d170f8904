"""Does a run whose terminal is closed save itself?"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from oncurve.observe.terminal import leave_terminals
from oncurve.run.interruption import Interruption


def test_a_closed_terminal_is_a_request_to_stop_and_never_the_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    interruption = Interruption()
    told: list[str] = []
    interruption.notify = told.append
    monkeypatch.setattr(Interruption, "_leave", lambda self, why: told.append(why))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with interruption.listen():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            assert (interruption.is_requested, interruption.exit_code) == (True, 129)
            assert "left at once" not in told
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told[0].startswith("SIGHUP: stopping and saving a checkpoint")
    assert "left at once" in told


def test_what_ignores_the_signal_goes_on() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        interruption = Interruption()
        with interruption.listen():
            os.kill(os.getpid(), signal.SIGHUP)
        assert not interruption.is_requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_more_is_written_to_a_terminal_that_is_closed(tmp_path: Path) -> None:
    written = os.open(tmp_path / "terminal", os.O_RDWR | os.O_CREAT)
    os.write(written, b"before")
    leave_terminals([written])
    os.write(written, b"after")
    os.close(written)
    assert (tmp_path / "terminal").read_bytes() == b"before"
