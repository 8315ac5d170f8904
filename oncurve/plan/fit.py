"""Devices that hold a run, how many of them, and what to change where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

from oncurve.core.errors import ConfigError
from oncurve.plan.cost import fewest_ranks, fits
from oncurve.plan.hardware import Device
from oncurve.plan.memory import copies_reference, plan_memory, rows_that_fit
from oncurve.plan.planned_run import PlannedRun
from oncurve.policy.settings import LoraSettings

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


def fit_devices(run: PlannedRun, devices: Mapping[str, Device]) -> list[Fit]:
    """Every GPU of the table, largest memory first; where ``rollouts.max_rows`` is auto, each samples as many rows as
    fit on it."""
    memory = plan_memory(run)
    peak = max(need.peak_bytes for need in memory.needs)
    alone = run.with_layout({"ranks": 1, "shard": "none"})
    thrifty = alone.with_keys("policy", {"gradient_checkpointing": True})
    small = min(run.policy.tokens_per_microbatch, SMALL_MICROBATCH)
    lora = run.policy.lora or LoraSettings(rank=16)
    adapter = thrifty.with_keys("policy", {"lora": lora, "tokens_per_microbatch": small})

    def needed(kind: PlannedRun, device: Device) -> int | None:
        chosen = fewest_ranks(_with_rows_of(kind, device), device)
        return chosen.layout.ranks if fits(plan_memory(chosen), device) else None

    rows: list[Fit] = []
    for device in sorted(devices.values(), key=lambda candidate: -candidate.memory_bytes):
        if device.is_gpu:
            fits_alone = fits(plan_memory(_with_rows_of(alone, device)), device)
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


def _with_rows_of(run: PlannedRun, device: Device) -> PlannedRun:
    """The run with as many rows sampled at once as the device's memory allows, where the recipe names no number."""
    if run.rollouts.max_rows != "auto":
        return run
    return run.with_room_for(rows_that_fit(run, memory_bytes=device.memory_bytes))


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """Something to write on the command line, or to do, that needs less memory."""

    overrides: tuple[str, ...]
    """key=value pairs of a recipe; ``=/2`` is half of its value."""
    what: str
    """Its price, in words."""
    is_possible: Callable[[PlannedRun], bool]

    def concrete(self, run: PlannedRun) -> tuple[str, ...]:
        """The overrides with their numbers."""
        values = {
            "policy.tokens_per_microbatch": run.policy.tokens_per_microbatch,
            "rollouts.max_rows": run.max_rows,
        }
        done: list[str] = []
        for override in self.overrides:
            key, _, value = override.partition("=")
            done.append(f"{key}={max(1, values[key] // int(value[1:]))}" if value.startswith("/") else override)
            if key == "policy.lora" and run.sends_by_nccl:
                done.append(
                    "rollouts.transfer=fetch"
                )  # NCCL sends whole weights, and a recipe refuses it for an adapter
        return tuple(done)


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes that were tried together."""

    changes: tuple[MemorySaving, ...]
    peak_bytes: float
    """Peak of the fullest device."""
    fits: bool


def advise(run: PlannedRun, device: Device) -> list[Advice]:
    """Changes that make a run fit, or come nearest to it: the cheapest first.

    Changes are listed in the order of what they cost, and tried alone, then in pairs, then in threes. Those that fit
    stand first, fewer changes before more; where none fit, those that save most.
    """
    possible = [change for change in CHANGES if change.is_possible(run)]
    before = max(need.peak_bytes for need in plan_memory(run).needs)
    tried: list[Advice] = []
    for count in (1, 2, 3):
        for group in combinations(possible, count):
            advice = None if _clash(group) else _try(run, device, group)
            if advice is not None and advice.peak_bytes < before:
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


def _try(run: PlannedRun, device: Device, changes: tuple[MemorySaving, ...]) -> Advice | None:
    """The changes with their memory; None where the recipe does not allow them."""
    try:
        changed = run.with_overrides([override for change in changes for override in change.concrete(run)])
    except ConfigError:
        return None
    memory = plan_memory(changed)
    return Advice(changes, max(need.peak_bytes for need in memory.needs), fits(memory, device))


def _clash(changes: tuple[MemorySaving, ...]) -> bool:
    """Two of them set the same key."""
    keys = [override.split("=")[0] for change in changes for override in change.overrides]
    return len(keys) != len(set(keys))


CHANGES: tuple[MemorySaving, ...] = (
    MemorySaving(("policy.tokens_per_microbatch=/2",), "training takes slightly longer", lambda run: True),
    MemorySaving(("policy.tokens_per_microbatch=/4",), "training takes slightly longer", lambda run: True),
    MemorySaving(
        ("rollouts.max_rows=/2",),
        "sampling takes longer",
        lambda run: run.layout.placement == "colocated" and run.groups_at_once > 1,
    ),
    MemorySaving(
        ("rollouts.cuda_graphs=false",),
        "slower sampling",
        lambda run: run.layout.placement == "colocated" and run.records_copies,
    ),
    MemorySaving(("policy.packing=true",), "nothing; it is also faster", lambda run: not run.policy.packing),
    MemorySaving(
        ("policy.gradient_checkpointing=true",),
        "training takes about a third longer",
        lambda run: not run.policy.gradient_checkpointing,
    ),
    MemorySaving(
        ("optimizer.type=adamw_8bit",),
        "moments in 8 bits, through bitsandbytes",
        lambda run: run.config.optimizer.type == "adamw" and run.layout.is_gpu and not run.layout.offloads_optimizer,
    ),
    MemorySaving(
        ("policy.offload_activations=true",),
        "every pass copies activations to CPU memory and back",
        lambda run: run.layout.is_gpu and not run.policy.offload_activations,
    ),
    MemorySaving(
        ("algorithm.kl_coef=0",), "changes the algorithm: no KL penalty to a reference model", copies_reference
    ),
    MemorySaving(
        ("policy.lora={rank: 16}",),
        "trains a LoRA adapter instead of all weights; use about ten times the learning rate",
        lambda run: not run.trains_adapter,
    ),
    MemorySaving(
        ("policy.quantization=nf4",),
        "frozen weights in 4 bits, for sampling as well",
        lambda run: run.trains_adapter and run.policy.quantization is None and run.layout.is_gpu,
    ),
    MemorySaving(
        ("policy.lora={rank: 16}", "policy.quantization=nf4"),
        "QLoRA: a LoRA adapter over 4-bit weights, for sampling as well",
        lambda run: not run.trains_adapter and run.layout.is_gpu,
    ),
)
"""In the order of what they cost: time first, then exactness, then the algorithm."""
