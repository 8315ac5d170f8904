"""This process among those that train together, under the names by which scripts ask accelerate for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from oncurve.policy.environment import read_rank_info
from oncurve.trl.overridden import NotHere

if TYPE_CHECKING:
    import torch


class ProcessState:
    """The process as an Accelerator or a PartialState describes it."""

    def __init__(self, device: torch.device) -> None:
        process = read_rank_info()
        self.device = device
        self.deepspeed_plugin = self.fsdp_plugin = None
        """Settings of accelerate, which are not read."""
        self.num_processes, self.process_index, self.local_process_index = (
            process.count,
            process.rank,
            process.local_rank,
        )
        self.is_main_process, self.is_local_main_process = process.rank == 0, process.local_rank == 0

    def wait_for_everyone(self) -> None:
        """Return when all processes are here; at once while they do not train together."""
        import torch.distributed as dist

        if self.num_processes > 1 and dist.is_initialized():
            dist.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The first process does it before the others do."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def print(self, *values: Any, **_: Any) -> None:
        """Print once."""
        if self.is_main_process:
            sys.stdout.write(" ".join(map(str, values)) + "\n")

    @property
    def state(self) -> ProcessState:
        """Accelerate's state of it: the same."""
        return self

    def end_training(self) -> None:
        """Nothing to do: whatever follows a run ends with it."""

    def __getattr__(self, name: str) -> Any:
        """Raises NotHere for what accelerate does and nothing here."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotHere(
            f"{name} is asked of accelerate's Accelerator, which does not train here: there are is_main_process, "
            f"num_processes, wait_for_everyone and the like. Use torch.distributed for the rest"
        )

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """The model: nothing is around it."""
        return model
