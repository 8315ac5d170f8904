"""A source of completions that stand in the data: the sampler of a supervised stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.core.sampler import PolicyView, SamplingRequest
from oncurve.data.demonstrations import Demonstration, taught_text
from oncurve.data.prompts_on_demand import DemonstrationsOnDemand


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
        groups = []
        for prompt in request.prompts:
            demonstration = self._of[prompt.index]
            nothing = (0.0,) * len(demonstration.token_ids)
            completion = Completion(
                prompt.prompt_ids,
                demonstration.token_ids,
                demonstration.text,
                nothing,
                "stop",
                request.step,
                0,
                segments=demonstration.segments,
            )
            groups.append(Group(prompt, (completion,)))
        return groups

    def close(self) -> None:
        """Nothing was taken."""


class DemonstratedReward:
    """A reward of 1 for every completion, so that every demonstration is learned."""

    name = "demonstrated"

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One for each."""
        return [Reward(1.0) for _ in completions]

    def close(self) -> None:
        """Nothing was taken."""


class SameTextReward:
    """1 for a completion that says what the row's demonstration says, for rows without a reference answer."""

    name = "same_text"

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """Compared without white space at both ends."""
        same = [
            float(completion.text.strip() == taught_text(prompt.row).strip())
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return [Reward(value, {"correct": value}) for value in same]

    def close(self) -> None:
        """Nothing was taken."""
