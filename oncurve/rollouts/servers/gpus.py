"""Which GPUs of this machine train, and which sample for the run? Each number of the driver belongs to one side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oncurve.errors import ConfigError

SHARED_MEMORY_FRACTION = "0.3"
"""Of a GPU that trains as well; vLLM alone would take nine tenths."""
_PARALLEL = re.compile(r"(?:--tensor-parallel-size|-tp)(?:=(\d+))?")


@dataclass(frozen=True, slots=True)
class Division:
    """Who has which GPU, numbered as this process sees them."""

    trainers: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]
    """Of each vLLM server."""

    @property
    def is_shared(self) -> bool:
        """Some GPU has to do both."""
        return bool(set(self.trainers) & {number for server in self.servers for number in server})

    def exchanged(self, one: int, other: int) -> Division:
        """The same with two GPUs in each other's place."""
        swap = {one: other, other: one}
        servers = tuple(tuple(sorted(swap.get(n, n) for n in server)) for server in self.servers)
        return Division(tuple(sorted(swap.get(n, n) for n in self.trainers)), servers)

    def describe(self) -> str:
        """Where everything is, in a line."""
        parts = [f"training on GPU {_listed(self.trainers)}"]
        parts += [f"vLLM server {place} on GPU {_listed(server)}" for place, server in enumerate(self.servers, 1)]
        return ", ".join(parts)


def divide_gpus(count: int, *, processes: int, servers: int, gpus_per_server: int = 1) -> Division:
    """The first GPUs train, one for each process; those after them sample. Where there are too few, they share.

    >>> divide_gpus(4, processes=2, servers=1, gpus_per_server=2).describe()
    'training on GPU 0 and 1, vLLM server 1 on GPU 2 and 3'

    Raises ConfigError for a server that is to be spread over more GPUs than there are.
    """
    if gpus_per_server > count:
        raise ConfigError(
            f"rollouts.vllm_options asks for a vLLM server over {gpus_per_server} GPUs, and this machine has {count}. "
            f"Lower --tensor-parallel-size"
        )
    trainers = tuple(range(min(processes, count)))
    is_enough = count >= processes + servers * gpus_per_server
    free = [number for number in range(count) if number not in trainers] if is_enough else list(range(count))[::-1]
    wanted = servers * gpus_per_server
    taken = [free[place % len(free)] for place in range(wanted)]
    groups = [taken[place : place + gpus_per_server] for place in range(0, wanted, gpus_per_server)]
    return Division(trainers, tuple(tuple(sorted(group)) for group in groups))


def gpus_per_server(options: Sequence[str]) -> int:
    """The tensor parallel size among options of vLLM; 1 if none is given.

    >>> gpus_per_server(["--max-model-len", "4096", "--tensor-parallel-size", "4"]), gpus_per_server(["-tp=2"])
    (4, 2)
    """
    for place, option in enumerate(options):
        if match := _PARALLEL.fullmatch(option):
            value = match[1] or (options[place + 1] if place + 1 < len(options) else "")
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"rollouts.vllm_options: {option} needs a number of GPUs, not {value!r}")
            return int(value)
    return 1


def shared_options(options: Sequence[str]) -> tuple[str, ...]:
    """Options for a server on a GPU that trains as well: a small part of its memory, unless they say how much."""
    if any(option.startswith(("--gpu-memory-utilization", "--kv-cache-memory-bytes")) for option in options):
        return tuple(options)
    return (*options, "--gpu-memory-utilization", SHARED_MEMORY_FRACTION)


def visible_devices(numbers: Sequence[int], environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a process that is to see some of the GPUs that this one sees.

    >>> visible_devices([1], {"CUDA_VISIBLE_DEVICES": "4,6"})
    '6'
    """
    known = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return ",".join(known[number] if known else str(number) for number in numbers)


def idle_gpus(count: int, *, processes: int, samples_here: bool) -> str | None:
    """A warning where one process trains and samples on one of several GPUs; None otherwise."""
    if count < 2 or processes > 1 or not samples_here:
        return None
    return (
        f"this machine has {count} GPUs, and the run trains and samples on one of them. Use the others with "
        f"--processes {count}, or let vLLM sample there: rollouts.type=servers rollouts.vllm_servers={count - 1}"
    )


def _listed(numbers: Sequence[int]) -> str:
    *first, last = [str(number) for number in numbers]
    return f"{', '.join(first)} and {last}" if first else last
