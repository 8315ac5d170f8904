"""The agent of a run, and the limits of its episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oncurve.agents.agent_programs import Agent
from oncurve.agents.conversation_frames import Frames
from oncurve.episodes.settings import EpisodeSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class AgentSetup:
    """The agent that plays the episodes, and its limits."""

    agent: Agent
    make_frames: Callable[[PreTrainedTokenizerBase], Frames]
    limits: EpisodeSection = field(default_factory=EpisodeSection)
    needs_reward: bool = False
    """Nothing else grades: an agent that gives no reward has failed."""
    takes_reward: bool = True
    """The agent's own reward is among the recipe's rewards."""
