"""Environments: objects in which an episode happens, as people write them for TRL, Gymnasium and GEM.

With methods as tools (TRL): ``reset(**row)`` begins an episode and may give a text, every other public method is a
tool, ``get_reward()`` scores it. With steps (Gymnasium for text, GEM): ``reset()`` gives (observation, info),
``step(text)`` gives (observation, reward, terminated, truncated, info), and the policy's whole turn is the action.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

from oncurve.core.errors import ConfigError, Failure, attempt
from oncurve.core.records import NOT_APPLICABLE, Reward
from oncurve.episodes.tools import Tool, answer_text, declares
from oncurve.episodes.workers import Calls

RESERVED = ("reset", "get_reward", "close", "step")
"""Methods that are no tools; ``step`` is one where there is a ``get_reward`` or where reset is not Gymnasium's."""
DEAD = ("MemoryError", "EOFError", "ConnectionError", *(kind.__name__ for kind in ConnectionError.__subclasses__()))
"""Exceptions that say that an environment is gone, and not that a call of it was wrong."""
NO_REWARD = "its environment gave no reward. Let get_reward, or some step, return a number"
Factory = Callable[[], Any]


class AdaptedEnvironment:
    """Around an environment of another library: tools with schemas of their own, and a score of the conversation."""

    tools: Mapping[str, Tool]

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        """The episode's reward, from the policy's words, its calls and their answers as chat messages."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kind:
    """Traits of a factory's environments, known before one is used."""

    name: str
    factory: Factory
    has_steps: bool
    """The policy's whole turn is an action; there are no tools."""
    tools: Mapping[str, Tool]
    """Their schemas; each instance has its own functions."""
    gives_reward: bool
    is_deterministic: bool = False
    """Its environments say of themselves that the same calls after the same reset get the same answers."""
    class_name: str = ""
    """That of the objects that the factory makes."""

    @classmethod
    def of(cls, name: str, factory: Factory) -> Kind:
        """Make one environment, look at it, and close it.

        Raises ConfigError for an object that is none.
        """
        if not callable(factory):
            kind = type(factory).__name__
            raise ConfigError(
                f"environment {name}: it is a {kind} object. Give its class, or a function that makes one"
            )
        made = attempt(factory)
        if isinstance(made, Failure):
            raise ConfigError(f"environment {name}: it is made without arguments, and that failed: {made.detail}")
        try:
            methods = public_methods(made)
            if problem := _problem_of(made, methods):
                raise ConfigError(f"environment {name}: {problem}")
            if "reset" not in methods:
                raise ConfigError(
                    f"environment {name}: {type(made).__name__} has no reset method. Write reset(self, **row), which "
                    f"begins an episode, and a public method for each tool (docs/episodes.md)"
                )
            has_steps = "step" in methods and "get_reward" not in methods and is_step(methods["step"])
            tools = {} if has_steps else methods_as_tools(made, where=f"environment {name}: ")
            scores = has_steps or "get_reward" in methods or isinstance(made, AdaptedEnvironment)
            return cls(name, factory, has_steps, tools, scores, declares(made), type(made).__name__)
        finally:
            close_now(made)


