"""A trace of one step by torch's profiler, in which the parts of a step are ranges with names (``traced``)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_ROWS = 40
"""Rows of the table beside a trace."""


class Profiler:
    """Traces a step: ``trace_step_<n>.json.gz`` for ui.perfetto.dev, and ``trace_step_<n>.txt`` with the sums."""

    def __init__(self, folder: Path, *, trace_step: int, is_main: bool) -> None:
        """``trace_step`` counts from 1."""
        self.folder, self.trace_step, self.is_main = folder, trace_step, is_main
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """A step begins; ``step`` counts from 0."""
        if step + 1 != self.trace_step or not self.is_main:
            return
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=kinds)
        self._profile.start()

    def end(self) -> None:
        """A step has ended; write its trace if it is the one."""
        if (traced := self.close()) is not None:
            path = self.folder / f"trace_step_{self.trace_step:06d}"
            traced.export_chrome_trace(f"{path}.json.gz")
            table = traced.key_averages().table(sort_by="cpu_time_total", row_limit=_ROWS)
            path.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")

    def close(self) -> profile | None:
        """Stop a trace, also one whose step was left."""
        traced, self._profile = self._profile, None
        if traced is not None:
            traced.stop()
        return traced
