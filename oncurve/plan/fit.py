"""Devices that hold a run, how many of them, and what to change where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from oncurve.plan.cost import fewest_ranks, fits
from oncurve.plan.hardware import Device
from oncurve.plan.memory import plan_memory, rows_that_fit
from oncurve.plan.setup import Setup, Work
from oncurve.plan.shape import ModelShape

Plan = tuple[Work, Setup]


SMALL_MICROBATCH = 2048
"""Tokens of a microbatch on a GPU with little memory."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One row of the table of devices, held against a run."""

    device: Device
    fits: bool
    """On the devices that were asked for."""
    peak_bytes: float
    """Peak of the fullest device, as asked for."""
    fits_alone: bool
    """On a single one, without a change to the recipe."""
    devices_needed: int | None
    """Training devices that hold the run with gradient checkpointing, sharded by ZeRO-3 over several; None if 64 do
    not. Without it the number would be misleading: activations are not sharded, so more devices hardly help."""
    devices_needed_lora: int | None
    """The same with a LoRA adapter of rank 16 in place of the whole model, and microbatches of SMALL_MICROBATCH."""


def fit_devices(
    shape: ModelShape, work: Work, setup: Setup, devices: Mapping[str, Device], *, rows_by_memory: bool = False
) -> list[Fit]:
    """Every GPU of the table, largest memory first; with ``rows_by_memory`` each samples as many rows as fit on it."""
    memory = plan_memory(shape, work, setup)
    peak = max(need.peak_bytes for need in memory.needs)
    alone = replace(setup, ranks=1, shard="none")
    thrifty = replace(alone, checkpointing=True)
    adapter = thrifty if setup.method == "lora" else replace(thrifty, method="lora", rank=16)
    adapter = replace(adapter, tokens_per_microbatch=min(setup.tokens_per_microbatch, SMALL_MICROBATCH))

    def needed(kind: Setup, device: Device) -> int | None:
        rows = _rows_on(shape, work, kind, device) if rows_by_memory else work
        chosen = fewest_ranks("GRPO", shape, rows, kind, device)
        return chosen.ranks if fits(plan_memory(shape, rows, chosen), device) else None

    rows: list[Fit] = []
    for device in sorted(devices.values(), key=lambda each: -each.memory_bytes):
        if device.is_gpu:
            rows_alone = _rows_on(shape, work, alone, device) if rows_by_memory else work
            fits_alone = fits(plan_memory(shape, rows_alone, alone), device)
            rows.append(
                Fit(
                    device,
                    fits(memory, device),
                    peak,
                    fits_alone,
                    1 if fits_alone else needed(thrifty, device),
                    needed(adapter, device),
                )
            )
    return rows


