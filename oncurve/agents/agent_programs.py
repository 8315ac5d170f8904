"""Kinds of agents: a function of a row and a client, or a program that is started for each episode."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from oncurve.core.errors import ConfigError, Failure, attempt
from oncurve.episodes.tools import declares
from oncurve.sample.event_loop import EventLoopThread

TAIL = 300
"""Characters of what a program said last that are kept when it fails."""
PARAMETERS = ("row", "client", "base_url", "api_key", "seed")
"""Parameters that a function may have."""


@dataclass(frozen=True)
class AgentTask:
    """An episode as an agent gets it."""

    row: Mapping[str, Any]
    base_url: str
    api_key: str
    seed: int
    """A number that is the same whenever this episode is sampled again."""


Deliver = Callable[[Any], None]
"""Takes what an agent gave for a reward, or the Failure; in any thread, once."""
Stop = Callable[[], None]


class Agent(Protocol):
    """Something that is started for each episode."""

    name: str
    is_deterministic: bool
    """It says of itself that it does the same whenever it is told the same."""

    def start(self, task: AgentTask, loop: EventLoopThread, deliver: Deliver) -> Stop:
        """Begin, without waiting; calling what comes back ends it, as far as that can be done."""
        ...


class FunctionAgent:
    """``async def agent(row, client) -> reward``, or the same without ``async``."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Raises ConfigError for a function that asks for something else."""
        self.function, self.name, self.is_deterministic = function, name, declares(function)
        called = function if inspect.isroutine(function) else type(function).__call__
        self.is_async = inspect.iscoroutinefunction(called)
        needed = [
            parameter for parameter in inspect.signature(function).parameters.values() if parameter.kind in _BY_NAME
        ]
        others = [parameter for parameter in needed if parameter.name not in PARAMETERS]
        self._names = {parameter.name: parameter.name for parameter in needed if parameter.name in PARAMETERS}
        free = [name for name in ("row", "client") if name not in self._names]
        if "base_url" in self._names and "client" in free:
            free.remove("client")
        self._names |= {parameter.name: own for parameter, own in zip(others, free, strict=False)}
        if missing := [
            parameter.name for parameter in others[len(free) :] if parameter.default is inspect.Parameter.empty
        ]:
            raise ConfigError(
                f"agent {name}: nothing is known for its argument {missing[0]!r}. Write "
                f"`async def agent(row, client)`; {', '.join(PARAMETERS)} can be asked for"
            )
        self._openai = _openai(name) if "client" in self._names.values() else None

    def start(self, task: AgentTask, loop: EventLoopThread, deliver: Deliver) -> Stop:
        """In the loop of all async agents, or in a thread of its own, which cannot be ended from outside."""
        if not self.is_async:
            run = partial(attempt, partial(self._run, task))
            threading.Thread(target=lambda: deliver(run()), name="oncurve-agent", daemon=True).start()
            return lambda: None
        future = loop.start(self._run_async(task))
        future.add_done_callback(lambda done: deliver(attempt(done.result)))
        return lambda: _cancel(future)

    def _arguments(self, task: AgentTask, client: Any) -> dict[str, Any]:
        known = {"row": dict(task.row), "client": client, "base_url": task.base_url}
        known |= {"api_key": task.api_key, "seed": task.seed}
        return {name: known[own] for name, own in self._names.items()}

    def _client(self, task: AgentTask, kind: str) -> Any:
        """One that reaches the policy past any proxy of this machine; None where the function asks for none."""
        if self._openai is None:
            return None
        plain = vars(self._openai)[f"Default{kind}HttpxClient"](trust_env=False)
        known = {"base_url": task.base_url, "api_key": task.api_key, "timeout": None, "http_client": plain}
        return vars(self._openai)[f"{kind}OpenAI"](**known)

    def _run(self, task: AgentTask) -> Any:
        client = self._client(task, "")
        try:
            return self.function(**self._arguments(task, client))
        except SystemExit as error:
            raise RuntimeError(f"it called sys.exit({error.code})") from None
        finally:
            if client is not None:
                client.close()

    async def _run_async(self, task: AgentTask) -> Any:
        client = self._client(task, "Async")
        try:
            value = self.function(**self._arguments(task, client))
            return await value if isinstance(value, Awaitable) else value
        except SystemExit as error:
            raise RuntimeError(f"it called sys.exit({error.code})") from None
        finally:
            if client is not None:
                await client.close()


def _openai(name: str) -> Any:
    try:
        return importlib.import_module("openai")
    except ImportError:
        raise ConfigError(
            f"agent {name} asks for a client, which comes from the openai package, and that is not installed. Run `pip "
            f"install openai`, or ask for base_url and api_key"
        ) from None


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _cancel(future: Any) -> None:
    future.cancel()


class ProgramAgent:
    """A program that finds the policy through OPENAI_BASE_URL and OPENAI_API_KEY.

    It reads the row as JSON from its standard input; the last line that it prints is the reward: a number, or JSON with
    "reward" and named parts, or null.
    """

    def __init__(self, command: Sequence[str], *, is_deterministic: bool = False) -> None:
        self.command, self.name, self.is_deterministic = list(command), command[-1], is_deterministic

    def start(self, task: AgentTask, loop: EventLoopThread, deliver: Deliver) -> Stop:
        """Start it; ending it ends whatever it started too."""
        local = ",".join(filter(None, (os.environ.get("NO_PROXY", ""), "127.0.0.1")))
        variables = {
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "ONCURVE_SEED": str(task.seed),
            "NO_PROXY": local,
            "no_proxy": local,
        }
        try:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"rollouts.agent: {self.command[0]!r} cannot be started: {error.strerror or error}. Name a program "
                f"that this machine finds, as in `rollouts.agent={{command: [python, agent.py]}}`"
            ) from None
        row_json = json.dumps(dict(task.row), ensure_ascii=False, default=str).encode("utf-8", errors="replace")
        run = partial(attempt, partial(_whole, process, row_json))
        threading.Thread(target=lambda: deliver(run()), name="oncurve-agent", daemon=True).start()
        return partial(_kill, process)


def _whole(process: subprocess.Popen[bytes], row_json: bytes) -> Any:
    """The reward that a program returns. Raises RuntimeError if it fails or returns anything else."""
    try:
        out, wrong = process.communicate(row_json)
    finally:
        _kill(process)
    if process.returncode:
        tail = " ".join(wrong.decode("utf-8", errors="replace").split())[-TAIL:]
        raise RuntimeError(f"it ended with status {process.returncode}: {tail}")
    lines = [line for line in out.decode("utf-8", errors="replace").splitlines() if line.strip()]
    if not lines:
        return None
    value = attempt(lambda: json.loads(lines[-1]))
    is_reward = value is None or isinstance(value, (int, float)) or (isinstance(value, dict) and "reward" in value)
    if isinstance(value, Failure) or not is_reward:
        raise RuntimeError(
            f'its last line is no reward: {lines[-1][:TAIL]!r}. Print a number, JSON with "reward", or null'
        )
    return value


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
