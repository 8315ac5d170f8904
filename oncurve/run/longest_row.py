"""The longest rows that may come, tried behind a run's first update: if memory does not suffice, it says so then.

By then the optimizer has its moments, so that a try takes what a later step takes. It leaves weights, moments, random
numbers and metrics as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import PER_TOKEN, Batch
from oncurve.core.errors import SamplerError, TrainingError
from oncurve.core.sampler import Sampler
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.guards import attempts
from oncurve.sample.engine import InProcessEngine


@runtime_checkable
class AroundSampler(Protocol):
    """A sampler that divides the work of another one, or plays episodes with it."""

    sampler: Sampler


@dataclass(frozen=True)
class LongestRows:
    """A try at the longest microbatch and the longest completions of a run."""

    policy: TrainedPolicy
    algorithm: Algorithm
    sampler: Sampler
    _: KW_ONLY
    prompt_tokens: int
    """Tokens of the longest prompt that is known."""
    completion_tokens: int
    """The limit."""
    prompts_per_step: int
    group_size: int
    completions_per_update: int

    def __call__(self, rows: Batch, notify: Callable[[str], None]) -> None:
        """Compute the gradient of the longest microbatch, and begin to sample the longest completions.

        ``rows`` are those of an update, whose values are stretched. Where memory suffices for fewer rows at a time,
        the rest of the run takes fewer. All processes must call it.

        Raises TrainingError or SamplerError with what to lower, where memory does not suffice for one row.
        """
        try:
            self._train(rows, notify)
            self._sample(rows)
        except (TrainingError, SamplerError) as error:
            raise type(error)(
                f"the longest rows that may come, {self.prompt_tokens:,} tokens of a prompt and "
                f"{self.completion_tokens:,} of a completion, were tried after the first update: {error}"
            ) from None

    def _train(self, rows: Batch, notify: Callable[[str], None]) -> None:
        """The gradient of the first microbatch of the longest rows, which is forgotten."""
        policy = self.policy
        filling = policy.processes.count * (policy.tokens_per_microbatch // self.completion_tokens + 1)
        longest = stretched(
            rows,
            min(self.completions_per_update, filling),
            group_size=self.group_size,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )
        device = policy.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for attempt in attempts(policy, longest, {}, notify):
                with attempt:
                    for microbatch in islice(policy.microbatches(longest), 1):
                        logprobs, entropy = policy.logprobs(microbatch)
                        loss, _ = self.algorithm.loss(logprobs, entropy, microbatch.to(logprobs.device))
                        policy.backend.backward(loss)
        policy.backend.optimizer.zero_grad(set_to_none=True)

    def _sample(self, rows: Batch) -> None:
        """The first tokens of the longest completions, in buffers for all of them. Servers have their own buffers."""
        sampler = self.sampler
        while isinstance(sampler, AroundSampler):
            sampler = sampler.sampler
        if isinstance(sampler, InProcessEngine):
            prompt = _wide(rows.prompt_ids[:1, : int(rows.prompt_lengths[0])], self.prompt_tokens)[0]
            num_prompts = -(-self.prompts_per_step // self.policy.processes.count)
            sampler.try_longest(tuple(prompt.tolist()), num_prompts, self.group_size)


def stretched(rows: Batch, count: int, *, group_size: int, prompt_tokens: int, completion_tokens: int) -> Batch:
    """``count`` rows of this many tokens, from the longest of a batch: its prompt and completion again and again.

    Every token is trained on. Log-probabilities of others are 0, so that no ratio is above 1.
    """
    first = rows.select(rows.completion_lengths.argmax()[None])
    changes = {
        "prompt_ids": _wide(first.prompt_ids, prompt_tokens),
        "prompt_lengths": torch.tensor([prompt_tokens]),
        "completion_ids": _wide(first.completion_ids, completion_tokens),
        "completion_lengths": torch.tensor([completion_tokens]),
    }
    for name in PER_TOKEN:
        if name not in changes and (values := vars(first)[name]) is not None:
            changes[name] = values.new_full((1, completion_tokens), name.endswith("mask"))
    whole = replace(first, **changes, episode_ids=None, row_tokens=None)
    many = whole.select(torch.zeros(count, dtype=torch.long))
    return replace(many, group_ids=torch.arange(count) // group_size).measured()


def _wide(ids: Tensor, width: int) -> Tensor:
    """Tokens again and again, up to ``width`` of them."""
    return ids.repeat(1, -(-width // ids.shape[1]))[:, :width]
