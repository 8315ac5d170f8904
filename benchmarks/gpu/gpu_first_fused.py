"""Savings of fused kernels in a decode step: add and norm by Triton and by torch.compile, and the whole step.

Prototypes to be timed, checked here against the operations that they would replace; nothing of the package uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_first_agreement import policy_of
from gpu_first_probe import Answer, Setting, judged
from gpu_first_sizes import decode_step
from gpu_first_timing import checkpoint, seconds_each
from torch import Tensor

from oncurve.model.ops_torch import add_norm

EPSILON, REPEATS = 1e-6, 56
"""Norms of a decode step of 28 layers."""


@triton.jit
def _add_norm(x, y, weight, total, out, width, epsilon, block: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = columns < width
    added = tl.load(x + row * width + columns, mask=inside, other=0.0)
    added += tl.load(y + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * width + columns, added, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(added * added, axis=0) / width + epsilon)
    normed = added * scale * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=inside)


def by_triton(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x + y, and its norm in bfloat16, in one kernel."""
    total, out = torch.empty_like(x), torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _add_norm[(len(x),)](x, y, weight, total, out, x.shape[1], EPSILON, block=triton.next_power_of_2(x.shape[1]))
    return total, out


def by_operations(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same as a decode step does it now."""
    return add_norm(x, y, weight, EPSILON, torch.bfloat16)[:2]


def recorded(work: Callable[[], Any]) -> Callable[[], None]:
    """Some work, repeated as often as in a step, as one CUDA graph."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    return graph.replay


def compare(setting: Setting) -> Answer:
    """Seconds of all norms of a step in three ways, and of a step with and without torch.compile."""
    table: dict[str, float] = {}
    wrong = []
    compiled = torch.compile(by_operations, dynamic=False)
    for rows in (128, 512):
        generator = torch.Generator("cuda").manual_seed(0)
        x, y = (torch.randn(rows, 1536, generator=generator, device="cuda") for _ in range(2))
        y, weight = y.bfloat16(), torch.rand(1536, generator=generator, device="cuda")
        expected = by_operations(x, y, weight)
        for name, way in (("operations", by_operations), ("Triton", by_triton), ("torch.compile", compiled)):
            for found, ideal in zip(way(x, y, weight), expected, strict=True):
                gap = float((found.float() - ideal.float()).abs().max() / ideal.float().abs().max())
                wrong += [f"{name} is off by {gap:.2g}"] if gap > 0.01 else []
            replay = recorded(lambda way=way, x=x, y=y, weight=weight: way(x, y, weight))
            table[f"{REPEATS} norms of {rows} rows, {name}"] = seconds_each(replay, "cuda", times=20)
    table |= steps(setting)
    said = "; ".join(wrong) or ", ".join(f"{name}: {seconds * 1e3:.2f} ms" for name, seconds in table.items())
    return judged(not wrong, said, seconds=table)


def steps(setting: Setting) -> dict[str, float]:
    """A recorded decode step of 0.5B as it is, and through torch.compile; also what compiling takes."""
    import time

    policy = policy_of(setting.device, "bfloat16", str(checkpoint(setting.work, "0.5B")))
    found = {}
    with decode_step(policy, 128, 1024, records=True) as step:
        found["step of 128 rows"] = seconds_each(step, "cuda", times=20)
        expected = step().float()
    with decode_step(policy, 128, 1024, records=True, change=_compile_layers) as step:
        started = time.perf_counter()
        try:
            gap = float((step().float() - expected).abs().max())
        except RuntimeError as error:  # dynamo's and the recording's errors are such
            print(f"torch.compile of the step: {str(error)[:2000]}")
            return found
        found["torch.compile of the step, once"] = time.perf_counter() - started
        if gap < 0.5:
            found["step of 128 rows, torch.compile"] = seconds_each(step, "cuda", times=20)
        print(f"torch.compile of the step: logits differ by {gap:.2g} at most")
    return found


def _compile_layers(decoder: Any) -> None:
    decoder.layers.step = torch.compile(decoder.layers.step, dynamic=False)
