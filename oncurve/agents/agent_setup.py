"""Who plays the episodes of agents, and how far they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oncurve.agents.agent_programs import Agent
from oncurve.agents.conversation_frames import Frames

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class AgentSetup:
    """Who plays the episodes, and how far they go."""

    agent: Agent
    make_frames: Callable[[PreTrainedTokenizerBase], Frames]
    max_turns: int = 8
    may_fork: bool = True
    """Forks and further conversations are rows; otherwise they are refused."""
    seconds: float = 600.0
    """Of an agent in one episode, apart from the time that it waits for the policy."""
    at_once: int = 64
    """Agents that run at the same time."""
    needs_reward: bool = False
    """Nothing else grades: an agent that gives no reward has failed."""
    takes_reward: bool = True
    """What an agent gives is among the recipe's rewards."""
