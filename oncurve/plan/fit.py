"""Devices that hold a run, how many of them, and what to change where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, get_args

from oncurve.core.errors import ConfigError
from oncurve.plan.constants import MEMORY_ERROR
from oncurve.plan.cost import fewest_ranks, fits
from oncurve.plan.hardware import Device
from oncurve.plan.memory import PHASES, Memory, Phase, copies_reference, plan_memory, rows_that_fit
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
        chosen = fewest_ranks(with_rows_of(kind, device), device)
        return chosen.layout.ranks if fits(plan_memory(chosen), device) else None

    rows: list[Fit] = []
    for device in sorted(devices.values(), key=lambda candidate: -candidate.memory_bytes):
        if device.is_gpu:
            fits_alone = fits(plan_memory(with_rows_of(alone, device)), device)
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


def with_rows_of(run: PlannedRun, device: Device) -> PlannedRun:
    """The run with as many rows sampled at once as the device's memory allows, where the recipe names no number."""
    if run.rollouts.max_rows != "auto":
        return run
    return run.with_room_for(rows_that_fit(run, memory_bytes=device.memory_bytes))


Method = Literal["all weights", "LoRA", "QLoRA", "other"]


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """Something to write on the command line, or to do, that needs less memory."""

    overrides: tuple[str, ...]
    """key=value pairs of a recipe; ``=/2`` is half of its value."""
    what: str
    """Its price, in words."""
    is_possible: Callable[[PlannedRun], bool]
    method: Method = "all weights"
    """The first of the methods of training that takes it; "other" for what none of them does."""

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
    overrides: tuple[str, ...]
    run: PlannedRun
    """The run with them."""
    memory: Memory
    fits: bool
    is_tight: bool
    """It would not fit with the plan's error on top."""

    @property
    def peak_bytes(self) -> float:
        """Peak of the fullest device."""
        return max(need.peak_bytes for need in self.memory.needs)

    @property
    def method(self) -> Method:
        """The method of the change that goes furthest."""
        methods: tuple[Method, ...] = tuple(change.method for change in self.changes)
        return max(methods, key=lambda method: get_args(Method).index(method))

    def rank(self) -> tuple[bool, bool, int, int]:
        """The order of what is recommended: the methods of training, with room to spare, by what they train."""
        return self.method == "other", self.is_tight, get_args(Method).index(self.method), len(self.changes)


def advise(run: PlannedRun, device: Device) -> list[Advice]:
    """Changes that make a run fit, or come nearest to it, the recommended first.

    The methods and single changes are tried, then pairs, then threes, until some fit with the plan's error to spare.
    First stands what ``recommended`` gives, then other savings; fewer changes before more, and none that adds to
    one that is enough. Where none fit, those that save most.
    """
    most = max(need.peak_bytes for need in plan_memory(run).needs)
    groups: Iterable[tuple[MemorySaving, ...]] = METHODS.values()
    by_overrides: dict[tuple[str, ...], Advice] = {}
    for count in (1, 2, 3):
        for group in (*groups, *combinations(CHANGES, count)):
            advice = None if _clash(group) else try_changes(run, device, group)
            if advice is not None and advice.peak_bytes < most:
                by_overrides.setdefault(advice.overrides, advice)
        groups = ()
        if any(advice.fits and not advice.is_tight for advice in by_overrides.values()):
            break
    if not any(advice.fits for advice in by_overrides.values()):
        return sorted(by_overrides.values(), key=lambda advice: advice.peak_bytes)
    retained: list[Advice] = []
    for advice in sorted(by_overrides.values(), key=Advice.rank):
        enough = (item for item in retained if item.method == advice.method and item.is_tight <= advice.is_tight)
        if advice.fits and not any(set(item.changes) < set(advice.changes) for item in enough):
            retained.append(advice)
    return retained


def recommended(run: PlannedRun, device: Device) -> Advice | None:
    """The first method that fits with the plan's error to spare, else the first that fits; None: none does."""
    tried = (try_changes(run, device, method) for method in METHODS.values())
    return min((item for item in tried if item is not None and item.fits), key=lambda item: item.is_tight, default=None)


