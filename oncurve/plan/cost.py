"""Cost of a run, compared with PPO and DPO."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from oncurve.plan.constants import GPU_MARGIN, RECORD_BYTES
from oncurve.plan.hardware import Device
from oncurve.plan.layout import DeviceLayout
from oncurve.plan.memory import Memory, moment_bytes, plan_memory
from oncurve.plan.planned_run import PlannedRun, Trainer
from oncurve.plan.step_time import StepTime, step_time

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


def price(layout: DeviceLayout, device: Device, *, hours: float) -> Price:
    """Devices x hours x USD per hour and device."""
    trainers, samplers = layout.ranks, layout.sampler_devices

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

    name: str
    """As of ``PlannedRun.trainer``, or SFT."""
    run: PlannedRun
    """With as many devices as it needs."""
    fits: bool
    step_seconds: float
    hours: float
    per_hour: Price
    per_run: Price


def compare_trainers(run: PlannedRun, device: Device, *, network_gbit: float) -> list[TrainerCost]:
    """GRPO, PPO and DPO for as many steps of as many tokens, each on as few devices as hold it (ZeRO-3 over several).

    A supervised stage stands alone.

        GRPO  as planned
        PPO   + a critic as large as the policy, trained like it: memory for a second set of weights, gradients and
              moments, twice the training passes, one more forward pass; source: arXiv:2203.02155
        DPO   no sampling; policy and reference, the reference's log-probabilities in a pass of their own;
              source: arXiv:2305.18290

    Equal steps say nothing about equal quality: DPO learns from pairs that somebody else must have sampled.
    """
    costs: list[TrainerCost] = []
    for trainer in TRAINERS[: 1 if run.is_supervised else None]:
        own = replace(run, trainer=trainer)
        if trainer == "DPO":
            own = own.with_layout({"placement": "colocated", "sampler_devices": 0})
        own = fewest_ranks(own, device)
        seconds = step_time(own, device, network_gbit=network_gbit)
        total = seconds.train * (2 if trainer == "PPO" else 1)
        total += 0.0 if trainer == "DPO" else seconds.sample + seconds.sync
        hours = total * run.steps / 3600
        costs.append(
            TrainerCost(
                name="SFT" if run.is_supervised else trainer,
                run=own,
                fits=fits(method_memory(own), device),
                step_seconds=total,
                hours=hours,
                per_hour=price(own.layout, device, hours=1.0),
                per_run=price(own.layout, device, hours=hours),
            )
        )
    return costs


SAMPLING = ("KV cache", "sampling buffers", "weights repacked to decode", "unsharded weights to decode")
"""Parts of memory that only sampling needs."""


def method_memory(run: PlannedRun) -> Memory:
    """Peak memory of a method: that of GRPO, with a critic's weights, gradients and moments, or without a cache."""
    memory = plan_memory(run)
    trainer = memory.trainer
    parts = trainer.components
    if run.trainer == "DPO":
        parts = tuple(part for part in parts if part.name not in SAMPLING)
    if run.trainer == "PPO":
        states = ("weights, float32 (master)", "bf16 weights", "frozen weights", "gradients", "optimizer moments")
        critic = [replace(part, name=f"critic: {part.name}") for part in parts if part.name in states]
        parts = (*parts, *critic)
    return replace(memory, needs=(replace(trainer, components=parts), *memory.needs[1:]))


def fits(memory: Memory, device: Device) -> bool:
    """Every kind of device has room, with the margin that a plan leaves."""
    room = device.memory_bytes * (1 - GPU_MARGIN)
    return all(need.peak_bytes <= room for need in memory.needs)


RANKS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of devices that a plan tries, in this order."""


def fewest_ranks(run: PlannedRun, device: Device) -> PlannedRun:
    """The run on as few devices as hold it; on 64 if none do.

    Training devices cut the state by ZeRO-3, devices that sample cut the weights and the rows.
    """
    run = run.with_layout({"sampler_devices": _fewest_samplers(run, device)})
    last = run
    for ranks in RANKS:
        if ranks < run.layout.ranks or (ranks > 1 and not device.is_gpu):
            continue
        last = run if ranks == run.layout.ranks else run.with_layout({"ranks": ranks, "shard": "zero3"})
        if fits(method_memory(last), device):
            return last
    return last


def _fewest_samplers(run: PlannedRun, device: Device) -> int:
    """Devices that sample: those asked for, or as many as hold the weights and the cache; 0 when colocated."""
    provided = run.layout.sampler_devices
    if not provided:
        return 0
    for count in (provided, *RANKS):
        [sampler] = plan_memory(run.with_layout({"sampler_devices": count})).needs[1:]
        if count >= provided and sampler.peak_bytes <= device.memory_bytes * (1 - GPU_MARGIN):
            return count
    return max(provided, RANKS[-1])


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


def cost_of_failure(run: PlannedRun, time: StepTime, device: Device) -> FailureCost:
    """The most that a preemption costs when checkpoints are written every ``run.save_every_steps`` steps.

        tokens = steps x P x G x mean length      seconds = steps x seconds of a step

    Without checkpoints (0) it is the whole run. A sampler that is lost costs completions of the current step only.
    """
    steps = min(run.config.run.save_every_steps or run.steps, run.steps)
    seconds = steps * time.total
    return FailureCost(
        steps=steps,
        completions=steps * run.config.completions_per_step,
        tokens=steps * time.sampled_tokens,
        seconds=seconds,
        usd=price(run.layout, device, hours=seconds / 3600),
        sampler_tokens=time.sampled_tokens / max(run.layout.sampler_devices, 1),
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


def disk_use(run: PlannedRun) -> DiskUse:
    """Bytes on the disk; of the record  steps x completions x mean length x RECORD_BYTES."""
    section, steps = run.config.run, run.steps
    saved = 1 if not section.save_every_steps else math.ceil(steps / section.save_every_steps)
    milestones = steps // section.keep_every_steps if section.keep_every_steps else 0
    tokens = steps * run.config.completions_per_step * run.mean_tokens if section.record == "all" else 0
    return DiskUse(
        checkpoint_bytes=4.0 * run.trained_parameters + moment_bytes(run),
        checkpoints=min(saved, section.keep_checkpoints + milestones) if section.keep_checkpoints else saved,
        record_bytes=RECORD_BYTES * tokens,
    )
