"""The rollout servers of a recipe: which, on which GPUs, and how weights reach them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from oncurve.errors import CheckpointError, ConfigError
from oncurve.recipe.schema import Config

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from oncurve.launch.placement import Machine, Placement
    from oncurve.plan.shape import ModelShape
    from oncurve.plan.shared_gpu import Beside
    from oncurve.rollouts.servers.children import ChildServers
    from oncurve.rollouts.servers.local_vllm import VllmServers
    from oncurve.rollouts.servers.server_sampler import ServerSampler
    from oncurve.rollouts.servers.transfer.nccl_group import GroupPush


def settle(config: Config) -> tuple[Config, str | None]:
    """The recipe with ``auto`` in ``rollouts.type`` and ``rollouts.transfer`` replaced by what suits this machine.

    With it the sentences that say so; None where there was nothing to choose.
    """
    said: list[str] = []
    if config.rollouts.type == "auto":
        config, why = _settle_type(config)
        said.append(why)
    if config.rollouts.type == "servers" and config.rollouts.transfer == "auto":
        config, why = _settle_transfer(config)
        said += [why] if why else []
    return config, "\n".join(said) or None


def _settle_type(config: Config) -> tuple[Config, str]:
    found = place(config, look_at_machine(config))
    said = found.sentence
    changes: dict[str, object] = {"type": found.sampler, "vllm_servers": found.servers}
    changes["tensor_parallel"] = found.tensor_parallel
    if found.sleeps:
        changes["sleep"] = True
    if found.sampler == "engine" and config.rollouts.without_servers():
        said += f"; {' and '.join(_names(config.rollouts.without_servers()))}, which are for servers, do nothing here"
        changes |= {"transfer": "auto", "sleep": False}  # what is recorded is loaded again by ``resume``
    return config.model_copy(update={"rollouts": config.rollouts.model_copy(update=changes)}), said


def _names(settings: Sequence[str]) -> list[str]:
    return [setting.partition("=")[0] for setting in settings]


def _settle_transfer(config: Config) -> tuple[Config, str | None]:
    """nccl for vLLM servers that the run starts on GPUs of their own, if this process can; files otherwise."""
    import torch

    from oncurve.rollouts.servers.local_vllm import find_python  # lazy
    from oncurve.rollouts.servers.vllm_version import why_not_alike  # lazy

    chosen, why = config.rollouts, None
    way = "fetch"
    if chosen.deltas is not None:
        return config.model_copy(update={"rollouts": chosen.model_copy(update={"transfer": way})}), None
    on_gpus = torch.cuda.is_available() and config.policy.device != "cpu" and torch.cuda.device_count() > 1
    if chosen.vllm_servers and on_gpus and not chosen.sleep:
        if config.policy.lora is not None:
            reason: str | None = "an adapter is trained, which is small"
        else:
            reason = why_not_alike(find_python(chosen.vllm_python))
        way = "fetch" if reason else "nccl"
        why = f"weights go to the servers as files (rollouts.transfer fetch): {reason}"
        if reason is None:
            why = "weights go from GPU to GPU (rollouts.transfer nccl). For files: `rollouts.transfer=fetch`"
    return config.model_copy(update={"rollouts": chosen.model_copy(update={"transfer": way})}), why


def look_at_machine(config: Config) -> Machine:
    """The GPUs that this process sees, and whether vLLM's environment is named."""
    import torch

    from oncurve.launch.placement import Machine  # lazy
    from oncurve.rollouts.servers.local_vllm import PYTHON_VARIABLE  # lazy

    has_vllm = bool(config.rollouts.vllm_python or os.environ.get(PYTHON_VARIABLE))
    if torch.cuda.is_available() and config.policy.device.startswith(("auto", "cuda")):
        sizes = [torch.cuda.get_device_properties(place).total_memory for place in range(torch.cuda.device_count())]
        return Machine("cuda", tuple(map(float, sizes)), has_vllm)
    return Machine("mps" if torch.backends.mps.is_available() else "cpu", (), has_vllm)


