"""Training when memory runs out: the same work in smaller parts, or one message that says what to set."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from oncurve.core.batch import Batch
from oncurve.core.errors import Shortage, TrainingError, release
from oncurve.model.out_of_memory import memory_error_as

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
