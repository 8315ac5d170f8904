"""vLLM as a rollout server that a run starts on this machine, in an environment of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from oncurve.core.errors import ConfigError
from oncurve.fleet.servers.children import ChildServers, own_environment
from oncurve.fleet.servers.protocol import ADAPTER_MODEL
from oncurve.fleet.servers.vllm_version import PYTHON_VARIABLE, check_version
from oncurve.fleet.settings import ServerKeys

SHARE = "--gpu-memory-utilization"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Room for an adapter's rank, as vLLM offers it."""
KV_CACHE_BYTES = 2**28
"""On a CPU vLLM would reserve a large share of all memory, and a second server another."""


class VllmServers(ChildServers):
    """Some vLLM servers with the same model, each in a group of processes. One that ends is started again."""

    def __init__(
        self,
        model: str,
        section: ServerKeys,
        *,
        dtype: str,
        on_cpu: bool,
        logs: Path,
        devices: Sequence[str] = (),
        share: float | None = None,
        adapter_rank: int | None = None,
    ) -> None:
        """``section`` has their number, their Python, the GPUs of each and vLLM's options. ``devices`` are the GPUs
        that each server sees; ``share`` of a GPU's memory is all that it takes, unless the options say another. With
        an ``adapter_rank`` it applies adapters of up to that rank beside the base, and takes no whole weights.

        Raises ConfigError if there is none, and for a rank that vLLM does not apply.
        """
        self.python = find_python(section.vllm_python)
        count, options = section.vllm_servers, section.vllm_options
        self.model, self.dtype, self.on_cpu, self.adapter_rank = model, dtype, on_cpu, adapter_rank
        own = ("--tensor-parallel-size", str(section.tensor_parallel)) if section.tensor_parallel > 1 else ()
        if section.sleep and not on_cpu:  # on a CPU it takes the calls and gives nothing back
            own = (*own, "--enable-sleep-mode")
        if share is not None and not says_share(options):
            own = (*own, SHARE, f"{share:.2f}")
        if adapter_rank is not None:
            own = (*own, *adapter_options(adapter_rank))
        self.options = (*own, *options)
        self._folder = Path(tempfile.mkdtemp(prefix="oncurve-vllm-"))
        (self._folder / "oncurve").symlink_to(Path(__file__).resolve().parents[2])
        super().__init__(
            count,
            name="vLLM",
            logs=logs,
            command=self.command,
            environment=self._common(count),
            devices=devices,
        )

    def close(self) -> None:
        """End all of them."""
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def command(self, port: int) -> list[str]:
        """The command that starts one server. ``vllm serve`` would not do: the CPU build's name is another."""
        own = ["--host", "127.0.0.1", "--port", str(port), "--model", self.model, "--served-model-name", "policy"]
        own += ["--dtype", self.dtype, "--generation-config", "vllm", "--load-format", "hf", "--enable-scale-out"]
        own += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend":"file"}']
        own += ["--worker-extension-cls", "oncurve.fleet.inside_vllm.plugin.WeightExtension"]
        if self.on_cpu:
            own += ["--enforce-eager", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        return [self.python, "-m", "vllm.entrypoints.openai.api_server", *own, *self.options]

    def _common(self, count: int) -> dict[str, str]:
        """Without what belongs to the trainer's own environment."""
        environment = own_environment(count)
        for name in ("PYTHONHOME", "VIRTUAL_ENV"):
            environment.pop(name, None)
        environment |= {"PYTHONPATH": str(self._folder), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.on_cpu:
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return environment


def adapter_options(rank: int) -> tuple[str, ...]:
    """The options with which vLLM applies adapters of a rank that it gets from us.

    Raises ConfigError for a rank that it does not apply.

    >>> adapter_options(24)
    ('--enable-lora', '--max-lora-rank', '32', '--lora-modules', 'oncurve-adapter=oncurve-adapter')
    """
    room = next((supported for supported in RANKS if supported >= rank), None)
    if room is None:
        raise ConfigError(
            f"policy.lora.rank is {rank}, and vLLM applies adapters of rank {RANKS[-1]} at most. Set a smaller rank, "
            f"or sample with `rollouts.own_servers=1 rollouts.vllm_servers=0`"
        )
    return "--enable-lora", "--max-lora-rank", str(room), "--lora-modules", f"{ADAPTER_MODEL}={ADAPTER_MODEL}"


def says_share(options: Sequence[str]) -> bool:
    """Somebody said how much of a GPU a server takes.

    >>> says_share(["--gpu_memory_utilization=0.4"]), says_share(["--max-model-len", "2048"])
    (True, False)
    """
    return SHARE in {option.partition("=")[0].replace("_", "-") for option in options}


def find_python(python: str | None) -> str:
    """The python with vLLM. Raises ConfigError if none is named, if it is not there, or if its vLLM is too old."""
    named = python or os.environ.get(PYTHON_VARIABLE)
    if not named:
        raise ConfigError(
            f"rollouts.vllm_servers needs an environment with vLLM, apart from this one. Set rollouts.vllm_python or "
            f"{PYTHON_VARIABLE} to its python; docs/servers.md says how to make it"
        )
    path = shutil.which(named)
    if path is None:
        raise ConfigError(f"rollouts.vllm_python: {named!r} is no program. Give the path of a python with vLLM")
    check_version(path)
    return path
