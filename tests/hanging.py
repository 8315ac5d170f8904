"""Calls that hang and are given up at once, while all others may take as long as a busy machine makes them."""

from __future__ import annotations

import threading

import pytest

from oncurve.episodes.workers import Job, Workers


class Hanging(threading.Event):
    """Whoever waits for it in a call of a tool or an environment is over the limit of that call from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._here, usual = threading.local(), Workers._value

        def value(workers: Workers, job: Job) -> object:
            self._here.job = job
            return usual(workers, job)

        monkeypatch.setattr(Workers, "_value", value)

    def wait(self, timeout: float | None = None) -> bool:
        """Until somebody sets it."""
        job: Job = self._here.job
        assert job.started is not None
        job.started -= job.limit_seconds + 1.0
        return super().wait(timeout)
