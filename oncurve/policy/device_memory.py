"""Memory of a device: readings at points of a step; training in smaller parts, or one message, where it runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from oncurve.constants import GIB
from oncurve.core.batch import Batch
from oncurve.core.errors import Shortage, TrainingError, release
from oncurve.run_errors import memory_error_as


def gpu_memory(point: str, *, rank: int | None = None) -> dict[str, float]:
    """GiB that tensors take (allocated) and that this process holds for them (reserved), of every GPU that it sees.

    The keys are ``memory/<point>_gpu<n>_allocated_gib`` and the same with ``reserved``. One of several processes has
    one GPU, the current one, which is counted under the process's ``rank``. Empty on a machine without CUDA.
    """
    if not torch.cuda.is_available():
        return {}
    if rank is None:
        gpus = [(number, number) for number in range(torch.cuda.device_count())]
    else:
        gpus = [(rank, torch.cuda.current_device())]
    sizes: dict[str, float] = {}
    for name, device in gpus:
        sizes[f"memory/{point}_gpu{name}_allocated_gib"] = torch.cuda.memory_allocated(device) / GIB
        sizes[f"memory/{point}_gpu{name}_reserved_gib"] = torch.cuda.memory_reserved(device) / GIB
    return sizes


def together(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The findings of several processes, as one."""
    return {key: value for part in parts for key, value in part.items()}


def start_peak() -> None:
    """From here on the peak is that of a new step."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    """Most that tensors took on this process's GPU since ``start_peak``; None without CUDA."""
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None


log = logging.getLogger(__name__)


class Lockstep(Protocol):
    """A backend, as far as it goes."""

    is_lockstep: bool


class SmallerParts(Protocol):
    """A policy, as far as the size of its parts goes."""

    tokens_per_microbatch: int

    @property
    def backend(self) -> Lockstep:
        """The backend that holds its weights."""
        ...


def check_alone(policy: SmallerParts) -> None:
    """Raises TrainingError where processes take every step of a pass together, so that one cannot begin anew."""
    if policy.backend.is_lockstep:
        raise TrainingError(
            "there is not enough memory for a microbatch, and processes that share the weights cannot go back by "
            "themselves. Lower policy.tokens_per_microbatch, then resume the run and allow the change"
        )


def check_smaller(policy: SmallerParts, longest: int) -> None:
    """Raises TrainingError where a smaller budget would change nothing: a row of ``longest`` tokens did not fit."""
    if policy.tokens_per_microbatch <= longest:
        raise TrainingError(
            f"there is not enough memory for a single completion of {longest} tokens with its prompt. Lower "
            f"rollouts.max_completion_tokens, or set policy.gradient_checkpointing to true"
        )


def in_smaller_parts(policy: SmallerParts, batch: Batch, compute: Callable[[], None]) -> None:
    """Compute something over a batch in microbatches, again in smaller ones where memory runs out.

    ``compute`` must leave nothing behind that another try does not write over.

    Raises TrainingError where nothing smaller is left, or where other processes have begun the same pass.
    """
    while True:
        with Shortage() as shortage:
            return compute()
        release()
        check_alone(policy)
        check_smaller(policy, int(batch.row_lengths.max()))
        policy.tokens_per_microbatch = max(policy.tokens_per_microbatch // 2, 1)
        log.warning(
            "OUT OF MEMORY in a pass without gradients (%s): from now on at most %d tokens in a microbatch. What it "
            "gives is the same; set policy.tokens_per_microbatch to it in the recipe",
            shortage.reason,
            policy.tokens_per_microbatch,
        )


def moving_weights(update: int) -> AbstractContextManager[None]:
    """Around an optimizer's step, of which no one can say how far it came when memory ran out.

    It is not tried again, and the run must not save what it left: weights may have moved already.
    """
    return memory_error_as(
        TrainingError,
        f"there is not enough memory to move the weights in update {update}: AdamW keeps two numbers beside each that "
        f"is trained. Nothing of this step is saved. Begin anew with optimizer.type=adamw_8bit or "
        f"policy.lora.rank=16, or leave more memory free and resume the run",
    )
