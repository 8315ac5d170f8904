"""Which rollout servers does a recipe mean, and how far may their completions be behind?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from oncurve.config.schema import Config

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
    place = locate(config.model)
    wide = config.policy.compute_type == "float32" or (config.policy.compute_type == "auto" and on_cpu)
    return VllmServers(
        locate(base_of(place)[0]) if is_adapter(place) else place,
        chosen.vllm_servers,
        python=chosen.vllm_python,
        dtype="float32" if wide else "bfloat16",
        on_cpu=on_cpu,
        logs=Path(config.run.folder) / "vllm_logs",
        options=chosen.vllm_options,
    )
