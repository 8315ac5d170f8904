"""Batches of every kind for attention in runs, and the reference kernel in the place of the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from runs_reference import Reference

    from oncurve.core.batch import Batch
    from oncurve.core.records import Group

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("invariance", "distributed")]


@pytest.fixture
def make_batch(random_groups: Callable[..., list[Group]]) -> Callable[[str], Batch]:
    """A batch of one of the kinds that layouts differ in."""
    import torch

    from oncurve.core.batch import collate

    def of(groups: list[Group]) -> Batch:
        size = len(groups[0].completions)
        return collate(groups, torch.randn(len(groups), size, generator=torch.Generator().manual_seed(1)))

    def make(kind: str) -> Batch:
        read, unread = random_groups(3, 4), random_groups(1, 4, seed=5, longest=1)
        match kind:
            case "ragged":
                return of(read)
            case "interleaved":
                return of(read).select(torch.tensor([0, 4, 1, 8, 9, 5, 2, 10, 3, 6, 7, 11]))
            case "one group":
                return of(read[:1])
            case "one row":
                return of(read[1:]).select(torch.tensor([0]))
            case "one token each":
                return of(unread + random_groups(2, 4, seed=6, longest=1))
            case "an unread prompt":
                return of(read + unread)
            case "an unread prompt between":
                return of(read[:1] + unread + read[1:]).select(
                    torch.randperm(16, generator=torch.Generator().manual_seed(2))
                )
        raise ValueError(kind)

    return make


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Reference:
    """The reference kernel in the place of the real one, and transformers' layers in the place of our own."""
    from runs_reference import Reference

    from oncurve.policy import forward, packed_attention

    kernel = Reference()
    monkeypatch.setattr(packed_attention, "kernel_for", lambda device, kind: kernel)
    monkeypatch.setattr(forward, "backbone_of", lambda model: None)
    return kernel
