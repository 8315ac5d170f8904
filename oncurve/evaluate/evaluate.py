"""Evaluation on test or validation problems: sample, grade, count, and keep every example."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from oncurve.core.errors import DataError
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Completion, Group, Prompt, Reward, SamplingParams
from oncurve.core.sampler import Sampler, SamplingRequest
from oncurve.evaluate.evaluation import Evaluation, Example
from oncurve.observe.measure import episode_row
from oncurve.rewards.weighted_sum import FIXED_PARTS, categorize

PROMPTS_PER_CALL = 128
"""The most prompts of a part: what a stop costs, and when progress is told, where each prompt has one completion."""


class ExampleStore:
    """Keeps the examples of an evaluation as they come, in memory alone."""

    draws_by_part = False
    """Each call of the sampler has random numbers of its own, so that it gives the same whenever it is made."""

    def __init__(self) -> None:
        self.examples: list[Example] = []

    def add(self, examples: Sequence[Example]) -> None:
        """Keep a part."""
        self.examples += examples


def evaluate(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    reward_function: RewardFunction,
    *,
    params: SamplingParams,
    lenient_reward_function: RewardFunction | None = None,
    samples_per_prompt: int = 1,
    step: int = 0,
    prompts_per_call: int = PROMPTS_PER_CALL,
    store: ExampleStore | None = None,
    name: str = "evaluation",
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Sample the model on the prompts and grade the completions with the reward function.

    ``params`` is a required argument so that no model is ever measured with the decoding of training by accident.
    ``lenient_reward_function`` finds the answer wherever it stands; its part "correct" decides. The prompts go to the
    sampler ``prompts_per_call`` at a time, and ``on_progress(done, total)`` is called before the first call and after
    each. With ``store``, every part is kept as it comes, and only what it does not hold yet is sampled; each part then
    has random numbers of its own.

    Raises DataError without prompts; ValueError if a data set row appears twice, or if greedy decoding is asked for
    several completions of a prompt, which would all be the same.
    """
    _check_prompts(prompts)
    if params.temperature == 0 and samples_per_prompt > 1:
        raise ValueError(
            f"greedy decoding cannot give {samples_per_prompt} different completions; sample, or ask for 1"
        )
    started = time.monotonic()
    store = store or ExampleStore()
    show = on_progress or (lambda done, total: None)
    done = len(store.examples) // samples_per_prompt
    show(done, len(prompts))
    for first in range(done, len(prompts), prompts_per_call):
        part = prompts[first : first + prompts_per_call]
        draws = first if store.draws_by_part else step
        groups = sampler.sample(SamplingRequest(part, samples_per_prompt, draws, params))
        store.add(list(grade_groups(groups, reward_function, lenient_reward_function)))
        show(first + len(part), len(prompts))
    seconds = time.monotonic() - started
    return Evaluation(name, tuple(store.examples), asdict(params), step=step, seconds=seconds)


def _check_prompts(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise DataError("there is no prompt to evaluate on; give it test rows (evaluation.data).")
    if len({prompt.index for prompt in prompts}) != len(prompts):
        twice = Counter(prompt.index for prompt in prompts).most_common(1)[0][0]
        raise ValueError(f"row {twice} is among the prompts more than once; it would count twice")


def grade_groups(
    groups: Sequence[Group],
    reward_function: RewardFunction,
    lenient_reward_function: RewardFunction | None = None,
) -> Iterator[Example]:
    """The examples of some groups, in their order."""
    prompts = [group.prompt for group in groups for _ in group.completions]
    completions = [completion for group in groups for completion in group.completions]
    rewards = grade(reward_function, prompts, completions)
    lenient: Sequence[Reward | None] = [None] * len(completions)
    if lenient_reward_function is not None:
        lenient = grade(lenient_reward_function, prompts, completions)
    return map(_example, prompts, completions, rewards, lenient)


def _example(prompt: Prompt, completion: Completion, reward: Reward, lenient: Reward | None) -> Example:
    category, episode = categorize(reward), episode_row(completion)
    any_format = None
    if lenient is not None and category != "graded" and (category == "correct" or lenient.error is None):
        any_format = category == "correct" or lenient.parts.get("correct", 0.0) >= 1.0
    return Example(
        index=prompt.index,
        question=str(prompt.row.get("question", prompt.text)),
        answer=str(prompt.row.get("answer", "")),
        completion=completion.text,
        num_tokens=completion.num_tokens,
        finish_reason=completion.finish_reason,
        category=category,
        reward=reward.value,
        correct_any_format=any_format,
        detail=reward.detail,
        sample=completion.index,
        error=reward.error,
        judged=[part for part in FIXED_PARTS if part in reward.parts],
        episode=episode or None,
    )
