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


def read_rank_info(environment: Mapping[str, str] | None = None) -> RankInfo:
    """This process's place, by the variables of torchrun and its like or, without those, of srun.

    Raises ConfigError for variables that are missing or say no number.
    """
    variables = os.environ if environment is None else environment
    if "WORLD_SIZE" in variables:
        return _standard(variables)
    # A batch script has SLURM_NTASKS as well; only what srun started has this one.
    return _slurm(variables) if variables.get("SLURM_STEP_NUM_TASKS", "1") != "1" else ALONE


def _standard(variables: Mapping[str, str]) -> RankInfo:
    count = _number(variables, "WORLD_SIZE", least=1)
    if count == 1:
        return ALONE
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {count}, but {', '.join(missing)} is not set. Start with `oncurve train` or torchrun"
        )
    local = _number(variables, "LOCAL_RANK") if variables.get("LOCAL_RANK") else 0
    return _checked(
        RankInfo(_number(variables, "RANK"), count, local, variables["MASTER_ADDR"], _number(variables, "MASTER_PORT"))
    )


def _slurm(variables: Mapping[str, str]) -> RankInfo:
    count = _number(variables, "SLURM_STEP_NUM_TASKS", least=1)
    rank, local = (_number(variables, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    address = variables.get("MASTER_ADDR") or first_host(variables.get("SLURM_STEP_NODELIST", ""))
    if variables.get("MASTER_PORT"):
        port = _number(variables, "MASTER_PORT")
    else:
        step = variables.get("SLURM_STEP_ID", "0")
        job = _number(variables, "SLURM_JOB_ID") + (int(step) if step.isdecimal() else 0)
        port = FIRST_PORT + job % PORTS
    return _checked(RankInfo(rank, count, local, address, port))


def _checked(rank_info: RankInfo) -> RankInfo:
    if rank_info.rank >= rank_info.count:
        raise ConfigError(
            f"the launcher gives this process number {rank_info.rank} of {rank_info.count}, counted from 0 (RANK and "
            f"WORLD_SIZE, or those of Slurm). Start one process for each number, as torchrun does, or unset them"
        )
    return rank_info


def _number(variables: Mapping[str, str], name: str, *, least: int = 0) -> int:
    text = variables.get(name, "")
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ConfigError(f"the environment variable {name} is {text!r}; it must be a number from {least}. Unset it")
    return int(text)


def first_host(nodes: str) -> str:
    """The first name in a list of SLURM's, such as ``gpu[03-06,09],cpu1``.

    >>> first_host("gpu[03-06,09],cpu1")
    'gpu03'

    Raises ConfigError if there is none.
    """
    match = re.match(r"([^\[,\s]+)(?:\[(\w+)[^\]]*\]([^\[,\s]*))?", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no machine. Set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())
