"""Rank and world size from the environment that a launcher leaves.

torchrun, ``accelerate launch``, ``deepspeed`` and ``oncurve train --processes`` set the same five variables; ``srun``
has its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from oncurve.core.errors import ConfigError

FIRST_PORT, PORTS = 20_000, 10_000
"""Range of ports for the processes of a SLURM job: the default follows from the job's number."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One process among those that a launcher started."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """Number of this process on its machine."""
    address: str = ""
    """Machine and port at which they meet."""
    port: int = 0

    def publish(self) -> None:
        """Say it in the variables that torch and everything above it reads."""
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


ALONE = RankInfo()


def read_place(environment: Mapping[str, str] | None = None) -> RankInfo:
    """This process's place, by the variables of torchrun and its like or, without those, of srun.

    Raises ConfigError for variables that are missing or say no number.
    """
    found = os.environ if environment is None else environment
    if "WORLD_SIZE" in found:
        return _standard(found)
    # A batch script has SLURM_NTASKS as well; only what srun started has this one.
    return _slurm(found) if found.get("SLURM_STEP_NUM_TASKS", "1") != "1" else ALONE


def _standard(found: Mapping[str, str]) -> RankInfo:
    count = _number(found, "WORLD_SIZE", least=1)
    if count == 1:
        return ALONE
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not found.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {count}, but {', '.join(missing)} is not set. Start with `oncurve train` or torchrun"
        )
    local = _number(found, "LOCAL_RANK") if found.get("LOCAL_RANK") else 0
    return _checked(RankInfo(_number(found, "RANK"), count, local, found["MASTER_ADDR"], _number(found, "MASTER_PORT")))


def _slurm(found: Mapping[str, str]) -> RankInfo:
    count = _number(found, "SLURM_STEP_NUM_TASKS", least=1)
    rank, local = (_number(found, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    address = found.get("MASTER_ADDR") or first_host(found.get("SLURM_STEP_NODELIST", ""))
    if found.get("MASTER_PORT"):
        port = _number(found, "MASTER_PORT")
    else:
        step = found.get("SLURM_STEP_ID", "0")
        job = _number(found, "SLURM_JOB_ID") + (int(step) if step.isdecimal() else 0)
        port = FIRST_PORT + job % PORTS
    return _checked(RankInfo(rank, count, local, address, port))


def _checked(place: RankInfo) -> RankInfo:
    if place.rank >= place.count:
        raise ConfigError(f"the launcher gives this process number {place.rank} of {place.count}, counted from 0")
    return place


def _number(found: Mapping[str, str], name: str, *, least: int = 0) -> int:
    text = found.get(name, "")
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ConfigError(f"the environment variable {name} is {text!r}; it must be a number from {least}. Unset it")
    return int(text)


def first_host(nodes: str) -> str:
    """The first name in a list of SLURM's, such as ``gpu[03-06,09],cpu1``.

    >>> first_host("gpu[03-06,09],cpu1")
    'gpu03'

    Raises ConfigError if there is none.
    """
    found = re.match(r"([^\[,\s]+)(?:\[(\w+)[^\]]*\]([^\[,\s]*))?", nodes)
    if found is None:
        raise ConfigError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no machine. Set MASTER_ADDR")
    return "".join(part or "" for part in found.groups())
