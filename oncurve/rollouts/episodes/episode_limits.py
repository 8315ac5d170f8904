"""Limits of an episode; each ends it, or a call in it, in a way of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """How far an episode may go. The policy's own tokens are limited by ``SamplingParams.max_completion_tokens``."""

    max_turns: int = 8
    """How often the policy writes."""
    max_answer_tokens: int = 256
    """Tokens of one answer of a tool or an environment; a longer one is cut, with a mark."""
    max_malformed_calls: int = 3
    """So many calls that cannot be read end the episode."""
    max_seconds: float | None = None
    """From its first token on; looked at between turns."""
    context_tokens: int | None = None
    """Prompt, turns and answers together; None where nothing limits them."""
    tool_seconds: float = 10.0
    """One call of a tool."""
    environment_seconds: float = 60.0
    """One call of an environment: reset, a step, a method, the reward."""
    threads: int = 64
    """Calls that run at the same time."""
