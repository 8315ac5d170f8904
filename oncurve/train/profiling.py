"""Timing of a step's phases from outside, at no cost to runs without a profile.

What is to be timed is wrapped when the profile is asked for: methods of the policy and of the sampler, and, through
``InProcessEngine.around``, the reading of prompts and the decoding of tokens.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from oncurve.batch import Batch
from oncurve.observe import profile
from oncurve.observe.profile import MachineLimits, Spent, TokenWork
from oncurve.policy.policy import TrainedPolicy
from oncurve.records import Group, Prompt
from oncurve.rollouts.base import Sampler
from oncurve.rollouts.engine.engine import InProcessEngine
from oncurve.train.data_parallel import ShardedSampler


class Profiler:
    """Times the steps of a run, and takes a trace of one of them.

    A profile goes to ``profile.jsonl`` of the run folder, a trace of torch's profiler to ``trace_step_<n>.json.gz``,
    for chrome://tracing or ui.perfetto.dev.
    """

    def __init__(
        self,
        policy: TrainedPolicy,
        sampler: Sampler,
        folder: Path,
        *,
        limits: MachineLimits | None,
        trace_step: int | None = None,
    ) -> None:
        """``limits`` are those of the machine; None: no profile, only the trace. ``trace_step`` counts from 1."""
        self.policy, self.folder, self.limits, self.trace_step = policy, folder, limits, trace_step
        self.size = size_of(policy)
        self._spent: defaultdict[str, Spent] = defaultdict(Spent)
        self._trace: torch.profiler.profile | None = None
        self._pass = Spent()
        self._predicted = 0
        if limits is not None and policy.processes.is_main:
            profile.write_limits(folder, limits, compute_type=policy.compute_type)
        self._watch_policy(policy)
        self._watch_sampler(sampler)

    def begin(self, step: int) -> None:
        """A step begins; ``step`` counts from 0."""
        self._spent.clear()
        if step + 1 == self.trace_step and self.policy.processes.is_main:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self.policy.trained_model.device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._trace = torch.profiler.profile(activities=kinds)
            self._trace.start()

    def end(self, done: int, metrics: Mapping[str, float]) -> None:
        """A step has ended, the ``done``-th; write down what it took."""
        if self._trace is not None:
            trace, self._trace = self._trace, None
            trace.stop()
            trace.export_chrome_trace(str(self.folder / f"trace_step_{done:06d}.json.gz"))
        if self.limits is None or not self.policy.processes.is_main:
            return
        tokens = {"sample": "tokens/sampled", "train": "tokens/trained"}
        found = dict(self._spent)
        for phase, parts in profile.PARTS.items():
            if (seconds := metrics.get(f"time/{phase}_seconds")) is not None:
                inside = sum((found[part] for part in parts if part in found), Spent())
                moved = int(metrics.get(tokens.get(phase, ""), 0))
                found[phase] = Spent(seconds, moved, inside.operations, inside.bytes, 1)
        profile.write_step(self.folder, done, found)

    def close(self) -> None:
        """Stop a trace whose step was left."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, timed as a phase."""

        @wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            self._wait()
            started = time.perf_counter()
            with torch.profiler.record_function(name):
                result = call(*args, **options)
                self._wait()
            self._spent[name] += Spent(seconds=time.perf_counter() - started, calls=1)
            return result

        return timed

    def _wait(self) -> None:
        """Until a GPU has done what it was given."""
        if self.policy.trained_model.device.type == "cuda":
            torch.cuda.synchronize()

    def _watch_policy(self, policy: TrainedPolicy) -> None:
        logprobs, backward, annotate = (
            self.around("forward", policy.logprobs),
            self.around("backward", policy.backward),
            self.around("old_reference", policy.annotate),
        )
        update = self.around("optimizer", policy.update)

        def forward(batch: Batch) -> Any:
            self._predicted = int(batch.mask.sum())
            self._pass = profile.forward(self.size, _rows(batch), predicted=self._predicted)
            self._spent["forward"] += self._pass
            return logprobs(batch)

        def backward_counted(loss: torch.Tensor) -> None:
            self._spent["backward"] += profile.backward(self.size, self._pass, predicted=self._predicted)
            backward(loss)

        def annotate_counted(batch: Batch, *, old: bool, entropy: bool, reference: bool) -> Batch:
            passes = (old or entropy) + reference
            if not passes:
                return batch
            one = profile.forward(self.size, _rows(batch), predicted=int(batch.mask.sum()))
            share = passes / policy.processes.count
            self._spent["old_reference"] += Spent(
                0.0, round(one.tokens * share), one.operations * share, one.bytes * passes
            )
            return annotate(batch, old=old, entropy=entropy, reference=reference)

        def update_counted() -> Any:
            self._spent["optimizer"] += profile.optimizer(self.size)
            return update()

        for name, counted in (
            ("logprobs", forward),
            ("backward", backward_counted),
            ("annotate", annotate_counted),
            ("update", update_counted),
        ):
            setattr(policy, name, counted)

    def _watch_sampler(self, sampler: Sampler) -> None:
        setattr(sampler, "load_weights", self.around("load", sampler.load_weights))  # noqa: B010
        engine = engine_in(sampler)
        if engine is None:
            return
        engine.around, sample = self.around, engine.sample

        def counted(prompts: Sequence[Prompt], group_size: int, **options: Any) -> list[Group]:
            before = self._spent["decode"].calls
            groups = sample(prompts, group_size, **options)
            sizes = [(len(g.prompt.prompt_ids), [len(c.token_ids) for c in g.completions]) for g in groups]
            self._spent["load"] += profile.load(self.size)
            self._spent["prefill"] += profile.prefill(self.size, [length for length, _ in sizes])
            steps = self._spent["decode"].calls - before
            self._spent["decode"] += profile.decode(self.size, sizes, steps=steps)
            return groups

        setattr(engine, "sample", counted)  # noqa: B010


