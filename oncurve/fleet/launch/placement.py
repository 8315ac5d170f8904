"""The placement of sampling on a machine: in the process that trains, on GPUs of its own, or beside it on its GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from oncurve.recipe.schema import Config

if TYPE_CHECKING:
    from oncurve.plan.shared_gpu import Beside

HALF_WIDTH_BYTES = 2
WEIGHT_SHARE = 0.5
"""Share of a GPU's memory that a server's weights may fill; the rest is for keys and values."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as one process sees it."""

    kind: Literal["cpu", "mps", "cuda"]
    memory_bytes: tuple[float, ...] = ()
    """Memory of each GPU."""
    has_vllm: bool = False
    """An environment with vLLM is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """The parts of a recipe that decide the placement."""

    trainers: int = 1
    """Processes that train on this machine, each on a GPU."""
    weights: float = 0.0
    """Number of the model's weights."""
    heads: int = 1
    """Attention heads, over which servers cut a model."""
    is_quantized: bool = False
    """The base is in few bits, of which servers can be given no whole weights."""
    shares_gpu: bool = False
    """A server on the trainer's own GPU is asked for."""
    beside: Beside | None = None
    """The memory that is left on that GPU; None where it was not planned."""
    resets: tuple[str, ...] = ()
    """Overrides after which nothing in the recipe asks for servers."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The layout, and the sentence that says why."""

    sampler: Literal["engine", "servers"]
    servers: int = 0
    tensor_parallel: int = 1
    """GPUs of one server."""
    why: str = ""
    sleeps: bool = False
    """The server is on the GPU that trains, and gives its memory back meanwhile."""
    resets: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """A sentence: what was chosen, why, and how to have it otherwise."""
        if self.sampler == "engine":
            other = " ".join(("rollouts.type=servers", "rollouts.own_servers=1", *self.resets))
            return f"placement: {self.why}: sampling in this process (rollouts.type=engine). For a server: `{other}`"
        sleep = ", sleep true" if self.sleeps else ""
        other = " ".join(("rollouts.type=engine", *self.resets))
        return (
            f"placement: {self.why} (rollouts.type servers, vllm_servers {self.servers}, tensor_parallel "
            f"{self.tensor_parallel}{sleep}). For sampling in this process: `{other}`; for other numbers, "
            f"rollouts.type=servers and these keys"
        )


def choose_placement(machine: Machine, wants: Wants) -> Placement:
    """The layout of a recipe on a machine, as ``_choose`` finds it."""
    return replace(_choose(machine, wants), resets=wants.resets)


def _choose(machine: Machine, wants: Wants) -> Placement:
    """Servers on the GPUs that no process trains on, where there are some; where there is one GPU with room, a server
    that sleeps while the policy trains; this process otherwise.

    A server takes the fewest GPUs, a power of two that divides the heads, over which its half-width weights fill at
    most half of the memory.
    """
    gpus = len(machine.memory_bytes)
    if machine.kind != "cuda" or not gpus:
        return Placement("engine", why="no CUDA GPU found" + ", only Apple's" * (machine.kind == "mps"))
    if wants.shares_gpu or (gpus == 1 and machine.has_vllm):
        return _on_single_gpu(machine, wants)
    spare = gpus - wants.trainers
    memory = min(machine.memory_bytes)
    sizes = [2**power for power in range(spare.bit_length()) if 2**power <= spare and wants.heads % 2**power == 0]
    fitting = [size for size in sizes if wants.weights * HALF_WIDTH_BYTES <= size * WEIGHT_SHARE * memory]
    if gpus == 1:
        why = "there is one GPU, on which training and sampling take turns"
    elif spare < 1:
        why = f"there are {gpus} GPUs, all of which train"
    elif wants.is_quantized:
        why = f"there are {gpus} GPUs, but a base in few bits (policy.quantization) cannot be handed to servers"
    elif not machine.has_vllm:
        why = f"there are {gpus} GPUs, but no environment with vLLM is named (rollouts.vllm_python)"
    elif not fitting:
        why = f"there are {gpus} GPUs, but the weights do not fit on the {spare} that no process trains on"
    else:
        return _on_servers(gpus, spare, min(fitting), wants.trainers)
    return Placement("engine", why=why)


def _on_single_gpu(machine: Machine, wants: Wants) -> Placement:
    """One server on the GPU that trains, if one GPU trains and the policy leaves room on it."""
    if wants.trainers > 1:
        why = f"{wants.trainers} GPUs train, and a server cannot be on all of them"
    elif wants.is_quantized:
        why = "a base in few bits (policy.quantization) cannot be handed to a server"
    elif not machine.has_vllm:
        why = "no environment with vLLM is named (rollouts.vllm_python)"
    elif wants.beside is None:
        why = "nobody knows how much memory a server beside this model needs"
    elif not wants.beside.fits:
        why = f"there is no room for it: {wants.beside.numbers}"
    elif wants.shares_gpu:
        return Placement("servers", 1, 1, why="one vLLM server is on the GPU that trains, as asked")
    else:
        why = (
            f"there is one GPU, an environment with vLLM is named, and there is room: {wants.beside.numbers}; a vLLM "
            f"server samples on it, and sleeps while the policy trains"
        )
        return Placement("servers", 1, 1, why=why, sleeps=True)
    if wants.shares_gpu:
        return Placement("engine", why=f"a server on the GPU that trains was asked for, but {why}")
    return Placement("engine", why=f"there is one GPU, on which training and sampling take turns ({why})")


def _on_servers(gpus: int, spare: int, gpus_per_server: int, trainers: int) -> Placement:
    servers = spare // gpus_per_server
    size = "a GPU" if gpus_per_server == 1 else f"{gpus_per_server} GPUs"
    count = (
        f"{servers} vLLM server{'s' * (servers > 1)} of {size} {'each ' * (servers > 1)}sample{'s' * (servers == 1)}"
    )
    left = spare - servers * gpus_per_server
    idle = f", and {left} stay{'s' * (left == 1)} idle" if left else ""
    trains = "the policy trains on the first" if trainers == 1 else f"the policy trains on the first {trainers}"
    return Placement(
        "servers", servers, gpus_per_server, why=f"there are {gpus} GPUs: {trains}, {count} on the others{idle}"
    )


def serve_settings(config: Config) -> list[str]:
    """The key=value pairs of a recipe that change what a model samples, or whether it can be loaded."""
    policy = config.policy
    chosen = {
        "compute_type": policy.compute_type,
        "device": policy.device.split(":")[0],  # the number of a GPU is another one elsewhere
        "revision": policy.revision,
        "trust_remote_code": "true" if policy.trust_remote_code else None,
    }
    return [f"policy.{key}={value}" for key, value in chosen.items() if value not in (None, "auto")]
