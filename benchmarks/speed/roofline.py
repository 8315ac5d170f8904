"""Roofline of sampling and training: the least work that tokens need, and what the machine was measured to do.

Work is the least that the tokens need, whatever way is taken:

    multiplying: operations / seconds / (operations per second of a large matrix product in the compute type)
    reading:     bytes / seconds / (bytes per second of reading memory that no cache holds)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class TokenWork:
    """What of a model decides how much work a token is."""

    matrix_weights: int
    """Weights that every token of a forward pass is multiplied with: those of the layers, adapters included."""
    trained_matrix_weights: int
    """Those among them that are trained."""
    head_weights: int
    trained_head_weights: int
    """All of the head or none of it."""
    trained_weights: int
    """All weights that the optimizer moves."""
    layers: int
    query_size: int
    """Numbers in all query heads of a token."""
    kv_numbers: int
    """Numbers that a token leaves in the cache, over all layers."""
    number_bytes: int
    """Bytes of a number in the compute type."""


@dataclass(frozen=True)
class Work:
    """The least work of some tokens."""

    tokens: int
    operations: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


def attention_operations(size: TokenWork, contexts: float) -> float:
    """Scores and their mixture: 4 layers Q per token and token that it sees; ``contexts`` adds up what tokens see."""
    return 4.0 * size.layers * size.query_size * contexts


def prefill(size: TokenWork, prompt_lengths: Sequence[int]) -> Work:
    """Each prompt once: 2 operations per weight and token, the head for its last token, the matrices read once."""
    tokens = sum(prompt_lengths)
    operations = 2.0 * (size.matrix_weights * tokens + size.head_weights * len(prompt_lengths))
    contexts = sum(length * (length + 1) / 2 for length in prompt_lengths)
    written = size.kv_numbers * tokens + size.matrix_weights
    return Work(tokens, operations + attention_operations(size, contexts), float(written * size.number_bytes))


def decode(size: TokenWork, groups: Sequence[tuple[int, Sequence[int]]], *, steps: int) -> Work:
    """Every completion token after the first, from (prompt length, completion lengths) of each group.

    Bytes: all matrices in each of the ``steps``, the cache of own tokens for each row, the prompt's once for its group.
    """
    tokens, contexts, cached = 0, 0.0, 0.0
    for prompt, lengths in groups:
        later = [length - 1 for length in lengths]
        own = sum(length * (length + 1) / 2 for length in later)
        tokens += sum(later)
        contexts += prompt * sum(later) + own
        cached += prompt * max(later, default=0) + own
    weights = size.matrix_weights + size.head_weights
    operations = 2.0 * weights * tokens + attention_operations(size, contexts)
    return Work(tokens, operations, (weights * steps + size.kv_numbers * cached) * size.number_bytes)


def forward(size: TokenWork, rows: Iterable[tuple[int, int, int]], *, predicted: int) -> Work:
    """A training pass over (group, prompt length, completion length) of each row, a group's prompt once.

    ``predicted`` tokens pass through the head. The last token of a completion is never read.
    """
    prompts: dict[int, int] = {}
    tokens, contexts = 0, 0.0
    for group, prompt, completion in rows:
        own = completion - 1
        if group not in prompts:
            prompts[group] = prompt
            tokens += prompt
            contexts += prompt * (prompt + 1) / 2
        tokens += own
        contexts += own * prompt + own * (own + 1) / 2
    operations = 2.0 * (size.matrix_weights * tokens + size.head_weights * predicted)
    read = (size.matrix_weights + size.head_weights) * size.number_bytes
    return Work(tokens, operations + attention_operations(size, contexts), float(read))


def backward(size: TokenWork, pass_: Work, *, predicted: int) -> Work:
    """What follows a forward pass: gradients of all inputs, of the trained matrices, and twice its attention."""
    plain = 2.0 * (size.matrix_weights * pass_.tokens + size.head_weights * predicted)
    trained = 2.0 * (size.trained_matrix_weights * pass_.tokens + size.trained_head_weights * predicted)
    return replace(pass_, operations=plain + trained + 2.0 * (pass_.operations - plain))


def gemm_flops(dtype: torch.dtype, *, size: int = 1024, repeats: int = 12, device: str = "cpu") -> float:
    """Floating-point operations per second of a square matrix product: the best of some repeats."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    return 2 * size**3 / _best(lambda: left @ right, repeats, device)


def product_seconds(shapes: Iterable[tuple[int, int, int, int]], *, repeats: int = 3, device: str = "cpu") -> float:
    """Seconds of the matrix products of a training step in float32 and of nothing else: forward, and the gradients of
    inputs and weights, from (tokens, inputs, outputs, how often) of every matrix."""
    seconds = 0.0
    for tokens, inputs, outputs, times in shapes:
        rows, weights, gradient = (
            torch.ones(size, device=device) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        for product in (lambda: rows @ weights.T, lambda: gradient @ weights, lambda: gradient.T @ rows):  # noqa: B023
            seconds += times * _best(product, repeats, device)
    return seconds


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