def make_profiler(
    policy: TrainedPolicy,
    sampler: Sampler,
    folder: Path,
    *,
    is_profiled: bool,
    trace_step: int | None,
    notify: Callable[[str], None],
) -> Profiler | None:
    """What a recipe asks for; None if that is nothing. The limits of the machine are measured here and said."""
    if not is_profiled and trace_step is None:
        return None
    limits = None
    if is_profiled:
        limits = measure_limits(getattr(torch, policy.compute_type), policy.trained_model.device)
        notify(
            f"profile: this machine multiplies {policy.compute_type} matrices at "
            f"{limits.operations_per_second / 1e9:,.0f} GFLOP/s and reads {limits.bytes_per_second / 2**30:,.1f} GiB/s"
        )
    return Profiler(policy, sampler, folder, limits=limits, trace_step=trace_step)


def engine_in(sampler: Sampler) -> InProcessEngine | None:
    """The engine that samples in this process; None where something else does."""
    inner: Any = sampler.sampler if isinstance(sampler, ShardedSampler) else sampler
    return inner if isinstance(inner, InProcessEngine) else None


def size_of(policy: TrainedPolicy) -> TokenWork:
    """What the work of a policy's tokens depends on."""
    model = policy.trained_model
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    linear = [part for part in model.modules() if isinstance(part, (nn.Linear, Conv1D)) and part is not head]
    head_weights = config.hidden_size * config.vocab_size
    heads = config.num_attention_heads
    known = config.to_dict()  # what only some architectures have
    width = known.get("head_dim") or config.hidden_size // heads
    kv_heads = known.get("num_key_value_heads") or heads
    return TokenWork(
        matrix_weights=sum(_weights(part) for part in linear),
        trained_matrix_weights=sum(_weights(part) for part in linear if part.weight.requires_grad),
        head_weights=head_weights,
        trained_head_weights=head_weights if head is not None and head.weight.requires_grad else 0,
        trained_weights=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        layers=config.num_hidden_layers,
        query_size=heads * width,
        kv_numbers=2 * config.num_hidden_layers * kv_heads * width,
        number_bytes=torch.empty(0, dtype=getattr(torch, policy.compute_type)).element_size(),
    )


def _weights(part: nn.Linear | Conv1D) -> int:
    """In few bits a weight's tensor has fewer numbers than the matrix."""
    return part.in_features * part.out_features if isinstance(part, nn.Linear) else part.weight.numel()


def _rows(batch: Batch) -> list[tuple[int, int, int]]:
    """Group, prompt length and completion length of each row."""
    columns = (batch.group_ids.tolist(), batch.prompt_lengths.tolist(), batch.completion_lengths.tolist())
    return list(zip(*columns, strict=True))


def measure_limits(dtype: torch.dtype, device: torch.device) -> MachineLimits:
    """The rate of matrix products in a type, and of reading memory: the best of some tries."""
    return MachineLimits(
        gemm_flops(dtype, device=str(device), repeats=8),
        read_bandwidth(device=str(device), gibibytes=0.5, repeats=4),
    )


def gemm_flops(dtype: torch.dtype, *, size: int = 1024, repeats: int = 12, device: str = "cpu") -> float:
    """Floating-point operations per second of a square matrix product: the best of some repeats."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    return 2 * size**3 / _best(lambda: left @ right, repeats, device)


def read_bandwidth(*, gibibytes: float = 1.0, repeats: int = 5, device: str = "cpu") -> float:
    """Bytes per second while a tensor that no cache holds is summed: the best of some repeats."""
    data = torch.ones(int(gibibytes * 2**30 / 4), device=device)
    return data.numel() * 4 / _best(data.sum, repeats, device)


def _best(work: Callable[[], Any], repeats: int, device: str) -> float:
    seconds = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        work()
        if not device.startswith("cpu"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[2:])
