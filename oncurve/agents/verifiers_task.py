"""Tasksets of verifiers (its v1): their prompts, the tools of their toolsets, and their rewards, in this process.

What a taskset does in a container or with an agent of its own does not happen here and is refused by name; run those as
an agent that asks this policy.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.episodes.environments import AdaptedEnvironment
from oncurve.episodes.tools import Tool

MOST_TASKS = 4096
"""Limit on the tasks read from a taskset, which may have no end."""
_NUMBER = re.compile(r"(\d+)$")


class VerifiersTask(AdaptedEnvironment):
    """One task in one episode."""

    def __init__(self, tasks: Sequence[Any]) -> None:
        self._tasks = tasks
        self._toolsets = list(type(tasks[0]).toolsets(tasks[0].config))
        self.tools = _tools_of(self._toolsets)
        self.task: Any = None

    async def reset(self, task: int | None = None, question: str = "", seed: int | None = None) -> str:
        """Begin the task that a row names in its column ``task``, or that of its number."""
        number = _NUMBER.search(question)
        index = task if task is not None else int(number[1]) if number else seed or 0
        self.task = self._tasks[int(index) % len(self._tasks)]
        for toolset in self._toolsets:
            await toolset.setup()
            await toolset.setup_task(self.task)
        data = self.task.data
        return "\n\n".join(part for part in (data.system_prompt, data.prompt_text) if part)

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """The weighted rewards of the task, with each by its name."""
        trace = _trace_of(self.task, messages)
        for toolset in self._toolsets:
            if type(toolset.state) is not _plain_state():
                trace.state = toolset.state
        await self.task.score(trace)
        rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        if len(rewards) < len(trace.rewards):
            missing = sorted(trace.rewards.keys() - rewards.keys())
            raise ValueError(f"the task gave no value for {', '.join(missing)}")
        parts = {("reward_part" if name == "reward" else name): reward.score for name, reward in rewards.items()}
        return {**parts, "reward": trace.reward}


def tasks_of(taskset: Any) -> list[Any]:
    """The tasks of a taskset, at most ``MOST_TASKS``.

    Raises ConfigError for what cannot be done in this process.
    """
    tasks = list(itertools.islice(taskset, MOST_TASKS))
    name = type(taskset).__name__
    if not tasks:
        raise ConfigError(f"environment: the taskset {name} has no task")
    _check(name, tasks[0])
    if type(taskset).toolsets(taskset.config):
        raise ConfigError(f"environment: {name} shares tool servers among tasks, {_NOT_HERE}")
    return tasks


def load_tasks(named: str) -> list[Any]:
    """The tasks of an installed taskset. Raises ConfigError where there is none, or it cannot be used here."""
    try:
        vf = import_module("verifiers.v1")
    except ImportError:
        raise ConfigError(
            f"rollouts.environments: verifiers:{named} needs verifiers, version 0.4 or later. Run "
            f"`pip install verifiers`"
        ) from None
    try:
        config = vf.taskset_config_type(named)(id=named)
        own = vf.environment_class(vf.EnvConfig(taskset=config))
        taskset = vf.load_taskset(config)
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(
            f"rollouts.environments: verifiers:{named} cannot be loaded: {str(error)[:300]}. Install its package, "
            f"or pass a taskset that you made from Python, with environments="
        ) from None
    if own is not vf.SingleAgentEnv:
        raise ConfigError(f"rollouts.environments: verifiers:{named} has an environment of its own, {_NOT_HERE}")
    return tasks_of(taskset)


def is_taskset(made: Any) -> bool:
    """The object is a taskset of verifiers, which need not be imported to see that."""
    return any(kind.__name__ == "Taskset" and kind.__module__.startswith("verifiers.") for kind in type(made).__mro__)


_NOT_HERE = (
    "which does not run in this process. Let it run as verifiers does, as an agent that asks this policy "
    "(docs/episodes.md), or use a taskset whose prompts, tools and rewards need nothing else"
)


def _check(name: str, task: Any) -> None:
    """Raises ConfigError for a task that needs more than a prompt, tools and rewards."""
    plain, kind = import_module("verifiers.v1").Task, type(task)
    if task.NEEDS_CONTAINER:
        raise ConfigError(f"environment: the tasks of {name} need a container, {_NOT_HERE}")
    if task.data.prompt is None:
        raise ConfigError(f"environment: the tasks of {name} have no prompt: a user of theirs begins, {_NOT_HERE}")
    for hook in ("setup", "finalize"):
        if vars(plain)[hook] is not inspect.getattr_static(kind, hook):
            raise ConfigError(f"environment: the tasks of {name} have a {hook} that works in a container, {_NOT_HERE}")
    for reward in task.hooks("reward"):
        needed = inspect.signature(reward).parameters.get("runtime")
        if needed is not None and needed.default is inspect.Parameter.empty:
            raise ConfigError(f"environment: the reward {reward.__name__} of {name} needs a container, {_NOT_HERE}")


def _tools_of(toolsets: Sequence[Any]) -> dict[str, Tool]:
    """The tools of toolsets under the names that verifiers gives them."""
    from pydantic import create_model  # lazy

    discover_decorated = import_module("verifiers.v1.utils.decorators").discover_decorated
    tools: dict[str, Tool] = {}
    for toolset in toolsets:
        prefix = f"{toolset.server_name}_" if toolset.server_name else ""
        for function in discover_decorated(toolset, "tool"):
            own = vars(function.__func__).get("tool_name") or function.__name__
            fields: dict[str, Any] = {
                name: (
                    _hint(function, name),
                    ... if parameter.default is inspect.Parameter.empty else parameter.default,
                )
                for name, parameter in inspect.signature(function).parameters.items()
            }
            schema = create_model(own, **fields).model_json_schema()
            schema.pop("title", None)
            description = {"name": prefix + own, "description": inspect.getdoc(function) or "", "parameters": schema}
            tools[prefix + own] = Tool(prefix + own, function, {"type": "function", "function": description})
    return tools


def _hint(function: Callable[..., Any], name: str) -> Any:
    return inspect.get_annotations(function.__func__, eval_str=True).get(name, Any)  # type: ignore[attr-defined]


def _plain_state() -> type:
    return import_module("verifiers.v1").State


def _trace_of(task: Any, messages: Sequence[Mapping[str, Any]]) -> Any:
    """An episode as verifiers records one."""
    vf, prompt = import_module("verifiers.v1"), task.data.prompt
    begun = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    if task.data.system_prompt:
        begun = [vf.SystemMessage(content=task.data.system_prompt), *begun]
    nodes = [vf.MessageNode(parent=index - 1 if index else None, message=start) for index, start in enumerate(begun)]
    waiting: list[str] = []
    for message in messages:
        made: Any
        if message["role"] == "assistant":
            waiting = [f"call_{len(nodes)}_{index}" for index in range(len(message.get("tool_calls", ())))]
            calls = [
                vf.ToolCall(id=name, name=call["function"]["name"], arguments=_as_text(call))
                for name, call in zip(waiting, message.get("tool_calls", ()), strict=True)
            ]
            made = vf.AssistantMessage(content=message["content"], tool_calls=calls or None)
        elif message["role"] == "tool" and message["name"]:
            made = vf.ToolMessage(content=message["content"], name=message["name"], tool_call_id=waiting.pop(0))
        else:
            made = vf.UserMessage(content=message["content"])
        is_sampled = message["role"] == "assistant"
        nodes.append(vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=made, sampled=is_sampled))
    record = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key)
    return vf.Trace(task=record, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, is_completed=True, ok=True)


def _as_text(call: Mapping[str, Any]) -> str:
    """The arguments of a call as JSON, as OpenAI has them."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)
