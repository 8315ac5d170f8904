"""The part of what training changed that the copies in 16 bits show, measured on a sample of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oncurve.algorithm.precision import narrow_by, parameter_keys, thresholds_at
from oncurve.core.records import Mean
from oncurve.policy.dithered_parts import plain
from oncurve.policy.sharding import own_rows_of

SAMPLES_PER_MATRIX = 2048
"""Weights that are looked at in each matrix, or in this process's part of it."""


@dataclass(frozen=True)
class _Sampled:
    """Some weights of a matrix."""

    matrix: nn.Parameter
    indices: Tensor
    """Flat indices in this process's part."""
    thresholds: Tensor | None
    """Thresholds of their dither; None where copies are rounded to the nearest."""
    weight: float
    """Weights of the matrix that each of these stands for."""
    start: Tensor
    """The weights before training."""

    def now(self) -> Tensor:
        """The weights as they are."""
        return _part(self.matrix)[self.indices]

    def copies(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """The copies of these weights, if they are ``numbers``, in float32."""
        return narrow_by(numbers, dtype, self.thresholds).float()


class Arrivals:
    """Compares the copies with the weights that they are of, since training began."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Every trained matrix but those of embeddings, whose rows are looked up in float32."""
        self.dtype = dtype
        keys = parameter_keys(model)
        looked_up = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
        self.samples = [
            _sample(weight, keys.get(name))
            for name, weight in model.named_parameters()
            if weight.requires_grad
            and weight.ndim > 1
            and weight.dtype == torch.float32
            and id(weight) not in looked_up
        ]
        self.samples = [sample for sample in self.samples if len(sample.indices)]
        self.start_copies = [sample.copies(sample.start, dtype) for sample in self.samples]

    @torch.no_grad()
    def copies(self) -> list[Tensor]:
        """The copies of the sampled weights as they are now."""
        return [sample.copies(sample.now(), self.dtype) for sample in self.samples]

    @torch.no_grad()
    def measure(self, before: list[Tensor]) -> Mapping[str, Mean]:
        """The projection of the copies' change since the start on that of the weights; and the part of the copies that
        are not what they were ``before`` the last update."""
        sums = torch.zeros(4, dtype=torch.float64)
        if self.samples:
            device = before[0].device
            sums = torch.zeros(4, dtype=torch.float64, device=device)
        for sample, start_copy, old in zip(self.samples, self.start_copies, before, strict=True):
            now = sample.now()
            copy = sample.copies(now, self.dtype)
            change, seen = (now - sample.start).double(), (copy - start_copy).double()
            moved = (copy != old).sum(dtype=torch.float64)
            sums += sample.weight * torch.stack(
                [(seen * change).sum(), (change * change).sum(), moved, moved.new_tensor(float(len(copy)))]
            )
        along, taught, moved, count = sums.tolist()
        return {"policy/arrived": Mean(along, taught), "policy/moved_fraction": Mean(moved, count)}

    def steps_until_seen(self, rate: float) -> float | None:
        """Updates of a size of ``rate`` in one direction after which half of the weights have moved to a neighbour on
        the grid, if they are rounded to the nearest; None without trained matrices or at a rate of 0."""
        if not self.samples or not rate:
            return None
        weights = torch.cat([sample.start.cpu() for sample in self.samples]).abs()
        digits = {torch.bfloat16: 8, torch.float16: 11}[self.dtype]
        weights = weights[weights > 0]
        half_steps = torch.ldexp(torch.full_like(weights, 0.5), torch.frexp(weights)[1] - digits)
        return float(half_steps.median()) / rate if len(half_steps) else None


def _part(matrix: nn.Parameter) -> Tensor:
    """This process's part of a matrix, or all of it, in one row."""
    whole = plain(matrix.to_local()) if isinstance(matrix, DTensor) else matrix
    return whole.detach().reshape(-1)


def _sample(matrix: nn.Parameter, key: int | None) -> _Sampled:
    own = _part(matrix)
    count = min(SAMPLES_PER_MATRIX, len(own))
    draw = torch.Generator().manual_seed(0)
    indices = torch.randperm(len(own), generator=draw)[:count].sort().values.to(own.device)
    rows = own_rows_of(matrix) if isinstance(matrix, DTensor) else slice(0)
    first = rows.start * matrix.shape[1:].numel() if isinstance(matrix, DTensor) else 0
    thresholds = thresholds_at(indices + first, key)
    return _Sampled(matrix, indices, thresholds, len(own) / max(count, 1), own[indices].clone())
