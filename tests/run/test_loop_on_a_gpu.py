"""Does a step of the loop go through the loss where log-probabilities lie on a GPU and the batch on the CPU?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from oncurve.algorithm.presets import PRESETS, build
from oncurve.algorithm.table import CorrectionName
from oncurve.core.batch import Batch
from oncurve.core.loop import train
from oncurve.core.records import Group, Reward

if TYPE_CHECKING:
    from pretend_gpu import PretendGpu

GROUP = 4


class GpuPolicy:
    """Scores CPU rows on the GPU, as the real policy does, and keeps the losses that it is given."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def annotate(self, batch: Batch, *, old: bool, entropy: bool, reference: bool) -> Batch:
        known = {"old_logprobs": old, "old_entropy": entropy, "ref_logprobs": reference}
        return replace(batch, **{name: batch.sampler_logprobs for name, asked in known.items() if asked})

    def microbatches(self, update: Batch) -> Iterator[Batch]:
        return iter([update])

    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        scores = torch.zeros(batch.mask.shape, device="cuda", requires_grad=True)
        return scores, scores * 1.0

    def backward(self, loss: Tensor) -> None:
        self.losses.append(loss)

    def update(self) -> dict[str, Any]:
        return {}

    def move_reference(self, share: float) -> None:
        """There is no reference."""


class OneStep:
    """A run of one step with two updates."""

    refill_rounds, mask_truncated, updates_per_step = 0, False, 2

    def steps(self) -> Iterator[int]:
        return iter([0])

    def timed(self, part: str) -> Any:
        return nullcontext()

    def updates(self, batch: Batch) -> Iterator[Batch]:
        return batch.split(len(batch) // self.updates_per_step)

    def accumulate(self, policy: Any, update: Batch, add_gradient: Callable[[Batch], Any]) -> None:
        for microbatch in policy.microbatches(update):
            add_gradient(microbatch)

    @property
    def log(self) -> OneStep:
        return self

    def mean(self, key: str) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def one_step(algorithm: Any, groups: list[Group]) -> list[Tensor]:
    policy = GpuPolicy()
    sampler = SimpleNamespace(load_weights=lambda *_, **__: None, sample=lambda *_, **__: groups)
    data = SimpleNamespace(at=lambda step: [group.prompt for group in groups], observe=lambda *_, **__: None)

    def reward(prompts: Any, completions: Any) -> list[Reward]:
        return [Reward(float(place % 2), {"correct": float(place % 2)}) for place, _ in enumerate(completions)]

    reward.name = "alternating"  # type: ignore[attr-defined]
    list(train(policy, sampler, data, reward, algorithm, OneStep()))  # type: ignore[arg-type]
    return policy.losses


def losses_of(groups: list[Group]) -> dict[str, list[tuple[str, bool]]]:
    """Device of each loss, and whether it is a number: of every preset, and of every correction with all else on."""
    found: dict[str, list[Tensor]] = {}
    sizes: dict[str, Any] = {"group_size": GROUP, "max_completion_tokens": 16}
    for name in PRESETS:
        found[name] = one_step(build(name, **sizes), groups)
    for correction in get_args(CorrectionName):
        choices: dict[str, Any] = {"correction": correction, "kl_coef": 0.1, "entropy_coef": 0.01}
        found[f"with {correction}"] = one_step(build("grpo", **sizes, **choices), groups)
    return {
        name: [(loss.device.type, bool(loss.isfinite()) and loss.grad_fn is not None) for loss in losses]
        for name, losses in found.items()
    }


def test_every_preset_and_every_correction_gets_a_loss_on_the_gpu(
    random_groups: Callable[..., list[Group]], pretend_gpu: PretendGpu
) -> None:
    found = pretend_gpu(losses_of, random_groups(4, GROUP))
    assert found.keys() == {*PRESETS, *(f"with {correction}" for correction in get_args(CorrectionName))}
    for name, losses in found.items():
        assert losses == [("cuda", True)] * OneStep.updates_per_step, name