@dataclass(eq=False)
class Environment:
    """One environment in one episode. Its methods are called from one thread at a time."""

    kind: Kind
    inner: Any
    tools: dict[str, Tool] = field(default_factory=dict)
    earned: float = 0.0
    """Rewards of its steps so far."""
    is_paid: bool | None = None
    """A step of it gave a reward; None before the first step."""
    is_done: bool = False

    @classmethod
    def begin(cls, kind: Kind, row: Mapping[str, Any], seed: int) -> Any:
        """A new environment and its first words, which may be none; to be awaited where reset is async."""
        environment = cls(kind, kind.factory())
        try:
            environment.tools = {} if kind.has_steps else methods_as_tools(environment.inner)
            text = answer_of(environment.inner.reset, {"seed": seed, **row} if kind.has_steps else dict(row), seed)
        except BaseException:
            close_now(environment.inner)
            raise
        return _begun(environment, text) if inspect.isawaitable(text) else (environment, first_observation(text))

    def step(self, action: str) -> Any:
        """The observation after an action, to be awaited where step is async.

        Gymnasium's step gives five values, that of the older Gym four: observation, reward, done, info, of which the
        last may be missing. They may also be a dictionary or an object with these names, as OpenEnv's step result.
        """
        returned = self.inner.step(action)
        return self._stepped_later(returned) if inspect.isawaitable(returned) else self._stepped(returned)

    async def _stepped_later(self, returned: Any) -> str:
        return self._stepped(await returned)

    def _stepped(self, returned: Any) -> str:
        returned = _by_name(returned)
        if not isinstance(returned, (tuple, list)) or len(returned) not in (3, 4, 5):
            description = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else type(returned).__name__
            raise TypeError(
                f"step gave {description}; return (observation, reward, terminated, truncated, info) or (observation, "
                f"reward, done, info)"
            )
        observation, reward, *ended = returned
        ended = ended[:2] if len(returned) == 5 else ended[:1]
        for name, value in (("reward", reward), *(("end", flag) for flag in ended)):
            if isinstance(value, (str, Mapping)):
                raise TypeError(f"step gave the {name} {value!r:.60}; return a number and True or False")
        if reward is not None:  # a step may leave the reward to a later one
            self.earned += float(reward)
        self.is_paid = bool(self.is_paid) or reward is not None
        self.note_done()
        self.is_done = self.is_done or any(map(bool, ended))
        return text_of(observation)

    def note_done(self) -> None:
        """An environment that has an attribute or a property ``done`` ends its episode by it, whatever its type."""
        done = getattr(self.inner, "done", False)
        self.is_done = self.is_done or (not callable(done) and bool(done))

    def reward(self, messages: Callable[[], Sequence[Mapping[str, Any]]]) -> Any:
        """The reward of the episode with its ``messages``, as the environment says; may have to be awaited."""
        if isinstance(self.inner, AdaptedEnvironment):
            return self.inner.score(messages())
        if self.kind.has_steps:
            return None if self.is_paid is False else self.earned
        return self.inner.get_reward()


async def _begun(environment: Environment, text: Any) -> tuple[Environment, str]:
    return environment, first_observation(await text)


def first_observation(returned: Any) -> str:
    """The text that reset gave: nothing, an observation, or an observation with further facts."""
    return text_of(returned[0] if isinstance(returned, tuple) and returned else _by_name(returned, is_first=True))


def text_of(observation: Any) -> str:
    """An observation as text; of messages of a chat, what they say."""
    if observation is None:
        return ""
    messages = observation if isinstance(observation, list) else [observation]
    if messages and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages):
        return "\n".join(text_of(message["content"]) for message in messages)
    return answer_text(observation)


def _by_name(returned: Any, *, is_first: bool = False) -> Any:
    """The result of a step, a dictionary or an object with names in Gymnasium's order; anything else as it is.

    The result of reset is the observation alone.
    """
    named = returned if isinstance(returned, Mapping) else attempt(lambda: vars(returned))
    if isinstance(named, Failure) or "observation" not in named or not (is_first or "reward" in named):
        return returned
    if is_first:
        return named["observation"]
    ended = [named[name] for name in ("done", "terminated", "truncated") if name in named]
    return (named["observation"], named["reward"], any(map(bool, ended)), named.get("info"))


def has_died(failure: Failure) -> bool:
    """The exception says that the environment is gone."""
    return failure.detail.partition(":")[0] in DEAD


def public_methods(made: Any) -> dict[str, Callable[..., Any]]:
    """The methods of an object that do not begin with an underscore. Its properties are not asked."""
    attributes = {}
    for name in dir(made):
        kind = inspect.getattr_static(type(made), name, None)
        if not name.startswith("_") and not isinstance(kind, (property, cached_property)):
            attributes[name] = attempt(partial(attrgetter(name), made))
    return {name: method for name, method in attributes.items() if inspect.isroutine(method)}


