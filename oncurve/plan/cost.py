"""Cost of a run, compared with PPO and DPO."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from oncurve.plan.constants import GPU_MARGIN, RECORD_BYTES
from oncurve.plan.hardware import Device
from oncurve.plan.memory import Memory, moment_bytes, plan_memory, trained_parameters
from oncurve.plan.setup import Setup, Work
from oncurve.plan.shape import ModelShape
from oncurve.plan.step_time import StepTime, step_time

Trainer = Literal["GRPO", "PPO", "DPO", "SFT"]
TRAINERS: tuple[Trainer, ...] = ("GRPO", "PPO", "DPO")


@dataclass(frozen=True, slots=True)
class Price:
    """USD; None where the table of devices has no price."""

    on_demand: float | None
    """Every device on demand."""
    spot_samplers: float | None
    """The trainers on demand, the devices that only sample on spot: they hold no state."""
    spot: float | None
    """Every device on spot: possible where the run is saved often enough to be continued."""


def price(setup: Setup, device: Device, *, hours: float) -> Price:
    """Devices x hours x USD per hour and device."""
    trainers, samplers = setup.ranks, setup.sampler_devices

    def sum_of(for_trainers: float | None, for_samplers: float | None) -> float | None:
        if for_trainers is None or (samplers and for_samplers is None):
            return None
        return hours * (trainers * for_trainers + samplers * (for_samplers or 0.0))

    return Price(
        on_demand=sum_of(device.on_demand, device.on_demand),
        spot_samplers=sum_of(device.on_demand, device.spot) if samplers else None,
        spot=sum_of(device.spot, device.spot),
    )


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """One method of post-training on the same model, tokens and devices."""

    name: Trainer
    setup: Setup
    """With as many devices as it needs."""
    fits: bool
    step_seconds: float
    hours: float
    per_hour: Price
    per_run: Price


def compare_trainers(
    shape: ModelShape, work: Work, setup: Setup, device: Device, *, network_gbit: float
) -> list[TrainerCost]:
    """GRPO, PPO and DPO for as many steps of as many tokens, each on as few devices as hold it (ZeRO-3 over several).

    A supervised stage stands alone.

        GRPO  as planned
        PPO   + a critic as large as the policy, trained like it: memory for a second set of weights, gradients and
              moments, twice the training passes, one more forward pass; source: arXiv:2203.02155
        DPO   no sampling; policy and reference, the reference's log-probabilities in a pass of their own;
              source: arXiv:2305.18290

    Equal steps say nothing about equal quality: DPO learns from pairs that somebody else must have sampled.
    """
    found: list[TrainerCost] = []
    names: tuple[Trainer, ...] = ("SFT",) if work.is_supervised else TRAINERS
    for name in names:
        own_work, own_setup = _variant(name, work, setup)
        own_setup = fewest_ranks(name, shape, own_work, own_setup, device)
        seconds = step_time(shape, own_work, own_setup, device, network_gbit=network_gbit)
        total = seconds.train * (2 if name == "PPO" else 1)
        total += 0.0 if name == "DPO" else seconds.sample + seconds.sync
        hours = total * work.steps / 3600
        found.append(
            TrainerCost(
                name=name,
                setup=own_setup,
                fits=fits(method_memory(name, shape, own_work, own_setup), device),
                step_seconds=total,
                hours=hours,
                per_hour=price(own_setup, device, hours=1.0),
                per_run=price(own_setup, device, hours=hours),
            )
        )
    return found


def _variant(name: Trainer, work: Work, setup: Setup) -> tuple[Work, Setup]:
    if name == "DPO":
        alone = replace(setup, placement="colocated", sampler_devices=0, has_reference=True)
        return replace(work, extra_passes=1), alone
    if name == "PPO":
        return replace(work, extra_passes=work.extra_passes + 1), setup
    return work, setup


SAMPLING = ("KV cache", "sampling buffers", "matrices for sampling", "copy to sample from")
"""Parts of memory that only sampling needs."""


def method_memory(name: Trainer, shape: ModelShape, work: Work, setup: Setup) -> Memory:
    """Peak memory of a method: that of GRPO, with a critic's weights, gradients and moments, or without a cache."""
    memory = plan_memory(shape, work, setup)
    trainer = memory.trainer
    parts = trainer.components
    if name == "DPO":
        parts = tuple(part for part in parts if part.name not in SAMPLING)
    if name == "PPO":
        states = ("weights, float32 (master)", "half-width weights", "frozen weights", "gradients", "optimizer moments")
        critic = [replace(part, name=f"critic: {part.name}") for part in parts if part.name in states]
        parts = (*parts, *critic)
    return replace(memory, needs=(replace(trainer, components=parts), *memory.needs[1:]))


