"""Tools and environments of a recipe, and the sampler around which they put episodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from oncurve.data.conversations import MESSAGES
from oncurve.data.given import NOTHING, Given
from oncurve.errors import ConfigError, did_you_mean
from oncurve.extensions import extension
from oncurve.recipe.schema import Config
from oncurve.records import SOURCE_ROW
from oncurve.sample.settings import OPENENV, SANDBOX, VERIFIERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oncurve.data.prompts import ToolsOf
    from oncurve.episodes.dialects import Dialect
    from oncurve.episodes.environments import Kind
    from oncurve.episodes.episode_setup import EpisodeSetup
    from oncurve.episodes.tools import Tool
    from oncurve.records import Prompt
    from oncurve.sample.base import Sampler

GIVEN = "given:"
"""Stands before the name of what a Python program passed."""
OWN_TOOLS = ("calculator", "python")


def with_episodes(sampler: Any, config: Config, given: Given = NOTHING) -> Sampler:
    """The sampler, or one whose completions are episodes where the recipe has tools or environments."""
    if not config.rollouts.has_episodes:
        return cast("Sampler", sampler)
    from oncurve.episodes.episode_sampler import EpisodeSampler  # lazy
    from oncurve.wiring.sampling_params import make_sampling  # lazy

    if config.rollouts.sleep:
        raise ConfigError(
            "rollouts.sleep is true, and a server that gives its memory back between steps cannot be asked turn by "
            "turn yet. Set `rollouts.sleep=false`, or go without rollouts.tools, environments and agent"
        )
    if config.rollouts.agent is not None:
        return extension("agents")(sampler, config, given)
    made = EpisodeSampler(sampler, make_sampling(config), make_setup(config, given))
    made.staleness = config.rollouts.staleness
    return made


def make_setup(config: Config, given: Given = NOTHING) -> EpisodeSetup:
    """What happens in the episodes of a recipe. Raises ConfigError for tools or environments that cannot be used."""
    from oncurve.episodes.episode import EpisodeLimits  # lazy
    from oncurve.episodes.episode_setup import EpisodeSetup  # lazy

    tools, kinds = make_tools(config, given), make_kinds(config, given)
    if kinds and config.data.few_shot:
        raise ConfigError(
            "data.few_shot shows worked examples, and there are none of what happens in rollouts.environments. Set "
            "`data.few_shot=0`"
        )
    for kind in kinds.values():
        if both := tools.keys() & kind.tools.keys():
            raise ConfigError(
                f"rollouts: the tool {sorted(both)[0]!r} is also a method of the environment {kind.name}. Rename one"
            )
    limits = config.rollouts.episodes.model_dump(exclude={"agent_seconds", "forks"})  # those of agents
    return EpisodeSetup(
        tools=tools,
        kinds=kinds,
        make_dialect=lambda tokenizer: make_dialect(config, tokenizer, tools, kinds),
        rerender=lambda tokenizer, prompt, words: rerender(config, tokenizer, prompt, words, tools, kinds),
        limits=EpisodeLimits(**limits),
    )


def make_tools(config: Config, given: Given) -> dict[str, Tool]:
    """The tools of all episodes."""
    from oncurve.episodes.tools import Tool, calculator, python_tool, sandboxed_tool, tools_of  # lazy

    found: list[Tool] = []
    for place in config.rollouts.tools:
        if place == "calculator":
            found.append(Tool.of(calculator))
        elif place == "python":
            found.append(python_tool(config.rollouts.episodes.tool_seconds))
        elif place.startswith(GIVEN):
            name = place.removeprefix(GIVEN)
            found.append(Tool.of(_given(given.tools, name, "tools"), name))
        elif place.startswith(SANDBOX) and ":" in (inside := place.removeprefix(SANDBOX)):
            function = _load(inside, "rollouts.tools: one")
            found.append(sandboxed_tool(function, config.rollouts.episodes.tool_seconds))
        elif ":" in place and not place.startswith(SANDBOX):
            found.append(Tool.of(_load(place, "rollouts.tools: one")))
        else:
            raise ConfigError(
                f"rollouts.tools: there is no {place!r}. {did_you_mean(place, OWN_TOOLS)}Use {', '.join(OWN_TOOLS)}, "
                f"or a function as module:name, file.py:name or sandbox:file.py:name"
            )
    return tools_of(found)


def make_kinds(config: Config, given: Given) -> dict[str, Kind]:
    """The environments by name."""
    from oncurve.episodes.environments import Kind  # lazy

    kinds: dict[str, Kind] = {}
    for name, place in config.rollouts.environments.items():
        if place.startswith(GIVEN):
            found = _given(given.environments, place.removeprefix(GIVEN), "environments")
        elif place.startswith((OPENENV, VERIFIERS)):
            found = place
        else:
            found = _load(place, f"rollouts.environments: {name}")
        kinds[name] = Kind.of(name, extension("foreign environments")(found))
    return kinds


def give_rewards(environments: Any) -> bool:
    """Some environment says what an episode is worth; one that is named and not given may.

    Raises ConfigError for an object that is none.
    """
    from oncurve.episodes.environments import Kind  # lazy

    named = environments if isinstance(environments, Mapping) else {"default": environments}
    made = extension("foreign environments")
    return any(isinstance(one, str) or Kind.of(name, made(one)).gives_reward for name, one in named.items())


def make_tools_of(config: Config, given: Given) -> ToolsOf | None:
    """The schemas that a chat template is given for a row; None where there are no tools to tell of."""
    if not config.rollouts.has_episodes or not config.data.chat or config.rollouts.agent is not None:
        return None
    setup = make_setup(config, given)
    return lambda row: [tool.schema for tool in setup.tools_of(row).values()] or None


def make_dialect(
    config: Config, tokenizer: PreTrainedTokenizerBase, tools: Mapping[str, Tool], kinds: Mapping[str, Kind]
) -> Dialect:
    """How the model is spoken with: by its chat template, or in tags. Raises ConfigError for one that cannot be."""
    from oncurve.data.prompts import find_template, template_arguments  # lazy
    from oncurve.episodes.dialects import ChatDialect, TagDialect  # lazy

    if config.data.chat:
        has_tools = bool(tools) or any(kind.tools for kind in kinds.values())
        has_words = any(kind.has_steps for kind in kinds.values())
        arguments = template_arguments(config.data.chat)
        return ChatDialect(tokenizer, has_tools=has_tools, has_words=has_words, arguments=arguments)
    template = find_template(config.data.template)
    return TagDialect(tokenizer, turn=f"\n{template.turn}{template.opening}")


def rerender(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    words: str,
    tools: Mapping[str, Tool],
    kinds: Mapping[str, Kind],
) -> tuple[str, tuple[int, ...]]:
    """The text and tokens of a prompt with further words at the end of its question, as TRL puts them there."""
    from oncurve.data.prompts import render_prompts  # lazy

    own = kinds.get(str(prompt.row.get("environment")), next(iter(kinds.values())))
    told = [tool.schema for tool in {**tools, **own.tools}.values()] or None
    asked = str(prompt.row.get("question", ""))
    row = {**prompt.row, "question": words if re.fullmatch(rf"{re.escape(NO_QUESTION)} \d+", asked) else asked + words}
    if isinstance(said := prompt.source_row.get("prompt"), list):
        last = {**said[-1], "content": said[-1]["content"] + words}
        row[SOURCE_ROW] = {**prompt.source_row, "prompt": [*said[:-1], last]}
    if said := row.get(MESSAGES):
        row[MESSAGES] = [*said[:-1], {**said[-1], "content": said[-1]["content"] + words}]
    [made], _ = render_prompts(
        [row],
        cast("Any", tokenizer),
        template=config.data.template,
        chat=config.data.chat,
        tools_of=lambda row: told,
    )
    return made.text, made.prompt_ids


NO_QUESTION = "..."
"""Begins the question of rows of which the environment alone says what they ask; a number follows."""


def _given(things: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in things:
        raise ConfigError(
            f"rollouts.{where}: {name!r} was passed from Python, and a recipe cannot hold it. Train or resume from "
            f"the program, with oncurve.Trainer and the same {where}; or name it as file.py:name"
        )
    return things[name]


def _load(place: str, where: str) -> Any:
    from oncurve.rewards.custom import load_object  # lazy

    return load_object(place, where=where)
