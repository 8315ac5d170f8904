"""Which rollout servers does a recipe mean, and how far may their completions be behind?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from oncurve.config.schema import Config
from oncurve.rollouts.servers.gpus import Division, divide_gpus, gpus_per_server, idle_gpus, shared_options

if TYPE_CHECKING:
    from oncurve.rollouts.servers.local_vllm import VllmServers
    from oncurve.rollouts.servers.sampler import ServerSampler


def make_server_sampler(config: Config) -> ServerSampler:
    """A sampler over the servers of a recipe; those of vLLM are started here and end with it."""
    from oncurve.rollouts.servers.contract import TOKEN_VARIABLE, require_aiohttp

    require_aiohttp()
    from oncurve.rollouts.servers.deadlines import Deadlines
    from oncurve.rollouts.servers.sampler import ServerSampler
    from oncurve.wiring.policy import make_sampling

    chosen = config.rollouts
    local = start_vllm(config) if chosen.vllm_servers else None
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
    )


def start_vllm(config: Config) -> VllmServers:
    """As many vLLM servers on this machine as the recipe asks for, with the model that it trains."""
    import torch

    from oncurve.rollouts.servers.local_vllm import VllmServers
    from oncurve.train.adapter import base_of, is_adapter
    from oncurve.train.checkpoint import locate

    chosen, on_cpu = config.rollouts, not torch.cuda.is_available()
    place, division, options = locate(config.model), divide_machine(config), chosen.vllm_options
    if division is not None and division.is_shared:
        options = shared_options(options)
    wide = config.policy.compute_type == "float32" or (config.policy.compute_type == "auto" and on_cpu)
    return VllmServers(
        locate(base_of(place)[0]) if is_adapter(place) else place,
        chosen.vllm_servers,
        python=chosen.vllm_python,
        dtype="float32" if wide else "bfloat16",
        on_cpu=on_cpu,
        logs=Path(config.run.folder) / "vllm_logs",
        options=options,
        gpus=() if division is None else division.servers,
    )


def divide_machine(config: Config) -> Division | None:
    """Which GPUs of this machine train and which sample; None without CUDA, or where no vLLM is started here."""
    import torch

    from oncurve.train.launched import read_place

    chosen = config.rollouts
    kind, _, number = config.policy.device.partition(":")
    if not torch.cuda.is_available() or not chosen.vllm_servers or kind not in ("auto", "cuda"):
        return None
    count = torch.cuda.device_count()
    here = min(read_place().count, count)
    division = divide_gpus(
        count, processes=here, servers=chosen.vllm_servers, gpus_per_server=gpus_per_server(chosen.vllm_options)
    )
    # A recipe that names its device keeps it: the two change places.
    return division.exchanged(0, int(number)) if here == 1 and number.isdecimal() else division


def describe_gpus(config: Config) -> list[str]:
    """Where training and sampling are placed on the GPUs of this machine, and what is shared or left idle."""
    import torch

    from oncurve.train.launched import read_place

    if not torch.cuda.is_available():
        return []
    division = divide_machine(config)
    if division is None:
        samples_here = config.rollouts.type != "servers" and config.policy.device in ("auto", "cuda")
        idle = idle_gpus(torch.cuda.device_count(), processes=read_place().count, samples_here=samples_here)
        return [] if idle is None else [f"warning: {idle}"]
    shared = "warning: there are too few GPUs for both, so that training and vLLM share one: "
    shared += "vLLM gets " + " ".join(shared_options(config.rollouts.vllm_options))
    return [division.describe(), *([shared] if division.is_shared else [])]