def _rows_on(shape: ModelShape, work: Work, setup: Setup, device: Device) -> Work:
    """The work with as many rows sampled at once as the device's memory allows; as it is where none fit."""
    rows = rows_that_fit(shape, work, setup, memory_bytes=device.memory_bytes)
    return replace(work, max_rows=rows) if rows >= work.group_size else work


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """Something to write on the command line, or to do, that needs less memory."""

    overrides: tuple[str, ...]
    """key=value pairs of a recipe; empty for what a recipe cannot say."""
    what: str
    """Its price, in words."""
    apply: Callable[[Work, Setup], Plan]
    is_possible: Callable[[Work, Setup], bool]


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes that were tried together."""

    changes: tuple[MemorySaving, ...]
    peak_bytes: float
    """Peak of the fullest device."""
    fits: bool


def advise(shape: ModelShape, work: Work, setup: Setup, device: Device) -> list[Advice]:
    """Changes that make a run fit, or come nearest to it: the cheapest first.

    Changes are listed in the order of what they cost, and tried alone, then in pairs, then in threes. Those that fit
    stand first, fewer changes before more; where none fit, those that save most.
    """
    possible = [change for change in CHANGES if change.is_possible(work, setup)]
    before = max(need.peak_bytes for need in plan_memory(shape, work, setup).needs)
    tried: list[Advice] = []
    for count in (1, 2, 3):
        for group in combinations(possible, count):
            if _clash(group) or (advice := _try(shape, work, setup, device, group)).peak_bytes >= before:
                continue
            tried.append(advice)
        if any(advice.fits for advice in tried):
            break
    fitting = sorted((advice for advice in tried if advice.fits), key=lambda advice: not _is_usual(advice, device))
    return fitting or sorted(tried, key=lambda advice: advice.peak_bytes)


USUAL = {"policy.gradient_checkpointing=true", "policy.lora={rank: 16}"}
"""The first changes on a small GPU, which leave room to spare there."""


def _is_usual(advice: Advice, device: Device) -> bool:
    changed = {override for change in advice.changes for override in change.overrides}
    return changed == USUAL and advice.peak_bytes <= 0.8 * device.memory_bytes


def _try(shape: ModelShape, work: Work, setup: Setup, device: Device, changes: tuple[MemorySaving, ...]) -> Advice:
    for change in changes:
        work, setup = change.apply(work, setup)
    memory = plan_memory(shape, work, setup)
    return Advice(changes, max(need.peak_bytes for need in memory.needs), fits(memory, device))


def _clash(changes: tuple[MemorySaving, ...]) -> bool:
    """Two of them set the same key."""
    keys = [override.split("=")[0] for change in changes for override in change.overrides]
    return len(keys) != len(set(keys))


def _microbatch(divisor: int) -> MemorySaving:
    def smaller(work: Work, setup: Setup) -> Plan:
        return work, replace(setup, tokens_per_microbatch=max(1, setup.tokens_per_microbatch // divisor))

    return MemorySaving(
        (f"policy.tokens_per_microbatch=/{divisor}",),
        "training takes slightly longer",
        smaller,
        lambda work, setup: True,
    )


def concrete(change: MemorySaving, work: Work, setup: Setup) -> tuple[str, ...]:
    """The overrides of a change with its numbers: ``=/2`` is half of what the recipe says."""
    values = {
        "policy.tokens_per_microbatch": setup.tokens_per_microbatch,
        "rollouts.max_rows": work.max_rows,
    }
    done: list[str] = []
    for override in change.overrides:
        key, _, value = override.partition("=")
        done.append(f"{key}={max(1, values[key] // int(value[1:]))}" if value.startswith("/") else override)
    return tuple(done)


CHANGES: tuple[MemorySaving, ...] = (
    _microbatch(2),
    _microbatch(4),
    MemorySaving(
        ("rollouts.max_rows=/2",),
        "sampling takes longer",
        lambda work, setup: (replace(work, max_rows=max(1, work.max_rows // 2)), setup),
        lambda work, setup: setup.placement == "colocated" and work.rows_at_once > work.group_size,
    ),
    MemorySaving(
        ("rollouts.cuda_graphs=false",),
        "slower sampling",
        lambda work, setup: (work, replace(setup, records_decoding=False)),
        lambda work, setup: setup.placement == "colocated" and setup.records_copies,
    ),
    MemorySaving(
        ("policy.packing=true",),
        "nothing; it is also faster",
        lambda work, setup: (work, replace(setup, packed=True)),
        lambda work, setup: not setup.packed,
    ),
    MemorySaving(
        ("policy.gradient_checkpointing=true",),
        "training takes about a third longer",
        lambda work, setup: (work, replace(setup, checkpointing=True)),
        lambda work, setup: not setup.checkpointing,
    ),
    MemorySaving(
        ("optimizer.type=adamw_8bit",),
        "moments in 8 bits, through bitsandbytes",
        lambda work, setup: (work, replace(setup, optimizer="adamw_8bit")),
        lambda work, setup: setup.optimizer == "adamw" and setup.is_gpu and not setup.offloads_optimizer,
    ),
    MemorySaving(
        ("policy.offload_activations=true",),
        "every pass copies activations to CPU memory and back",
        lambda work, setup: (work, replace(setup, offloads_activations=True)),
        lambda work, setup: setup.is_gpu and not setup.offloads_activations,
    ),
    MemorySaving(
        ("algorithm.kl_coef=0",),
        "changes the algorithm: no KL penalty to a reference model",
        lambda work, setup: (work, replace(setup, has_reference=False)),
        lambda work, setup: setup.has_reference and setup.method == "full",
    ),
    MemorySaving(
        ("policy.lora={rank: 16}",),
        "trains a LoRA adapter instead of all weights; use about ten times the learning rate",
        lambda work, setup: (work, replace(setup, method="lora", rank=16)),
        lambda work, setup: setup.method == "full",
    ),
    MemorySaving(
        ("policy.quantization=nf4",),
        "frozen weights in 4 bits, for sampling as well",
        lambda work, setup: (work, replace(setup, quantization="nf4")),
        lambda work, setup: setup.method == "lora" and setup.quantization is None and setup.is_gpu,
    ),
    MemorySaving(
        ("policy.lora={rank: 16}", "policy.quantization=nf4"),
        "QLoRA: a LoRA adapter over 4-bit weights, for sampling as well",
        lambda work, setup: (work, replace(setup, method="lora", rank=16, quantization="nf4")),
        lambda work, setup: setup.method == "full" and setup.is_gpu,
    ),
)
"""In the order of what they cost: time first, then exactness, then the algorithm."""
