"""The rollout servers of a recipe, and how weights reach them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from oncurve.core.errors import ConfigError
from oncurve.fleet.launch.placement import serve_settings
from oncurve.fleet.servers.children import (
    ChildServers,
    gpu_shares,
    own_environment,
    own_gpu,
    serve_command,
    visible_gpus,
)
from oncurve.fleet.servers.local_vllm import VllmServers, says_share
from oncurve.fleet.servers.protocol import TOKEN_VARIABLE
from oncurve.fleet.settle import reckon_beside, trainers_here
from oncurve.fleet.weights.endpoints import check_device, give_back_cache
from oncurve.fleet.weights.store import memory_folder
from oncurve.observe.run_model import base_of, is_adapter, locate
from oncurve.plan.find_shape import find_shape
from oncurve.recipe.schema import Config
from oncurve.sample.event_loop import require_aiohttp

if TYPE_CHECKING:
    from oncurve.fleet.servers.nccl_group import GroupPush
    from oncurve.fleet.servers.server_sampler import ServerSampler


def make_server_sampler(config: Config) -> ServerSampler:
    """A sampler over the servers of a recipe; those that it asks for are started here and end with it."""
    require_aiohttp()
    from oncurve.fleet.servers.server_sampler import ServerSampler  # lazy

    chosen = config.rollouts
    check_adapter(config)
    push = make_push(config)
    local: ChildServers | None = None
    if chosen.vllm_servers:
        local = start_vllm(config)
    elif chosen.own_servers:
        local = start_own(config)
    return ServerSampler(
        config.sampling(),
        chosen,
        weights_folder=Path(chosen.weights_folder or config.run.folder),
        memory_folder=memory_folder() if starts_all(config) and chosen.weights_folder is None else None,
        matrix_type=vllm_matrix_type(config, on_cpu=not torch.cuda.is_available()),
        token=os.environ.get(TOKEN_VARIABLE),
        local=local,
        push=push,
    )


def check_adapter(config: Config) -> None:
    """Raises ConfigError for an adapter that servers cannot apply beside their base, before any is started."""
    lora = config.policy.lora
    if lora is not None and lora.bias != "none" and config.rollouts.adapter == "apart":
        raise ConfigError(
            f"policy.lora.bias is {lora.bias}, which trains biases of the base, so that servers cannot apply the "
            f"adapter beside it. Set policy.lora.bias=none, sample with rollouts.type=engine, or say "
            f"`rollouts.adapter=merged`: whole weights are sent then, rounded as policy.rounding says"
        )


def make_push(config: Config) -> GroupPush | None:
    """The way of weights from this GPU to servers without files; None where they are fetched.

    Raises ConfigError where there is no GPU, or no vLLM in this environment.
    """
    from oncurve.fleet.servers.nccl_group import GroupPush  # lazy

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
    return None if is_float32(config, on_cpu=on_cpu) else torch.bfloat16


def is_float32(config: Config, *, on_cpu: bool) -> bool:
    """Servers compute in float32, as the policy does."""
    chosen = config.policy.compute_type
    return chosen == "float32" or (chosen == "auto" and on_cpu)


def base_model(config: Config) -> str:
    """Folder or name of the model that servers are started with: the base, where an adapter is trained further."""
    path = locate(config.model)
    return locate(base_of(path)[0]) if is_adapter(path) else path


def start_vllm(config: Config) -> VllmServers:
    """As many vLLM servers on this machine as the recipe asks for, with the model that it trains."""
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
            gpus_per_server=chosen.tensor_parallel,
            instead=" ".join(["rollouts.type=engine", *chosen.without_servers()]),
        )
    return VllmServers(
        base_model(config),
        chosen,
        dtype="float32" if is_float32(config, on_cpu=on_cpu) else "bfloat16",
        on_cpu=on_cpu,
        logs=Path(config.run.folder) / "server_logs",
        devices=devices,
        share=share,
        adapter_rank=config.policy.lora.rank if config.policy.lora and chosen.adapter == "apart" else None,
    )


def share_beside(config: Config) -> float:
    """The share of the trainer's GPU that a server on it may take.

    Raises ConfigError where it is too small for one.
    """
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    shape = find_shape(config.model, revision=config.policy.revision)
    estimate = reckon_beside(config, shape, total=float(total))
    if estimate.fits:
        return estimate.share
    instead = " ".join(["rollouts.type=engine", *config.rollouts.without_servers()])
    raise ConfigError(
        f"a vLLM server does not fit on the GPU that trains: {estimate.numbers}. Let the process that trains sample, "
        f"with `{instead}`, train an adapter, with `policy.lora={{rank: 16}}`, or say yourself what the server may "
        f'take: `rollouts.vllm_options=[--gpu-memory-utilization, "0.3"]`'
    )


def start_own(config: Config) -> ChildServers:
    """As many ``oncurve serve`` on this machine as the recipe asks for; on GPUs of their own where there are enough."""
    policy, count = config.policy, config.rollouts.own_servers
    visible = visible_gpus(torch.cuda.device_count()) if torch.cuda.is_available() and policy.device != "cpu" else []
    has_room = len(visible) >= trainers_here(len(visible)) + count
    return ChildServers(
        count,
        name="oncurve",
        logs=Path(config.run.folder) / "server_logs",
        command=serve_command(base_model(config), settings=serve_settings(config)),
        environment=own_environment(count),
        devices=gpu_shares(visible, trainers=trainers_here(len(visible)), servers=count, gpus_per_server=1)
        if has_room
        else (),
    )