def place(config: Config, machine: Machine) -> Placement:
    """The layout of a recipe on a machine: a function of both and of how many processes train here."""
    from oncurve.launch.placement import Wants, choose_placement  # lazy

    gpus, resets = len(machine.memory_bytes), tuple(config.rollouts.without_servers())
    if not gpus or (gpus == 1 and not machine.has_vllm):
        return choose_placement(machine, Wants(shares_gpu=config.rollouts.sleep, resets=resets))
    from oncurve.plan.find_shape import find_shape  # lazy

    is_asked = gpus > 1 or config.rollouts.sleep
    try:
        shape = find_shape(config.model, revision=config.policy.revision)
    except (ConfigError, CheckpointError):
        if is_asked:
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
    """What is left for a server on the one GPU that trains."""
    from oncurve.plan.from_recipe import PlanRequest, make_setup, make_work  # lazy
    from oncurve.plan.shared_gpu import share_gpu  # lazy

    return share_gpu(shape, make_work(config, PlanRequest()), make_setup(config, PlanRequest()), total=total)


def trainers_here(gpus: int) -> int:
    """Processes of the run that train on this machine; all GPUs are taken where a launcher does not say how many."""
    from oncurve.policy.environment import read_place  # lazy

    count = read_place().count
    return 1 if count == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", gpus))


def make_server_sampler(config: Config) -> ServerSampler:
    """A sampler over the servers of a recipe; those that it asks for are started here and end with it."""
    from oncurve.rollouts.servers.protocol import TOKEN_VARIABLE, require_aiohttp  # lazy

    require_aiohttp()
    import torch

    from oncurve.model.decode_memory import USUAL_ROWS  # lazy
    from oncurve.rollouts.servers.server_sampler import ServerSampler  # lazy
    from oncurve.rollouts.servers.store import memory_folder  # lazy
    from oncurve.wiring.sampling_params import make_sampling  # lazy

    chosen = config.rollouts
    push = make_push(config)
    local: ChildServers | None = None
    if chosen.vllm_servers:
        local = start_vllm(config)
    elif chosen.own_servers:
        local = start_own(config)
    return ServerSampler(
        make_sampling(config),
        urls=chosen.servers,
        registry=None if chosen.registry is None else Path(chosen.registry),
        weights_folder=Path(chosen.weights_folder or config.run.folder),
        memory_folder=memory_folder() if starts_all(config) and chosen.weights_folder is None else None,
        matrix_type=vllm_matrix_type(config, on_cpu=not torch.cuda.is_available()),
        weights_address=chosen.weights_address,
        token=os.environ.get(TOKEN_VARIABLE),
        max_rows=USUAL_ROWS if chosen.max_rows == "auto" else chosen.max_rows,
        deadlines=chosen.deadlines,
        local=local,
        push=push,
        trains_meanwhile=push is not None and chosen.staleness > 0,
        sleep=chosen.sleep,
        deltas=chosen.deltas,
    )


def make_push(config: Config) -> GroupPush | None:
    """The way of weights from this GPU to servers without files; None where they are fetched.

    Raises ConfigError where there is no GPU, or no vLLM in this environment.
    """
    import torch

    from oncurve.rollouts.servers.transfer.endpoints import check_device  # lazy
    from oncurve.rollouts.servers.transfer.nccl_group import GroupPush  # lazy

    chosen = config.rollouts
    if chosen.transfer != "nccl":
        return None
    check_device(has_gpu=torch.cuda.is_available() and config.policy.device != "cpu")
    seconds = chosen.deadlines.push_seconds
    address = chosen.weights_address.rpartition(":")[0] if chosen.weights_address else None
    return GroupPush(address=address, push_seconds=seconds)


def starts_all(config: Config) -> bool:
    """All servers of the run are on this machine, and the run starts them."""
    chosen = config.rollouts
    return bool(chosen.own_servers or chosen.vllm_servers) and not chosen.servers and chosen.registry is None


def vllm_matrix_type(config: Config, *, on_cpu: bool) -> torch.dtype | None:
    """Type in which vLLM servers of this recipe keep matrices; None for float32, as the policy has them."""
    import torch

    return None if is_float32(config, on_cpu=on_cpu) else torch.bfloat16


