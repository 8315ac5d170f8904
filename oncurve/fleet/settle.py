"""The sampler of a recipe on this machine: which one, how many servers on which GPUs, and how weights reach them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from oncurve.core.errors import ConfigError
from oncurve.fleet.launch.placement import Machine, Placement, Wants, choose_placement
from oncurve.fleet.servers.vllm_version import PYTHON_VARIABLE, why_not_alike
from oncurve.policy.environment import read_rank_info
from oncurve.recipe.schema import Config
from oncurve.run_errors import CheckpointError

if TYPE_CHECKING:
    from oncurve.plan.shape import ModelShape
    from oncurve.plan.shared_gpu import Beside


def settle(config: Config) -> tuple[Config, str | None]:
    """The recipe with ``auto`` in ``rollouts.type`` and ``rollouts.transfer`` replaced by what suits this machine.

    With it the sentences that say so; None where there was nothing to choose.
    """
    notes: list[str] = []
    if config.rollouts.type == "auto":
        config, why = _settle_type(config)
        notes += [why] if why else []
    if config.rollouts.type == "servers" and config.rollouts.transfer == "auto":
        config, why = _settle_transfer(config)
        notes += [why] if why else []
    return config, "\n".join(notes) or None


def _settle_type(config: Config) -> tuple[Config, str | None]:
    """Nothing is said where there is no GPU and no key of servers."""
    machine = look_at_machine(config)
    placement = placement_of(config, machine)
    sentence: str | None = placement.sentence if machine.memory_bytes else None
    changes: dict[str, object] = {"type": placement.sampler, "vllm_servers": placement.servers}
    changes["tensor_parallel"] = placement.tensor_parallel
    if placement.sleeps:
        changes["sleep"] = True
    if placement.sampler == "engine" and config.rollouts.without_servers():
        unused = " and ".join(_names(config.rollouts.without_servers()))
        sentence = f"{placement.sentence}; {unused}, which are for servers, do nothing here"
        changes |= {"transfer": "auto", "sleep": False}  # what is recorded is loaded again by ``resume``
    return config.model_copy(update={"rollouts": config.rollouts.model_copy(update=changes)}), sentence


def _names(settings: Sequence[str]) -> list[str]:
    return [setting.partition("=")[0] for setting in settings]


def _settle_transfer(config: Config) -> tuple[Config, str | None]:
    """nccl for vLLM servers that the run starts on GPUs of their own, if this process can; files otherwise."""
    chosen, why = config.rollouts, None
    transfer = "fetch"
    if chosen.deltas is not None or chosen.in_flight:
        return config.model_copy(update={"rollouts": chosen.model_copy(update={"transfer": transfer})}), None
    on_gpus = torch.cuda.is_available() and config.policy.device != "cpu" and torch.cuda.device_count() > 1
    if chosen.vllm_servers and on_gpus and not chosen.sleep:
        if config.policy.lora is not None:
            reason: str | None = "an adapter is trained, which is small"
        else:
            from oncurve.fleet.servers.local_vllm import find_python  # lazy

            reason = why_not_alike(find_python(chosen.vllm_python))
        transfer = "fetch" if reason else "nccl"
        why = f"weights go to the servers as files (rollouts.transfer fetch): {reason}"
        if reason is None:
            why = "weights go from GPU to GPU (rollouts.transfer nccl). For files: `rollouts.transfer=fetch`"
    return config.model_copy(update={"rollouts": chosen.model_copy(update={"transfer": transfer})}), why


def look_at_machine(config: Config) -> Machine:
    """The GPUs that this process sees, and whether vLLM's environment is named."""
    has_vllm = bool(config.rollouts.vllm_python or os.environ.get(PYTHON_VARIABLE))
    if torch.cuda.is_available() and config.policy.device.startswith(("auto", "cuda")):
        sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
        return Machine("cuda", tuple(map(float, sizes)), has_vllm)
    return Machine("mps" if torch.backends.mps.is_available() else "cpu", (), has_vllm)


def placement_of(config: Config, machine: Machine) -> Placement:
    """The layout of a recipe on a machine: a function of both and of how many processes train here."""
    gpus, resets = len(machine.memory_bytes), tuple(config.rollouts.without_servers())
    if not gpus or (gpus == 1 and not machine.has_vllm):
        return choose_placement(machine, Wants(shares_gpu=config.rollouts.sleep, resets=resets))

    from oncurve.plan.find_shape import find_shape  # lazy

    is_requested = gpus > 1 or config.rollouts.sleep
    try:
        shape = find_shape(config.model, revision=config.policy.revision)
    except (ConfigError, CheckpointError):
        if is_requested:
            raise
        return choose_placement(machine, Wants(resets=resets))
    return choose_placement(
        machine,
        Wants(
            trainers=trainers_here(gpus),
            weights=float(shape.num_parameters),
            heads=shape.heads,
            is_quantized=config.policy.quantization is not None,
            shares_gpu=config.rollouts.sleep,
            beside=reckon_beside(config, shape, total=min(machine.memory_bytes)),
            resets=resets,
        ),
    )


def reckon_beside(config: Config, shape: ModelShape, *, total: float) -> Beside:
    """The memory that is left for a server on the one GPU that trains."""
    from oncurve.plan.layout import DeviceLayout  # lazy
    from oncurve.plan.planned_run import PlannedRun  # lazy
    from oncurve.plan.shared_gpu import share_gpu  # lazy
    from oncurve.plan.token_lengths import guess_lengths  # lazy

    run = PlannedRun(config=config, shape=shape, layout=DeviceLayout(), lengths=guess_lengths(config))
    return share_gpu(run, total=total)


def trainers_here(gpus: int) -> int:
    """Processes of the run that train on this machine; all GPUs are taken where a launcher does not say how many."""
    if read_rank_info().count == 1:
        return 1
    count = os.environ.get("LOCAL_WORLD_SIZE") or tasks_here(os.environ)
    return int(count) if count else gpus


def tasks_here(environment: Mapping[str, str]) -> int | None:
    """Tasks that srun has started on this machine; None where it has not.

    >>> tasks_here({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"})
    4
    """
    listed: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = part.strip().rstrip(")").partition("(x")
        if count.isdecimal():
            listed += [int(count)] * int(times or 1)
    index = int(environment.get("SLURM_NODEID", "0"))
    return listed[index] if index < len(listed) else None
