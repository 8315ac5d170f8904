"""A trace of one step by torch's profiler, in which the parts of a step are ranges with names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from oncurve.core.decoder import ModuleDecoder
from oncurve.model.decoding import LayerDecoder
from oncurve.policy.trained_policy import TrainedPolicy

_RANGES: tuple[tuple[type, dict[str, str]], ...] = (
    (
        TrainedPolicy,
        {"logprobs": "forward", "backward": "backward", "annotate": "old_reference", "update": "optimizer"},
    ),
    (LayerDecoder, {"__init__": "load", "prefill": "prefill", "hidden": "decode", "draw": "decode"}),
    (ModuleDecoder, {"prefill": "prefill", "hidden": "decode"}),
)
"""Methods and the names of their ranges."""
_ROWS = 40
"""Rows of the table beside a trace."""


class Profiler:
    """Traces a step: ``trace_step_<n>.json.gz`` for ui.perfetto.dev, and ``trace_step_<n>.txt`` with the sums."""

    def __init__(self, folder: Path, *, trace_step: int | None, is_main: bool) -> None:
        """``trace_step`` counts from 1; None traces nothing."""
        self.folder, self.trace_step, self.is_main = folder, trace_step, is_main
        self._profile: profile | None = None
        self._originals: list[tuple[type, str, Callable[..., Any]]] = []

    def begin(self, step: int) -> None:
        """A step begins; ``step`` counts from 0."""
        if step + 1 != self.trace_step or not self.is_main:
            return
        for kind, methods in _RANGES:
            for method, name in methods.items():
                original = vars(kind)[method]
                self._originals.append((kind, method, original))
                setattr(kind, method, record_function(name)(original))
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=kinds)
        self._profile.start()

    def end(self) -> None:
        """A step has ended; write its trace if it is the one."""
        if (traced := self.close()) is not None:
            place = self.folder / f"trace_step_{self.trace_step:06d}"
            traced.export_chrome_trace(f"{place}.json.gz")
            table = traced.key_averages().table(sort_by="cpu_time_total", row_limit=_ROWS)
            place.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")

    def close(self) -> profile | None:
        """Stop a trace, also one whose step was left."""
        traced, self._profile = self._profile, None
        if traced is not None:
            traced.stop()
        while self._originals:
            kind, method, original = self._originals.pop()
            setattr(kind, method, original)
        return traced
