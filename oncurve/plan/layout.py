"""The devices of a run, and what each of them does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oncurve.core.errors import ConfigError
from oncurve.recipe.schema import RolloutSection

Shard = Literal["none", "zero1", "zero2", "zero3"]
Placement = Literal["colocated", "split", "disaggregated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """The devices of a run, as far as no recipe says. By default there is one GPU, which trains and samples."""

    is_gpu: bool = True
    ranks: int = 1
    """Devices that train, each with its own completions."""
    shard: Shard = "none"
    """zero1: the optimizer's state is cut over the ranks. zero2: the gradients too. zero3: the weights too (FSDP)."""
    offloads_optimizer: bool = False
    """Master weights and moments in the CPU's memory, bf16 weights and gradients on the device."""
    placement: Placement = "colocated"
    """colocated: one process samples and trains. split: other devices of the machine sample. disaggregated: other
    machines sample."""
    sampler_devices: int = 0
    """Devices that only sample; 0 when colocated."""


def make_layout(
    *,
    is_gpu: bool = True,
    gpus: int = 1,
    shard: Shard | None = None,
    offloads_optimizer: bool = False,
    placement: Placement = "colocated",
    sampler_gpus: int = 0,
) -> DeviceLayout:
    """The layout that a command line asks for: several devices that train cut the weights, and samplers apart are one
    at least.

    Raises ConfigError for samplers that the placement has no use for.
    """
    is_apart = placement != "colocated"
    if gpus > 1 and not is_apart and sampler_gpus:
        raise ConfigError("--sampler-gpus needs --placement split or disaggregated: colocated devices do both")
    return DeviceLayout(
        is_gpu=is_gpu,
        ranks=gpus,
        shard=shard or ("zero3" if gpus > 1 else "none"),
        offloads_optimizer=offloads_optimizer,
        placement=placement,
        sampler_devices=max(1, sampler_gpus) if is_apart else 0,
    )


def placement_of(rollouts: RolloutSection, *, is_gpu: bool) -> tuple[Placement, int]:
    """The placement of a recipe's sampler, and the devices that its servers take.

    On a CPU one machine does everything. Of servers that come and go one is planned.
    """
    if not is_gpu or rollouts.type != "servers" or rollouts.sleep:
        return "colocated", 0
    started = rollouts.own_servers + rollouts.vllm_servers * rollouts.tensor_parallel
    return ("split", started) if started else ("disaggregated", max(1, len(rollouts.servers)))
