"""Rejection sampling: completions of a recipe's training prompts, the correct ones kept as rows to train on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from oncurve import __version__, wiring
from oncurve.commands.measuring import measure, recipe_settings
from oncurve.config.schema import Config
from oncurve.data.demonstrations import read_back
from oncurve.data.prompts import encode
from oncurve.errors import ConfigError, DataError, counted
from oncurve.evaluate.evaluate import Example
from oncurve.evaluate.resumable import PartialResults
from oncurve.observe.record import write_lines
from oncurve.records import Prompt, Reward
from oncurve.rewards.base import check_errors
from oncurve.rewards.custom import SOURCE_ROW
from oncurve.session.parts import weights_checksum

OWN_FORMS = ("prompt", "completion", "messages", "text", "solution", SOURCE_ROW)
"""Columns of a row that would say otherwise what is learned."""
ENDED = ("stop", "done")
"""The model said that it was done, or its environment did."""


def keep_correct(
    config: Config,
    recipe: Sequence[str],
    output: Path,
    *,
    per_prompt: int,
    min_reward: float | None,
    console: Console,
) -> int:
    """Sample ``algorithm.group_size`` completions of every training prompt, write the correct ones; how many.

    ``recipe`` is the recipe as it was named, with its settings, for the provenance of every row.
    Correct is what the rewards call so, or what earns at least ``min_reward``. Of equal completions of a prompt the
    first is kept, and at most ``per_prompt`` of a prompt. What is sampled before a stop is not sampled again.

    Raises ConfigError for a recipe without an answer to be right about, DataError if nothing is left.
    """
    _check(config, output, min_reward)
    rows = wiring.split_rows(config)
    rewards = wiring.make_reward_function(config.rewards, seed=config.run.seed, columns=wiring.shared_columns(rows))
    try:
        policy = wiring.make_policy(config)
        context = wiring.context_of(policy.model.config)
        prompts = wiring.make_prompts(config, policy.tokenizer, context_tokens=context, rows=rows).train
        origin = {
            "model": config.model,
            "weights_sha256": weights_checksum(policy),
            "recipe": " ".join(recipe),
            "seed": config.run.seed,
            "temperature": config.rollouts.temperature,
            "version": __version__,
        }
        unfinished = output.with_name(f"{output.name}.unfinished")
        examples = _sampled(config, policy, prompts, rewards, origin, unfinished, console)
    finally:
        rewards.close()
    tokenizer = policy.tokenizer
    kept, counts = chosen(examples, per_prompt=per_prompt, min_reward=min_reward)
    found = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    console.print(f"{len(examples):,} completions of {len(prompts):,} prompts: {found}", highlight=False)
    if not kept:
        shutil.rmtree(unfinished)
        raise DataError(
            f"none of {len(examples):,} completions is correct, so there is nothing to write. Sample more of each "
            f"prompt with algorithm.group_size, take easier prompts, or start from demonstrations: docs/sft.md"
        )
    by_index = {prompt.index: prompt for prompt in prompts}
    write_lines(output, (_row(by_index[one.index], one, origin, tokenizer) for one in kept))
    shutil.rmtree(unfinished)
    for line in _said(config, recipe[0], output, examples, kept, tokenizer):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return len(kept)


def chosen(
    examples: Sequence[Example],
    *,
    per_prompt: int,
    min_reward: float | None = None,
) -> tuple[list[Example], dict[str, int]]:
    """The completions to learn, in order, and how many of all there are of each kind.

    A completion that never ended is not learned, since it does not say where to stop.
    """
    kept: list[Example] = []
    seen: set[tuple[int, str]] = set()
    taken: Counter[int] = Counter()
    names = ("kept", "wrong", "not graded", "cut off", "repeated", f"beyond {per_prompt} of a prompt")
    counts = dict.fromkeys(names, 0)
    for one in examples:
        right = one.is_correct if min_reward is None else one.reward is not None and one.reward >= min_reward
        same = (one.index, " ".join(one.completion.split()))
        if one.error is not None:
            kind = "not graded"
        elif not right:
            kind = "wrong"
        elif one.finish_reason not in ENDED:
            kind = "cut off"
        elif same in seen:
            kind = "repeated"
        elif taken[one.index] == per_prompt:
            kind = names[-1]
        else:
            kind = "kept"
            kept.append(one)
            seen.add(same)
            taken[one.index] += 1
        counts[kind] += 1
    return kept, counts


def _check(config: Config, output: Path, min_reward: float | None) -> None:
    """Raises ConfigError for what cannot be kept."""
    if output.exists():
        raise ConfigError(f"{output}: exists already. Name a new file, or remove this one")
    if config.sft is not None:
        raise ConfigError("--keep-correct: the recipe is a supervised stage (sft), which samples nothing")
    if config.rollouts.agent is not None:
        raise ConfigError(
            "--keep-correct: what an agent asks may be several conversations, and a row is one. Sample from a recipe "
            "without rollouts.agent"
        )
    if min_reward is None and not wiring.have_right_answer(config.rewards):
        raise ConfigError(
            "--keep-correct: none of the recipe's rewards says what is correct. Add --min-reward VALUE to keep what "
            "earns at least that much"
        )


def _sampled(
    config: Config,
    policy: Any,
    prompts: Sequence[Prompt],
    rewards: Any,
    origin: Mapping[str, Any],
    unfinished: Path,
    console: Console,
) -> tuple[Example, ...]:
    """Every completion, graded; what was sampled before a stop is not sampled again."""
    samples, params = config.algorithm.group_size, wiring.make_sampling(config)
    settings = {**origin, **recipe_settings(config, prompts, params, samples)}
    sampler = wiring.make_sampler(config)
    try:
        sampler.load_weights(policy, version=0)
        with PartialResults(
            unfinished, settings, samples=samples, num_prompts=len(prompts), option="--keep-correct"
        ) as parts:
            found = measure(
                prompts,
                sampler,
                rewards,
                params,
                parts,
                what="sampling",
                goes_on="The same command resumes it",
                console=console,
            ).examples
    finally:
        sampler.close()
    graded = [Reward(one.reward, error=one.error, detail=one.detail) for one in found]
    check_errors(graded, max_error_fraction=config.run.max_error_fraction)
    return found


def _said(
    config: Config, recipe: str, output: Path, examples: Sequence[Example], kept: Sequence[Example], tokenizer: Any
) -> Iterator[str]:
    """What was kept, and the command that trains on it."""
    tokens, solved = sum(one.num_tokens for one in examples), len({one.index for one in kept})
    plain = [one for one in kept if one.episode is None]
    others = sum(len(encode(tokenizer, one.completion)) + 1 != one.num_tokens for one in plain)
    again = f"; {others} of them are cut into other tokens when they are read" if others else ""
    yield f"kept {len(kept):,} of {counted(solved, 'prompt')} in {output}, from {tokens:,} sampled tokens{again}"
    form = f"data.template={config.data.template}" + (" data.chat=true" if config.data.chat else "")
    if config.rollouts.has_episodes:  # whose rows have their whole prompt
        form = "data.chat=false" if config.data.chat else ""
    yield (
        f"train on them: oncurve sft {recipe} model={config.model} data.type=jsonl data.path={output} "
        f"{form + ' ' if form else ''}sft.epochs=1"
    )


def parts_of(episode: Mapping[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Who wrote which part of an episode, with its tokens as they were sampled."""
    parts: list[dict[str, Any]] = []
    left = list(episode["token_ids"])
    for is_policy, _, count in episode["segments"]:
        ids, left = left[:count], left[count:]
        parts.append({"text": read_back(ids, tokenizer), "learned": is_policy, "tokens": ids})
    return parts


def _row(prompt: Prompt, one: Example, origin: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A row for ``oncurve sft``: the columns of the prompt's own, the completion, and where it comes from."""
    own = {key: value for key, value in prompt.row.items() if key not in OWN_FORMS}
    source = {**origin, "row": one.index, "sample": one.sample, "reward": one.reward, "tokens": one.num_tokens}
    said: dict[str, Any] = {"completion": one.completion}
    if one.episode is not None:
        said = {"prompt": one.episode.get("own_prompt", prompt.text), "parts": parts_of(one.episode, tokenizer)}
    return {**json.loads(json.dumps(own, default=str)), **said, "source": source}
