"""A source of completions that stand in the data: the sampler of a supervised stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from oncurve.core.batch import collate
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.policy import DevicePolicy
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.core.sampler import PolicyView, SamplingRequest
from oncurve.data.demonstrations import Demonstration, taught_text
from oncurve.data.prompts_on_demand import DemonstrationsOnDemand
from oncurve.evaluate.evaluation import LIKELIHOOD
from oncurve.rewards.terms import make_lenient_reward


class DemonstrationSampler:
    """Gives the demonstration of each prompt as its only completion, whatever the weights are."""

    def __init__(self, demonstrations: Sequence[Demonstration] | DemonstrationsOnDemand) -> None:
        self._of: Mapping[int, Demonstration] | DemonstrationsOnDemand = (
            demonstrations
            if isinstance(demonstrations, DemonstrationsOnDemand)
            else {demonstration.prompt.index: demonstration for demonstration in demonstrations}
        )

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Nothing: demonstrations do not depend on the policy."""

    def sample(self, request: SamplingRequest) -> list[Group]:
        """One group of one completion per prompt, in order. Its log-probabilities are 0: nobody sampled it."""
        if request.group_size != 1:
            raise ValueError(f"a prompt has one demonstration, not {request.group_size}")
        return [_demonstrated(prompt, self._of[prompt.index], step=request.step) for prompt in request.prompts]

    def close(self) -> None:
        """Nothing was taken."""


def _demonstrated(prompt: Prompt, demonstration: Demonstration, *, step: int) -> Group:
    """The demonstration as the only completion of its prompt."""
    completion = Completion(
        prompt.prompt_ids,
        demonstration.token_ids,
        demonstration.text,
        (0.0,) * len(demonstration.token_ids),
        "stop",
        step,
        0,
        segments=demonstration.segments,
    )
    return Group(prompt, (completion,))


class DemonstratedReward:
    """A reward of 1 for every completion, so that every demonstration is learned."""

    name = "demonstrated"

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One for each."""
        return [Reward(1.0) for _ in completions]

    def close(self) -> None:
        """Nothing was taken."""


class LikelihoodReward:
    """The mean log-probability of a token of the row's demonstration, minus its loss, where nothing is correct.

    It looks at no completion: what a conversation, an episode or a free text says is seldom said again word for word.
    """

    name = "likelihood"

    def __init__(self, policy: DevicePolicy, demonstrations: Sequence[Demonstration]) -> None:
        self._policy = policy
        self._of = {_key(demonstration.prompt): demonstration for demonstration in demonstrations}

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One for each, under the weights of now. All processes call it with the same prompts."""
        demonstrations = [self._of[_key(prompt)] for prompt in prompts]
        return [Reward(value) for value in mean_logprobs(self._policy, demonstrations)]

    def close(self) -> None:
        """Nothing was taken."""


def accepts(function: RewardFunction, demonstrations: Sequence[Demonstration], *, in_episodes: bool) -> bool:
    """Some demonstration is correct by a reward, which otherwise says nothing of a policy that has learned them.

    Where completions are no episodes, the policy is sampled until it would be answered, so only what stands before is
    graded. All processes call it with the same demonstrations.
    """
    made = [_demonstrated(demonstration.prompt, demonstration, step=0) for demonstration in demonstrations[:100]]
    completions = [group.completions[0] for group in made]
    if not in_episodes:
        completions = [
            replace(completion, segments=(), text="".join(part.text for part in first))
            if (first := [*takewhile(lambda part: part.is_policy, completion.segments)])
            else completion
            for completion in completions
        ]
    rewards = grade(function, [group.prompt for group in made], completions)
    return any(reward.parts.get("correct", 0.0) >= 1.0 for reward in rewards)


def measure_without(
    policy: DevicePolicy, demonstrations: Sequence[Demonstration], *, in_episodes: bool
) -> tuple[RewardFunction, str]:
    """The measure of demonstrations that the default reward does not accept, and what "correct" means by it.

    Correct is the answer wherever it stands, if that is how demonstrations state it; else nothing is, and the measure
    is their likelihood.
    """
    anywhere = make_lenient_reward()
    if accepts(anywhere, demonstrations, in_episodes=in_episodes):
        return anywhere, "the answer is right wherever it stands"
    anywhere.close()
    return LikelihoodReward(policy, demonstrations), LIKELIHOOD


def _key(prompt: Prompt) -> tuple[Sequence[int], str]:
    """The tokens of a prompt and the text of its demonstration."""
    return prompt.prompt_ids, taught_text(prompt.row)


def mean_logprobs(policy: DevicePolicy, demonstrations: Sequence[Demonstration]) -> list[float]:
    """The mean of log p over the learned tokens of each demonstration under the current weights, in nats."""
    groups = [_demonstrated(demonstration.prompt, demonstration, step=0) for demonstration in demonstrations]
    batch = collate(groups, torch.ones(len(groups), 1))
    logprobs = policy.annotate(batch, old=True, entropy=False, reference=False).old_logprobs
    assert logprobs is not None
    mask = batch.mask.to(logprobs.device)
    return (torch.where(mask, logprobs, 0.0).sum(dim=1) / mask.sum(dim=1)).tolist()
