"""Lengths of prompts, completions and answers, which nobody knows before a run: measured, or guessed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from oncurve.core.errors import ConfigError
from oncurve.plan import constants
from oncurve.recipe.schema import Config

PROMPT_TOKENS = {
    "demonstrations": 64,
    "word_problems": 64,
    "calculator_problems": 96,
    "program_problems": 192,
    "gsm8k": 256,
    "math": 384,
}
"""Guessed. Tokens of a long prompt with its template, by the type of the data; 512 for any other."""


PromptSource = Literal["assumed", "given", "data.max_prompt_tokens", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLengths:
    """Lengths in tokens. By default a completion has one turn and no answer."""

    prompt_tokens: int
    """Tokens of a long prompt, S: memory is planned for it, time for the mean."""
    mean_prompt_tokens: float
    prompts_from: PromptSource = "assumed"
    completion_tokens: float
    """Tokens that the policy writes in the average completion, in all turns together: time is planned for the average,
    memory for the longest."""
    turns: float = 1.0
    """Turns of the average completion; an answer of a tool or an environment comes between two."""
    answer_tokens: float = 0.0
    """Tokens of the average answer."""
    answer_seconds: float = 0.0
    """Until a tool or an environment has answered."""
    context_tokens: int | None = None
    """Prompt, turns and answers together, at most; None: no limit."""
    is_mean_assumed: bool = True
    """The mean of completions is a share of their limit, since nobody named another."""


def guess_lengths(
    config: Config,
    *,
    prompt_tokens: int | None = None,
    measured: Sequence[int] = (),
    mean_tokens: float | None = None,
    mean_turns: float | None = None,
    answer_tokens: float | None = None,
    tool_seconds: float | None = None,
    context_tokens: int | None = None,
) -> TokenLengths:
    """The lengths that are provided or were ``measured`` on rows, and guesses for the others.

    A guessed prompt leaves room for the completion in the model's context. Raises ConfigError for a length beyond the
    recipe's limit.
    """
    limit = config.rollouts.max_completion_tokens
    mean = mean_tokens or constants.MEAN_LENGTH_SHARE * limit
    if mean > limit:
        raise ConfigError(
            f"--mean-tokens {mean:g} is more than rollouts.max_completion_tokens, {limit}. Lower it or raise the limit"
        )
    prompts = _prompts(config, prompt_tokens, measured, context_tokens)
    shared = {
        **prompts,
        "completion_tokens": mean,
        "is_mean_assumed": mean_tokens is None,
        "context_tokens": context_tokens,
    }
    if not config.rollouts.has_episodes:
        options = {"--mean-turns": mean_turns, "--answer-tokens": answer_tokens, "--tool-seconds": tool_seconds}
        for option, value in options.items():
            if value is not None:
                raise ConfigError(
                    f"{option} is for completions with tools, and this recipe has none. Set rollouts.tools or "
                    f"rollouts.environments, or leave {option} out"
                )
        return TokenLengths(**shared)
    limits = config.rollouts.episodes
    turns = mean_turns or min(constants.MEAN_TURNS, float(limits.max_turns))
    answer = answer_tokens or constants.MEAN_ANSWER_SHARE * limits.max_answer_tokens
    for option, value, key, most in (
        ("--mean-turns", turns, "max_turns", limits.max_turns),
        ("--answer-tokens", answer, "max_answer_tokens", limits.max_answer_tokens),
    ):
        if value > most:
            raise ConfigError(
                f"{option} {value:g} is more than rollouts.episodes.{key}, {most}. Lower it or raise the limit"
            )
    return TokenLengths(
        turns=turns,
        answer_tokens=answer,
        answer_seconds=constants.TOOL_SECONDS if tool_seconds is None else tool_seconds,
        **shared,
    )


def _prompts(config: Config, wished: int | None, measured: Sequence[int], context_tokens: int | None) -> dict[str, Any]:
    """The prompts' lengths, by who knows them best."""
    source: PromptSource = "given" if wished else "measured" if measured else "assumed"
    longest = wished or max(measured, default=0)
    if not longest and config.data.max_prompt_tokens:
        source, longest = "data.max_prompt_tokens", config.data.max_prompt_tokens
    if not longest:
        limit, longest = config.rollouts.max_completion_tokens, PROMPT_TOKENS.get(config.data.type, 512)
        if context_tokens is not None and limit < context_tokens < limit + longest:
            longest = context_tokens - limit
    mean = fmean(measured) if source == "measured" else longest
    return {"prompt_tokens": longest, "mean_prompt_tokens": mean, "prompts_from": source}