def methods_as_tools(made: Any, *, where: str = "") -> dict[str, Tool]:
    """A tool for every public method, or those that an adapter knows; ``where`` begins messages.

    Raises ConfigError for a method that can be none.
    """
    if isinstance(made, AdaptedEnvironment):
        return dict(made.tools)
    tools = {}
    for name, method in public_methods(made).items():
        if name in RESERVED[:3] or isinstance(made, type):
            continue
        try:
            tools[name] = Tool.of(method)
        except ConfigError as error:
            owner = next((kind for kind in type(made).__mro__ if name in vars(kind)), type(made))
            remedy = (
                "Every public method is a tool; let the name of one that is none begin with an underscore"
                if owner is type(made)
                else f"It comes from {owner.__name__}, whose methods would all be tools: keep such an object as an "
                f"attribute instead"
            )
            raise ConfigError(f"{where}{error}. {remedy}") from None
    return tools


def _problem_of(made: Any, methods: Mapping[str, Callable[..., Any]]) -> str | None:
    """The objection to an environment that counts on a call which nothing here makes; None where there is none."""
    if {"__enter__", "__aenter__"} & {*dir(type(made))} and "close" not in methods:
        return "it is a context manager, which nothing enters. Open what it needs in reset, and write close(self)"
    if "get_reward" not in methods:
        has = inspect.getattr_static(made, "get_reward", None) is not None
        return "its get_reward is no method, and is called as one. Write get_reward(self)" if has else None
    needed = [
        parameter.name
        for parameter in inspect.signature(methods["get_reward"]).parameters.values()
        if _is_needed(parameter)
    ]
    if needed:
        return f"its get_reward needs {', '.join(needed)}, and gets nothing. Keep what it needs in reset(self, **row)"
    return None


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


def is_step(method: Callable[..., Any]) -> bool:
    """Takes one action, as Gymnasium's step does."""
    return sum(map(_is_needed, inspect.signature(method).parameters.values())) == 1


def answer_of(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> Any:
    """Reset with the columns that it takes, and with a ``seed`` of its own if it takes one and the row has none."""
    parameters = inspect.signature(reset).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {key: value for key, value in row.items() if takes_all or key in parameters}
    if "seed" in parameters:
        arguments.setdefault("seed", seed)
    return reset(**arguments)


def reward_of(value: Any) -> Reward:
    """A reward from what an environment gave: a number, None (not applicable), or a dictionary with "reward" and named
    parts.

    Raises TypeError or ValueError for anything else.
    """
    if value is None:
        return Reward(None, error=NOT_APPLICABLE, detail=NO_REWARD)
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise ValueError(f"get_reward gave {sorted(map(str, value))} without 'reward'")
        parts = {str(key): part for key, part in value.items() if key != "reward" and not isinstance(part, str)}
        return Reward(float(value["reward"]), {key: float(part) for key, part in parts.items()})
    return Reward(float(value))


def close(made: Any) -> Any:
    """Let an environment give back what it holds, if it says how; to be awaited where its close is async.

    A failure of that changes nothing any more.
    """
    method = public_methods(made).get("close")
    return None if method is None else attempt(method)


def close_now(made: Any) -> None:
    """The same at once, for one that no episode has used."""
    if inspect.isawaitable(closing := close(made)):
        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop that runs
            attempt(thread.submit(asyncio.run, _finished(closing)).result)


async def _finished(closing: Any) -> None:
    await closing


def close_all(environments: Sequence[Any], calls: Calls, limit_seconds: float) -> None:
    """Close environments, each within its limit of seconds, all at the same time."""
    left = len(environments)

    def closed(result: Any, seconds: float) -> None:
        nonlocal left
        left -= 1

    for made in environments:
        calls.submit(partial(close, made), limit_seconds=limit_seconds, deliver=closed)
    while left:
        calls.collect(wait=True)
