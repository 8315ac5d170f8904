"""The tools and environments that the sections of a recipe ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from oncurve.core.errors import ConfigError
from oncurve.core.records import SOURCE_ROW, Prompt
from oncurve.data.chat_template import MESSAGES, template_arguments
from oncurve.data.prompts import ToolsOf, chosen_chat, find_template, render_prompts
from oncurve.data.python_objects import NOTHING, PythonObjects
from oncurve.data.settings import DataSection
from oncurve.episodes.chat_dialect import ChatDialect
from oncurve.episodes.dialects import Dialect, TagDialect
from oncurve.episodes.environments import Kind
from oncurve.episodes.episode_setup import EpisodeSetup
from oncurve.episodes.settings import NO_QUESTION, OPENENV, SANDBOX, VERIFIERS, EpisodeKeys
from oncurve.episodes.tools import Tool, calculator, python_tool, sandboxed_tool, tools_of
from oncurve.extensions import extension
from oncurve.user_code import load_object
from oncurve.wording import did_you_mean

PYTHON_PREFIX = "given:"
"""Stands before the name of what a Python program passed."""
OWN_TOOLS = ("calculator", "python")


def make_setup(rollouts: EpisodeKeys, data: DataSection, objects: PythonObjects = NOTHING) -> EpisodeSetup:
    """The setup of a recipe's episodes. Raises ConfigError for tools or environments that cannot be used."""
    tools, kinds = make_tools(rollouts, objects), make_kinds(rollouts, objects)
    if kinds and data.few_shot:
        raise ConfigError(
            "data.few_shot shows worked examples, and there are none of what happens in rollouts.environments. Set "
            "`data.few_shot=0`"
        )
    for kind in kinds.values():
        if both := tools.keys() & kind.tools.keys():
            raise ConfigError(
                f"rollouts: the tool {sorted(both)[0]!r} is also a method of the environment {kind.name}. Rename one"
            )
    return EpisodeSetup(
        tools=tools,
        kinds=kinds,
        make_dialect=lambda tokenizer: make_dialect(data, tokenizer, tools, kinds),
        rerender=lambda tokenizer, prompt, text: rerender(data, tokenizer, prompt, text, tools, kinds),
        limits=rollouts.episodes,
    )


def make_tools(rollouts: EpisodeKeys, objects: PythonObjects) -> dict[str, Tool]:
    """The tools of all episodes."""
    tools: list[Tool] = []
    for reference in rollouts.tools:
        if reference == "calculator":
            tools.append(Tool.of(calculator))
        elif reference == "python":
            tools.append(python_tool(rollouts.episodes.tool_seconds))
        elif reference.startswith(PYTHON_PREFIX):
            name = reference.removeprefix(PYTHON_PREFIX)
            tools.append(Tool.of(_python_object(objects.tools, name, "tools"), name))
        elif reference.startswith(SANDBOX) and ":" in (inside := reference.removeprefix(SANDBOX)):
            function = _load(inside, "rollouts.tools: one")
            tools.append(sandboxed_tool(function, rollouts.episodes.tool_seconds))
        elif ":" in reference and not reference.startswith(SANDBOX):
            tools.append(Tool.of(_load(reference, "rollouts.tools: one")))
        else:
            raise ConfigError(
                f"rollouts.tools: there is no {reference!r}. {did_you_mean(reference, OWN_TOOLS)}Use "
                f"{', '.join(OWN_TOOLS)}, or a function as module:name, file.py:name or sandbox:file.py:name"
            )
    return tools_of(tools)


def make_kinds(rollouts: EpisodeKeys, objects: PythonObjects) -> dict[str, Kind]:
    """The environments by name."""
    kinds: dict[str, Kind] = {}
    for name, reference in rollouts.environments.items():
        if reference.startswith(PYTHON_PREFIX):
            factory = _python_object(objects.environments, reference.removeprefix(PYTHON_PREFIX), "environments")
        elif reference.startswith((OPENENV, VERIFIERS)):
            factory = reference
        else:
            factory = _load(reference, f"rollouts.environments: {name}")
        kinds[name] = Kind.of(name, extension("foreign environments")(factory))
    return kinds


