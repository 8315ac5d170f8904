"""Which rollout servers does a recipe mean, on which GPUs, and how far may their completions be behind?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from oncurve.config.schema import Config

if TYPE_CHECKING:
    from oncurve.launch.placement import Machine, Placement
    from oncurve.rollouts.servers.children import ChildServers
    from oncurve.rollouts.servers.local_vllm import VllmServers
    from oncurve.rollouts.servers.sampler import ServerSampler
    from oncurve.rollouts.servers.transfer.ways import Transfer


def settle(config: Config) -> tuple[Config, str | None]:
    """The recipe with ``rollouts.type`` auto replaced by what suits this machine, and the sentence that says so.

    The same recipe and None where it says itself what samples.
    """
    if config.rollouts.type != "auto":
        return config, None
    found = place(config, look_at_machine(config))
    said = found.sentence
    changes: dict[str, object] = {"type": found.sampler, "vllm_servers": found.servers}
    changes["tensor_parallel"] = found.tensor_parallel
    if found.sampler == "engine" and (config.rollouts.transfer != "fetch" or config.rollouts.sleep):
        said += "; rollouts.transfer and rollouts.sleep, which are for servers, do nothing here"
        changes |= {"transfer": "fetch", "sleep": False}  # what is recorded is loaded again by ``resume``
    return config.model_copy(update={"rollouts": config.rollouts.model_copy(update=changes)}), said


def look_at_machine(config: Config) -> Machine:
    """The GPUs that this process sees, and whether vLLM's environment is named."""
    import torch

    from oncurve.launch.placement import Machine
    from oncurve.rollouts.servers.local_vllm import PYTHON_VARIABLE

    has_vllm = bool(config.rollouts.vllm_python or os.environ.get(PYTHON_VARIABLE))
    if torch.cuda.is_available() and config.policy.device.startswith(("auto", "cuda")):
        sizes = [torch.cuda.get_device_properties(place).total_memory for place in range(torch.cuda.device_count())]
        return Machine("cuda", tuple(map(float, sizes)), has_vllm)
    return Machine("mps" if torch.backends.mps.is_available() else "cpu", (), has_vllm)


def place(config: Config, machine: Machine) -> Placement:
    """The layout of a recipe on a machine: a function of both and of how many processes train here."""
    from oncurve.launch.placement import Wants, choose_placement

    if len(machine.memory_bytes) < 1 + (not shares_gpu(config)):
        return choose_placement(machine, Wants())
    from oncurve.plan.find_shape import find_shape

    shape = find_shape(config.model, revision=config.policy.revision)
    return choose_placement(
        machine,
        Wants(
            trainers=trainers_here(len(machine.memory_bytes)),
            weights=float(shape.num_parameters),
            heads=shape.heads,
            is_quantized=config.policy.quantization is not None,
            shares_gpu=shares_gpu(config),
        ),
    )


def trainers_here(gpus: int) -> int:
    """Processes of the run that train on this machine; all GPUs are taken where a launcher does not say how many."""
    from oncurve.train.launched import read_place

    count = read_place().count
    return 1 if count == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", gpus))


def make_server_sampler(config: Config) -> ServerSampler:
    """A sampler over the servers of a recipe; those that it asks for are started here and end with it."""
    from oncurve.rollouts.servers.contract import TOKEN_VARIABLE, require_aiohttp

    require_aiohttp()
    from oncurve.rollouts.servers.deadlines import Deadlines
    from oncurve.rollouts.servers.sampler import ServerSampler
    from oncurve.wiring.policy import make_sampling

    chosen = config.rollouts
    transfer = make_transfer(config)
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
        weights_address=chosen.weights_address,
        token=os.environ.get(TOKEN_VARIABLE),
        max_rows=chosen.max_rows,
        deadlines=Deadlines(**chosen.deadlines.model_dump()),
        local=local,
        transfer=transfer,
        sleep=chosen.sleep,
    )


def make_transfer(config: Config) -> Transfer | None:
    """The way of weights from this GPU to servers without files; None where they are fetched.

    Raises ConfigError where there is no GPU, or no vLLM in this environment.
    """
    import torch

    from oncurve.rollouts.servers.children import free_ports
    from oncurve.rollouts.servers.transfer.direct import DirectPush
    from oncurve.rollouts.servers.transfer.ends import IpcEnd, NcclEnd, check_device
    from oncurve.rollouts.servers.transfer.group import GroupPush
    from oncurve.rollouts.servers.transfer.ways import Transfer

    chosen = config.rollouts
    if chosen.transfer == "fetch":
        return None
    check_device(chosen.transfer, has_gpu=torch.cuda.is_available() and config.policy.device != "cpu")
    seconds = chosen.deadlines.push_seconds
    if chosen.transfer == "nccl":
        address = chosen.weights_address.rpartition(":")[0] if chosen.weights_address else None
        push = GroupPush(NcclEnd, free_port=lambda: free_ports(1)[0], address=address, push_seconds=seconds)
    else:
        push = DirectPush(IpcEnd(), push_seconds=seconds)
    wide = is_wide(config, on_cpu=False)
    return Transfer(push, None if wide else torch.bfloat16, trains_meanwhile=chosen.staleness > 0)


def is_wide(config: Config, *, on_cpu: bool) -> bool:
    """Servers compute in float32, as the policy does."""
    chosen = config.policy.compute_type
    return chosen == "float32" or (chosen == "auto" and on_cpu)


def shares_gpu(config: Config) -> bool:
    """The one server is on the trainer's own GPU."""
    return config.rollouts.sleep or config.rollouts.transfer == "ipc"


def base_model(config: Config) -> str:
    """Folder or name of the model that servers are started with: the base, where an adapter is trained further."""
    from oncurve.train.adapter import base_of, is_adapter
    from oncurve.train.checkpoint import locate

    found = locate(config.model)
    return locate(base_of(found)[0]) if is_adapter(found) else found


def start_vllm(config: Config) -> VllmServers:
    """As many vLLM servers on this machine as the recipe asks for, with the model that it trains."""
    import torch

    from oncurve.rollouts.servers.children import gpu_shares, own_gpu, visible_gpus
    from oncurve.rollouts.servers.local_vllm import VllmServers

    chosen, on_cpu = config.rollouts, not torch.cuda.is_available()
    visible = [] if on_cpu else visible_gpus(torch.cuda.device_count())
    trainers = 0 if config.policy.device == "cpu" else trainers_here(len(visible))
    devices: list[str] = []
    if visible and shares_gpu(config):
        devices = own_gpu(visible, trainers=trainers)
    elif visible:
        devices = gpu_shares(visible, trainers=trainers, servers=chosen.vllm_servers, each=chosen.tensor_parallel)
    return VllmServers(
        base_model(config),
        chosen.vllm_servers,
        python=chosen.vllm_python,
        dtype="float32" if is_wide(config, on_cpu=on_cpu) else "bfloat16",
        on_cpu=on_cpu,
        logs=Path(config.run.folder) / "server_logs",
        options=chosen.vllm_options,
        devices=devices,
        sleeps=chosen.sleep,
        tensor_parallel=chosen.tensor_parallel,
    )


def start_own(config: Config) -> ChildServers:
    """As many ``oncurve serve`` on this machine as the recipe asks for; on GPUs of their own where there are enough."""
    import torch

    from oncurve.launch.serving import serve_settings
    from oncurve.rollouts.servers.children import ChildServers, gpu_shares, own_environment, serve_command, visible_gpus

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
