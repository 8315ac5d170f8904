"""The agent of a recipe, and the sampler around which it puts episodes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from oncurve.agents.agent_programs import Agent, FunctionAgent, ProgramAgent
from oncurve.agents.agent_setup import AgentSetup
from oncurve.agents.conversation_frames import ChatFrames, Frames, TagFrames
from oncurve.core.errors import ConfigError
from oncurve.core.sampler import Sampler
from oncurve.data.chat_template import template_arguments
from oncurve.data.prompts import chosen_chat, find_template
from oncurve.data.python_objects import NOTHING, PythonObjects
from oncurve.episodes.from_settings import PYTHON_PREFIX
from oncurve.episodes.settings import AgentProgram
from oncurve.recipe.schema import Config
from oncurve.sample.event_loop import require_aiohttp
from oncurve.user_code import load_object


def with_agent(sampler: Any, config: Config, objects: PythonObjects = NOTHING) -> Sampler:
    """A sampler whose episodes the recipe's agent plays. Raises ConfigError for an agent that cannot be used."""
    require_aiohttp()
    from oncurve.agents.agent_sampler import AgentSampler  # lazy

    setup = AgentSetup(
        agent=make_agent(config, objects),
        make_frames=lambda tokenizer: make_frames(config, tokenizer),
        limits=config.rollouts.episodes,
        needs_reward=all(reward.type == "environment" for reward in config.rewards),
        takes_reward=any(reward.type == "environment" for reward in config.rewards),
    )
    return AgentSampler(sampler, config.sampling(), setup)


def make_agent(config: Config, objects: PythonObjects) -> Agent:
    """The agent that plays the episodes of a recipe."""
    chosen = config.rollouts.agent
    if isinstance(chosen, AgentProgram):
        return ProgramAgent(chosen.command, is_deterministic=chosen.deterministic)
    reference = str(chosen)
    if not reference.startswith(PYTHON_PREFIX):
        return FunctionAgent(_callable(load_object(reference, where="rollouts.agent"), reference), reference)
    name = reference.removeprefix(PYTHON_PREFIX)
    if name not in objects.agents:
        raise ConfigError(
            f"rollouts.agent: {name!r} was passed from Python, and a recipe cannot hold it. Train or resume from the "
            f"program, with oncurve.Trainer and the same agent; or name it as file.py:name"
        )
    return FunctionAgent(objects.agents[name], name)


def make_frames(config: Config, tokenizer: PreTrainedTokenizerBase) -> Frames:
    """The form of conversations: the model's chat template, or the words of ``data.template``.

    Raises ConfigError for a model that has no chat template where the recipe asks for one.
    """
    if chosen_chat(config.data.chat, tokenizer, config.data.template):
        return ChatFrames(tokenizer, arguments=template_arguments(config.data.chat))
    template = find_template(config.data.template)
    return TagFrames(tokenizer, system=template.system, turn=template.turn, opening=template.opening)


def _callable(value: Any, reference: str) -> Any:
    if not callable(value):
        raise ConfigError(f"rollouts.agent: {reference} is {type(value).__name__}, and not a function")
    return value