def paying_classes(environments: Any) -> dict[str, list[str]]:
    """The environments that say what an episode is worth, by the names of their classes; "" for those that are named
    and not given.

    Raises ConfigError for an object that is none.
    """
    named = environments if isinstance(environments, Mapping) else {"default": environments}
    made = extension("foreign environments")
    names: dict[str, list[str]] = {}
    for name, environment in named.items():
        if isinstance(environment, str):
            names.setdefault("", []).append(name)
        elif (kind := Kind.of(name, made(environment))).gives_reward:
            names.setdefault(kind.class_name, []).append(name)
    return names


def environment_rewards(environments: Any) -> list[dict[str, Any]]:
    """The sections of a recipe for what environments say that an episode is worth: one for each class of several."""
    paying = paying_classes(environments)
    if len(paying) < 2 or "" in paying:
        return [{"type": "environment"}] if paying else []
    return [{"type": "environment", "name": kind, "of": names} for kind, names in paying.items()]


def make_tools_of(rollouts: EpisodeKeys, data: DataSection, objects: PythonObjects) -> ToolsOf | None:
    """The schemas that a chat template is given for a row; None where there are no tools to tell of."""
    if not rollouts.has_episodes or data.chat is False or rollouts.agent is not None:
        return None
    setup = make_setup(rollouts, data, objects)
    return lambda row: [tool.schema for tool in setup.tools_of(row).values()] or None


def make_dialect(
    data: DataSection, tokenizer: PreTrainedTokenizerBase, tools: Mapping[str, Tool], kinds: Mapping[str, Kind]
) -> Dialect:
    """The dialect of a model: its chat template, or tags. Raises ConfigError for one that cannot be used."""
    if chosen_chat(data.chat, tokenizer, data.template):
        has_tools = bool(tools) or any(kind.tools for kind in kinds.values())
        has_observations = any(kind.has_steps for kind in kinds.values())
        arguments = template_arguments(data.chat)
        return ChatDialect(tokenizer, has_tools=has_tools, has_observations=has_observations, arguments=arguments)
    template = find_template(data.template)
    return TagDialect(tokenizer, turn=f"\n{template.turn}{template.opening}")


def rerender(
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    text: str,
    tools: Mapping[str, Tool],
    kinds: Mapping[str, Kind],
) -> tuple[str, tuple[int, ...]]:
    """The text and tokens of a prompt with further words at the end of its question, as TRL puts them there."""
    own = kinds.get(str(prompt.row.get("environment")), next(iter(kinds.values())))
    schemas = [tool.schema for tool in {**tools, **own.tools}.values()] or None
    question = str(prompt.row.get("question", ""))
    row = {
        **prompt.row,
        "question": text if re.fullmatch(rf"{re.escape(NO_QUESTION)} \d+", question) else question + text,
    }
    if isinstance(messages := prompt.source_row.get("prompt"), list):
        last = {**messages[-1], "content": messages[-1]["content"] + text}
        row[SOURCE_ROW] = {**prompt.source_row, "prompt": [*messages[:-1], last]}
    if messages := row.get(MESSAGES):
        row[MESSAGES] = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text}]
    [made], _ = render_prompts(
        [row],
        cast("Any", tokenizer),
        template=data.template,
        chat=data.chat,
        tools_of=lambda row: schemas,
    )
    return made.text, made.prompt_ids


def _python_object(things: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in things:
        raise ConfigError(
            f"rollouts.{where}: {name!r} was passed from Python, and a recipe cannot hold it. Train or resume from "
            f"the program, with oncurve.Trainer and the same {where}; or name it as file.py:name"
        )
    return things[name]


def _load(reference: str, where: str) -> Any:
    return load_object(reference, where=where)
