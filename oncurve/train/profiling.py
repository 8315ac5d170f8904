"""Timing of a step's phases from outside, at no cost to runs without a profile.

Each part of a step is a range of ``torch.profiler`` under its name. The methods that do it, of the policy and of the
sampler, are wrapped when a profile is asked for; inside the engine, ``InProcessEngine.around`` wraps the reading of
prompts and the decoding of tokens.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from oncurve.observe.profile import PARTS, Spent, write_step
from oncurve.policy.policy import TrainedPolicy
from oncurve.rollouts.base import Sampler
from oncurve.rollouts.engine.engine import InProcessEngine
from oncurve.train.data_parallel import ShardedSampler

_TOKENS = {"sample": "tokens/sampled", "train": "tokens/trained"}
_OF_THE_POLICY = {"logprobs": "forward", "backward": "backward", "annotate": "old_reference", "update": "optimizer"}


class Profiler:
    """Times the steps of a run, and takes a trace of one of them.

    A profile goes to ``profile.jsonl`` of the run folder, a trace of torch's profiler to ``trace_step_<n>.json.gz``,
    for chrome://tracing or ui.perfetto.dev.
    """

    def __init__(
        self, policy: TrainedPolicy, sampler: Sampler, folder: Path, *, is_timed: bool, trace_step: int | None = None
    ) -> None:
        """``is_timed``: write the profile. ``trace_step`` counts from 1."""
        self.folder, self.is_timed, self.trace_step = folder, is_timed, trace_step
        self.is_main, self.device = policy.processes.is_main, policy.trained_model.device
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._trace: torch.profiler.profile | None = None
        for method, name in _OF_THE_POLICY.items():
            setattr(policy, method, self.around(name, getattr(policy, method)))
        setattr(sampler, "load_weights", self.around("load", sampler.load_weights))  # noqa: B010
        inner: Any = sampler.sampler if isinstance(sampler, ShardedSampler) else sampler
        if isinstance(inner, InProcessEngine):
            inner.around = self.around

    def begin(self, step: int) -> None:
        """A step begins; ``step`` counts from 0."""
        self._seconds.clear()
        if step + 1 == self.trace_step and self.is_main:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self.device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._trace = torch.profiler.profile(activities=kinds)
            self._trace.start()

    def end(self, done: int, metrics: Mapping[str, float]) -> None:
        """A step has ended, the ``done``-th; write down what it took."""
        if self._trace is not None:
            trace, self._trace = self._trace, None
            trace.stop()
            trace.export_chrome_trace(str(self.folder / f"trace_step_{done:06d}.json.gz"))
        if not (self.is_timed and self.is_main):
            return
        found = {name: Spent(sum(each), len(each)) for name, each in self._seconds.items()}
        for phase in PARTS:
            if (seconds := metrics.get(f"time/{phase}_seconds")) is not None:
                found[phase] = Spent(seconds, tokens=int(metrics.get(_TOKENS.get(phase, ""), 0)))
        write_step(self.folder, done, found)

    def close(self) -> None:
        """Stop a trace whose step was left."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, timed as a part of the step."""

        @wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            self._wait()
            started = time.perf_counter()
            with torch.profiler.record_function(name):
                result = call(*args, **options)
                self._wait()
            self._seconds[name].append(time.perf_counter() - started)
            return result

        return timed

    def _wait(self) -> None:
        """Until a GPU has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