def try_changes(run: PlannedRun, device: Device, changes: tuple[MemorySaving, ...]) -> Advice | None:
    """The possible ones of the changes, with the memory of the run, which samples as many rows at once as then fit.

    None where none is possible, or the recipe does not allow them.
    """
    done: list[MemorySaving] = []
    overrides: list[str] = []
    changed = run
    try:
        for change in changes:
            if change.is_possible(changed):
                done.append(change)
                overrides += change.concrete(changed)
                changed = changed.with_overrides(change.concrete(changed))
    except ConfigError:
        return None
    changed = with_rows_of(changed, device)
    memory = plan_memory(changed)
    if not done:
        return None
    tight = is_tight(changed, memory, device)
    return Advice(tuple(done), tuple(overrides), changed, memory, fits(memory, device), tight)


def is_tight(run: PlannedRun, memory: Memory, device: Device) -> bool:
    """A device has no room for the plan's error on top.

    Where ``rollouts.max_rows`` is auto, sampling takes the room that there is: only the other phases count.
    """
    phases: tuple[Phase, ...] = PHASES
    if run.rollouts.max_rows == "auto" and run.layout.is_gpu:
        phases = ("train", "sync")
    most = max(need.phase_bytes(phase) for need in memory.needs for phase in phases)
    return most * (1 + MEMORY_ERROR) > device.memory_bytes


def _clash(changes: tuple[MemorySaving, ...]) -> bool:
    """Two of them set the same key."""
    keys = [override.split("=")[0] for change in changes for override in change.overrides]
    return len(keys) != len(set(keys))


CHECKPOINTING = MemorySaving(
    ("policy.gradient_checkpointing=true",),
    "training takes about a third longer",
    lambda run: not run.policy.gradient_checkpointing,
)
SMALL = MemorySaving(
    (f"policy.tokens_per_microbatch={SMALL_MICROBATCH}",),
    "training takes slightly longer",
    lambda run: run.policy.tokens_per_microbatch > SMALL_MICROBATCH,
)
LORA = MemorySaving(
    ("policy.lora={rank: 16}",),
    "trains a LoRA adapter instead of all weights; use about ten times the learning rate",
    lambda run: not run.trains_adapter,
    "LoRA",
)
NF4 = MemorySaving(
    ("policy.quantization=nf4",),
    "QLoRA: frozen weights in 4 bits, for sampling as well",
    lambda run: (
        run.trains_adapter and run.policy.quantization is None and run.layout.is_gpu and run.layout.shard != "zero3"
    ),  # FSDP cuts no weights of few bits
    "QLoRA",
)
METHODS: dict[str, tuple[MemorySaving, ...]] = {
    "all weights": (CHECKPOINTING, SMALL),
    "LoRA": (CHECKPOINTING, SMALL, LORA),
    "QLoRA": (CHECKPOINTING, SMALL, LORA, NF4),
}
"""Ways of training with little memory, from the most that is trained to the least memory."""
CHANGES: tuple[MemorySaving, ...] = (
    MemorySaving(("policy.tokens_per_microbatch=/2",), "training takes slightly longer", lambda run: True),
    MemorySaving(("policy.tokens_per_microbatch=/4",), "training takes slightly longer", lambda run: True),
    MemorySaving(
        ("rollouts.max_rows=/2",),
        "sampling takes longer",
        lambda run: run.layout.placement == "colocated" and run.groups_at_once > 1 and run.rollouts.max_rows != "auto",
    ),
    MemorySaving(
        ("rollouts.cuda_graphs=false",),
        "slower sampling",
        lambda run: run.layout.placement == "colocated" and run.records_copies,
    ),
    MemorySaving(("policy.packing=true",), "nothing; it is also faster", lambda run: not run.policy.packing),
    CHECKPOINTING,
    LORA,
    NF4,
    MemorySaving(
        ("optimizer.type=adamw_8bit",),
        "moments in 8 bits, through bitsandbytes",
        lambda run: run.config.optimizer.type == "adamw" and run.layout.is_gpu and not run.layout.offloads_optimizer,
        "other",
    ),
    MemorySaving(
        ("policy.offload_activations=true",),
        "every pass copies activations to CPU memory and back",
        lambda run: run.layout.is_gpu and not run.policy.offload_activations,
        "other",
    ),
    MemorySaving(
        ("algorithm.kl_coef=0",),
        "changes the algorithm: no KL penalty to a reference model",
        copies_reference,
        "other",
    ),
)
"""Changes that are tried together."""
