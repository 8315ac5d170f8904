"""Groups of the model before any training, and how many of them GRPO could learn from."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from itertools import islice

from rich.console import Console
from rich.progress import track

from oncurve.core.grading import has_signal, score
from oncurve.core.records import Group, Prompt, Reward
from oncurve.core.sampler import SamplingRequest
from oncurve.data.curriculum import Curriculum
from oncurve.observe.measure import rollout_metrics
from oncurve.recipe.schema import Config
from oncurve.run.builder import make_parts
from oncurve.run.model_paths import slow_rate
from oncurve.stats import wilson_interval
from oncurve.wording import counted

AT_ONCE = 4
"""Groups that are sampled between two signs of progress."""
FEW = 0.2
"""Share of groups with a signal below which most of a run's sampling is wasted."""


def sample_groups(config: Config, count: int, *, console: Console) -> bool:
    """Draw ``count`` groups of training prompts as the first steps would, and say how many carry a signal.

    The model samples in this process, whatever the recipe's servers are. False if no group has a signal.

    Raises ConfigError, DataError, SamplerError.
    """
    parts = make_parts(config.model_copy(update={"rollouts": config.rollouts.in_process()}))
    with ExitStack() as stack:
        for part in parts.closing:
            stack.enter_context(closing(part))
        sampler = parts.examining_sampler or parts.sampler
        rewards_of = parts.examining_reward or parts.reward_function
        prompts = _first_prompts(parts.data, count)
        began = time.perf_counter()
        sampler.load_weights(parts.policy, version=0)
        groups: list[Group] = []
        rewards: list[list[Reward]] = []
        starts = range(0, len(prompts), AT_ONCE)
        for start in track(starts, "sampling groups", console=console, transient=True, disable=not console.is_terminal):
            drawn = sampler.sample(SamplingRequest(prompts[start : start + AT_ONCE], config.algorithm.group_size))
            groups += drawn
            rewards += score(drawn, rewards_of)
        seconds = time.perf_counter() - began
    lines = (*describe_episode(groups, rewards), *describe_groups(config, groups, rewards, seconds))
    for line in filter(None, (*lines, slow_rate(parts.policy, config))):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return any(has_signal(row) for row in rewards)


def _first_prompts(data: Curriculum, count: int) -> list[Prompt]:
    """The prompts of the first steps, each once."""
    steps = range(1 + count // data.prompts_per_step)
    return list(islice({prompt.index: prompt for step in steps for prompt in data.at(step)}.values(), count))


MOST_TURNS = 24
"""Parts of an episode that are shown."""


def describe_episode(groups: list[Group], rewards: list[list[Reward]]) -> list[str]:
    """The episode with the most turns, part by part, with its line breaks; none where there is no episode."""
    played = [
        (completion, reward, group.prompt)
        for group, row in zip(groups, rewards, strict=True)
        for completion, reward in zip(group.completions, row, strict=True)
        if completion.segments
    ]
    if not played:
        return []
    completion, reward, prompt = max(played, key=lambda episode: len(episode[0].segments))
    value = f"reward {reward.value:.3g}" if reward.value is not None else f"not graded ({reward.error})"
    lines = [f"an episode: {counted(completion.num_turns, 'turn')}, ended by {completion.finish_reason}, {value}"]
    lines.append(f"  {'prompt':<12}{(completion.own_prompt or prompt.text)!r}")
    for segment in completion.segments[:MOST_TURNS]:
        lines.append(f"  {'model' if segment.is_policy else 'answer':<12}{segment.text!r}")
    if len(completion.segments) > MOST_TURNS:
        lines.append(f"  ... and {counted(len(completion.segments) - MOST_TURNS, 'further part')}")
    return lines


def describe_groups(config: Config, groups: list[Group], rewards: list[list[Reward]], seconds: float) -> list[str]:
    """The lines of the answer: how many groups differ inside, how the others fell, and what follows."""
    size, total = config.algorithm.group_size, len(groups)
    signals = sum(has_signal(row) for row in rewards)
    low, high = wilson_interval(signals, total)
    metrics = rollout_metrics(groups, rewards)
    shares = [
        f"{name} {metrics[key]:{style}}"
        for name, key, style in (
            ("mean reward", "reward/mean", ".3g"),
            ("correct", "reward/correct", ".0%"),
            ("not graded", "reward/error_fraction", ".0%"),
            ("cut off by the limit", "completion/truncated_fraction", ".0%"),
            ("solved by all", "group/solved_fraction", ".0%"),
            ("solved by none", "group/unsolved_fraction", ".0%"),
        )
        if key in metrics
    ]
    lines = [
        f"{total} groups of {size} from the untrained model, in {seconds:.0f} s: {signals} have a signal "
        f"({signals / total:.0%}, 95 % interval {low:.0%} to {high:.0%})",
        f"  {', '.join(shares)}",
    ]
    if locations := _describe_locations(metrics):
        lines.append(f"  {locations}")
    if signals == 0:
        return [*lines, f"No group has a signal, so GRPO would learn nothing from them. {_remedy(metrics)}"]
    expected = signals / total * config.run.prompts_per_step
    lines.append(f"  of the {config.run.prompts_per_step} groups of a step, about {expected:.0f} would be learned from")
    if signals / total < FEW:
        lines.append(f"warning: most of the sampling would be wasted at first. {_remedy(metrics)}")
    return lines


LOCATION_KEYS = (
    "reward/found_in_box",
    "reward/found_in_tag",
    "reward/found_in_hash",
    "reward/found_in_statement",
    "reward/found_in_prose",
    "reward/found_in_nowhere",
)
"""Metrics of the places in which answers stand."""


def _describe_locations(metrics: dict[str, float]) -> str:
    """Where the model puts its answers; empty where no reward looked for them."""
    shares = {key.rpartition("_")[-1]: metrics[key] for key in LOCATION_KEYS if metrics.get(key, 0.0) > 0}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return "answers are in: " + ", ".join(f"{name} {share:.0%}" for name, share in ordered) if ordered else ""


def _remedy(metrics: dict[str, float]) -> str:
    """Advice where the completions of most groups earn the same."""
    if metrics.get("completion/truncated_fraction", 0.0) > 0.5:
        return "Most completions are cut off before their answer: raise rollouts.max_completion_tokens."
    if metrics.get("group/solved_fraction", 0.0) > metrics.get("group/unsolved_fraction", 0.0):
        return "The prompts are too easy: take harder ones."
    return (
        "The prompts are too hard, or their form is new to the model: begin with a supervised stage (`oncurve sft`), "
        "take easier prompts, show examples (data.few_shot), or use larger groups (algorithm.group_size)."
    )