def is_float32(config: Config, *, on_cpu: bool) -> bool:
    """Servers compute in float32, as the policy does."""
    chosen = config.policy.compute_type
    return chosen == "float32" or (chosen == "auto" and on_cpu)


def base_model(config: Config) -> str:
    """Folder or name of the model that servers are started with: the base, where an adapter is trained further."""
    from oncurve.observe.run_model import locate  # lazy
    from oncurve.policy.lora import base_of, is_adapter  # lazy

    found = locate(config.model)
    return locate(base_of(found)[0]) if is_adapter(found) else found


def start_vllm(config: Config) -> VllmServers:
    """As many vLLM servers on this machine as the recipe asks for, with the model that it trains."""
    import torch

    from oncurve.rollouts.servers.children import gpu_shares, own_gpu, visible_gpus  # lazy
    from oncurve.rollouts.servers.local_vllm import VllmServers, says_share  # lazy
    from oncurve.rollouts.servers.transfer.endpoints import give_back_cache  # lazy

    chosen, on_cpu = config.rollouts, not torch.cuda.is_available()
    visible = [] if on_cpu else visible_gpus(torch.cuda.device_count())
    trainers = 0 if config.policy.device == "cpu" else trainers_here(len(visible))
    devices: list[str] = []
    share: float | None = None
    if visible and config.rollouts.sleep:
        devices = own_gpu(visible, trainers=trainers)
        share = None if says_share(chosen.vllm_options) else share_beside(config)
        give_back_cache()
    elif visible:
        devices = gpu_shares(
            visible,
            trainers=trainers,
            servers=chosen.vllm_servers,
            each=chosen.tensor_parallel,
            instead=" ".join(["rollouts.type=engine", *chosen.without_servers()]),
        )
    return VllmServers(
        base_model(config),
        chosen.vllm_servers,
        python=chosen.vllm_python,
        dtype="float32" if is_float32(config, on_cpu=on_cpu) else "bfloat16",
        on_cpu=on_cpu,
        logs=Path(config.run.folder) / "server_logs",
        options=chosen.vllm_options,
        devices=devices,
        sleeps=chosen.sleep,
        share=share,
        tensor_parallel=chosen.tensor_parallel,
    )


def share_beside(config: Config) -> float:
    """The share of the trainer's GPU that a server on it may take.

    Raises ConfigError where it is too small for one.
    """
    import torch

    from oncurve.plan.find_shape import find_shape  # lazy

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    shape = find_shape(config.model, revision=config.policy.revision)
    found = reckon_beside(config, shape, total=float(total))
    if found.fits:
        return found.share
    instead = " ".join(["rollouts.type=engine", *config.rollouts.without_servers()])
    raise ConfigError(
        f"a vLLM server does not fit on the GPU that trains: {found.numbers}. Let the process that trains sample, with "
        f"`{instead}`, train an adapter, with `policy.lora={{rank: 16}}`, or say yourself what the server may take: "
        f'`rollouts.vllm_options=[--gpu-memory-utilization, "0.3"]`'
    )


def start_own(config: Config) -> ChildServers:
    """As many ``oncurve serve`` on this machine as the recipe asks for; on GPUs of their own where there are enough."""
    import torch

    from oncurve.launch.placement import serve_settings  # lazy
    from oncurve.rollouts.servers.children import (  # lazy
        ChildServers,
        gpu_shares,
        own_environment,
        serve_command,
        visible_gpus,
    )

    policy, count = config.policy, config.rollouts.own_servers
    visible = visible_gpus(torch.cuda.device_count()) if torch.cuda.is_available() and policy.device != "cpu" else []
    has_room = len(visible) >= trainers_here(len(visible)) + count
    return ChildServers(
        count,
        name="oncurve",
        logs=Path(config.run.folder) / "server_logs",
        command=serve_command(base_model(config), settings=serve_settings(config)),
        environment=own_environment(count),
        devices=gpu_shares(visible, trainers=trainers_here(len(visible)), servers=count, each=1) if has_room else (),
    )