def fits(memory: Memory, device: Device) -> bool:
    """Every kind of device has room, with the margin that a plan leaves."""
    room = device.memory_bytes * (1 - GPU_MARGIN)
    return all(need.peak_bytes <= room for need in memory.needs)


RANKS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of devices that a plan tries, in this order."""


def fewest_ranks(name: Trainer, shape: ModelShape, work: Work, setup: Setup, device: Device) -> Setup:
    """The setup with as few devices as hold it; 64 if none do.

    Training devices cut the state by ZeRO-3, devices that sample cut the weights and the rows.
    """
    setup = replace(setup, sampler_devices=_fewest_samplers(shape, work, setup, device))
    last = setup
    for ranks in RANKS:
        if ranks < setup.ranks or (ranks > 1 and not device.is_gpu):
            continue
        last = replace(setup, ranks=ranks, shard=setup.shard if ranks == setup.ranks else "zero3")
        if fits(method_memory(name, shape, work, last), device):
            return last
    return last


def _fewest_samplers(shape: ModelShape, work: Work, setup: Setup, device: Device) -> int:
    """Devices that sample: those asked for, or as many as hold the weights and the cache; 0 when colocated."""
    if not setup.sampler_devices:
        return 0
    for count in (setup.sampler_devices, *RANKS):
        [sampler] = plan_memory(shape, work, replace(setup, sampler_devices=count)).needs[1:]
        if count >= setup.sampler_devices and sampler.peak_bytes <= device.memory_bytes * (1 - GPU_MARGIN):
            return count
    return max(setup.sampler_devices, RANKS[-1])


@dataclass(frozen=True, slots=True)
class FailureCost:
    """The cost of one preemption of the trainer, at most; half of it on average."""

    steps: int
    """Done again: those since the last checkpoint."""
    completions: int
    tokens: float
    """Sampled again: steps x prompts x group size x mean length."""
    seconds: float
    """Seconds of those steps, without the time until another machine is there and has loaded the model."""
    usd: Price
    sampler_tokens: float
    """Sampled again when one of the devices that only sample is taken away instead: its share of a step."""


def cost_of_failure(work: Work, time: StepTime, setup: Setup, device: Device) -> FailureCost:
    """The most that a preemption costs when checkpoints are written every ``work.save_every_steps`` steps.

        tokens = steps x P x G x mean length      seconds = steps x seconds of a step

    Without checkpoints (0) it is the whole run. A sampler that is lost costs completions of the current step only.
    """
    steps = min(work.save_every_steps or work.steps, work.steps)
    seconds = steps * time.total
    return FailureCost(
        steps=steps,
        completions=steps * work.completions,
        tokens=steps * time.sampled_tokens,
        seconds=seconds,
        usd=price(setup, device, hours=seconds / 3600),
        sampler_tokens=time.sampled_tokens / max(setup.sampler_devices, 1),
    )


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes in the run's folder at the end, without reports and logs."""

    checkpoint_bytes: float
    """Size of a checkpoint: trained weights in float32 and the optimizer's moments."""
    checkpoints: int
    """Left at the end: the newest, and those kept for good."""
    record_bytes: float
    """Size of the recorded tokens and log-probabilities of all steps, where ``run.record`` is ``all``; else 0."""


def disk_use(shape: ModelShape, work: Work, setup: Setup) -> DiskUse:
    """Bytes on the disk; of the record  steps x completions x mean length x RECORD_BYTES."""
    saved = 1 if not work.save_every_steps else math.ceil(work.steps / work.save_every_steps)
    kept = work.steps // work.keep_every_steps if work.keep_every_steps else 0
    tokens = work.steps * work.completions * work.mean_tokens if work.records_all else 0
    return DiskUse(
        checkpoint_bytes=4.0 * trained_parameters(shape, setup) + moment_bytes(shape, setup),
        checkpoints=min(saved, work.keep_checkpoints + kept) if work.keep_checkpoints else saved,
        record_bytes=RECORD_BYTES * tokens,
    )
