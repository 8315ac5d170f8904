"""How much work is a decode step, a microbatch, an update? A whole command is counted from outside, part by part."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from pretend.counting import Counts, counting, scope


class Part:
    """A part of a program that ran several times."""

    def __init__(self) -> None:
        self.calls = self.kernels = self.host_launches = self.allocations = self.peak_bytes = 0
        self.synchronizations: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()

    def add(self, counts: Counts) -> None:
        """Count one more time."""
        self.calls += 1
        self.kernels += counts.num_kernels
        self.host_launches += counts.num_launches
        self.allocations += counts.allocations
        self.peak_bytes = max(self.peak_bytes, counts.peak_bytes)
        self.synchronizations += Counter(counts.synchronizations)
        self.launches += Counter(counts.launches) + Counter(counts.launches_in_graphs)

    def figures(self, layers: int) -> dict[str, Any]:
        """Per call, but for the peak."""
        calls = max(self.calls, 1)
        return {
            "calls": self.calls,
            "kernels_per_call": self.kernels / calls,
            "kernels_per_layer_and_call": self.kernels / calls / layers if layers else None,
            "host_launches_per_call": self.host_launches / calls,
            "allocations_per_call": self.allocations / calls,
            "synchronizations_per_call": sum(self.synchronizations.values()) / calls,
            "synchronizations": dict(self.synchronizations),
            "peak_bytes": self.peak_bytes,
            "kernels": {name: count / calls for name, count in self.launches.most_common()},
        }


class Report:
    """The parts of a command, by name: ``decode_step`` and ``engine_step`` (with drawing), ``microbatch`` (from its
    log-probabilities to the end of its backward pass), ``update``, ``annotate``, and each phase of the loop."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self.layers = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens meanwhile to a part of this name, which failures can be asked for by."""
        counts = Counts()
        try:
            with scope(name), counting() as counts:
                yield
        finally:
            self.parts.setdefault(name, Part()).add(counts)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return counted

    def write(self, path: Path) -> None:
        """As JSON."""
        figures = {name: part.figures(self.layers) for name, part in self.parts.items()}
        path.write_text(json.dumps({"layers": self.layers, "parts": figures}, indent=1))

    def table(self) -> str:
        """The figures that matter most, a line for each part."""
        lines = [f"{'part':16}{'calls':>7}{'kernels':>10}{'launches':>10}{'waits':>8}{'peak MiB':>10}  waits by why"]
        for name, part in self.parts.items():
            calls = max(part.calls, 1)
            why = ", ".join(f"{reason} {count / calls:.1f}" for reason, count in part.synchronizations.most_common(4))
            waits = sum(part.synchronizations.values()) / calls
            lines.append(
                f"{name:16}{part.calls:7}{part.kernels / calls:10.1f}{part.host_launches / calls:10.1f}"
                f"{waits:8.1f}{part.peak_bytes / 2**20:10.1f}  {why}"
            )
        return "\n".join(lines)


def counted_command() -> None:
    """Run the command of ``sys.argv``; its parts are counted where the environment asks for a report or for a failure.

    However the command ends, its figures are written.
    """
    from oncurve.cli.app import main

    target = os.environ.pop("PRETEND_GPU_REPORT", "")
    if not target and "PRETEND_GPU_FAIL_AT" not in os.environ:
        main()
        return
    report = watch()
    try:
        main()
    finally:
        if target:
            report.write(Path(target))
            print(report.table(), file=sys.stderr)


def watch() -> Report:
    """Count the parts of every command of this process from here on."""
    from oncurve.core.scheduler import RowBatch
    from oncurve.model.decoding import LayerDecoder
    from oncurve.policy.trained_policy import TrainedPolicy
    from oncurve.run.services import Run

    report = Report()
    for owner, method, name in (
        (LayerDecoder, "prefill", "prefill"),
        (LayerDecoder, "step", "decode_step"),
        (RowBatch, "turn", "engine_step"),
        (TrainedPolicy, "annotate", "annotate"),
        (TrainedPolicy, "update", "update"),
    ):
        setattr(owner, method, report.around(name, getattr(owner, method)))
    _watch_microbatches(TrainedPolicy, report)
    timed = Run.timed

    @contextmanager
    def counted(run: Any, phase: str) -> Iterator[None]:
        with report.part(phase), timed(run, phase):
            yield

    Run.timed = counted  # type: ignore[method-assign]
    return report


def _watch_microbatches(policy: Any, report: Report) -> None:
    """One begins with its log-probabilities and ends with its backward pass; without that it failed."""
    logprobs, backward, entered = policy.logprobs, policy.backward, []

    def begin(self: Any, batch: Any) -> Any:
        while entered:  # one that failed
            entered.pop().__exit__(None, None, None)
        report.layers = int(self.model.config.get_text_config().num_hidden_layers)
        entered.append(report.part("microbatch"))
        entered[-1].__enter__()
        return logprobs(self, batch)

    def end(self: Any, loss: Any) -> None:
        backward(self, loss)
        while entered:
            entered.pop().__exit__(None, None, None)

    policy.logprobs, policy.backward = begin, end
