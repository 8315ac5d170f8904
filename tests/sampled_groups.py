"""Prompts to sample from, completions that end early, and what tests look at in the groups."""

from __future__ import annotations

from oncurve.core.records import Completion, Group, Prompt
from oncurve.core.sampler import Sampler, SamplingRequest
from oncurve.policy.trained_policy import TrainedPolicy

TEXTS = ("What is 3 + 4?", "Hi", "A longer question, so that the rows of the batch are ragged. Why?", "the an")
ENDS = tuple(range(100, 140))
"""Tokens that also end a completion here, so that completions of a random model end after a few dozen tokens."""


def ending(policy: TrainedPolicy) -> TrainedPolicy:
    """The policy with more tokens that end a completion."""
    settings = policy.model.generation_config
    assert settings is not None
    settings.eos_token_id = [policy.tokenizer.eos_token_id, *ENDS]
    return policy


def sampled(
    sampler: Sampler,
    policy: TrainedPolicy,
    prompts: list[Prompt],
    group_size: int = 4,
    *,
    step: int = 0,
    version: int = 0,
) -> list[Group]:
    sampler.load_weights(policy, version=version)
    return sampler.sample(SamplingRequest(prompts, group_size, step=step))


def completions(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def tokens(groups: list[Group]) -> list[tuple[int, ...]]:
    """Log-probabilities aside: on servers the last digit depends on who else was in the batch."""
    return [completion.token_ids for completion in completions(groups)]
