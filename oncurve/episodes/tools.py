"""Tools: functions that the policy may call, the schemas that it is told, and their answers as text."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from oncurve.core.errors import ConfigError, Failure, attempt
from oncurve.wording import listed

if TYPE_CHECKING:
    from oncurve.sandbox.sessions import PythonSessions

MAX_ANSWER_CHARACTERS = 100_000
"""Characters of an answer that are read; what the policy reads is limited in tokens."""
_ADDRESS = re.compile(r" (object )?at 0x[0-9a-fA-F]{6,}")
"""In how an object prints that says nothing of itself."""
JSON = (dict, list, tuple, int, float, type(None))
"""The types of JSON besides str, which is text already."""


@dataclass(frozen=True)
class Tool:
    """A function, sync or async, with what the policy is told of it."""

    name: str
    call: Callable[..., Any]
    schema: Mapping[str, Any]
    """As chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""
    open: Callable[[], Callable[..., Any]] | None = None
    """Makes what is called in one episode, for a tool that remembers earlier calls of it."""
    close: Callable[[], None] | None = None
    """Gives back what the tool holds, when nothing is sampled any more."""
    is_deterministic: bool = False
    """It says of itself that equal calls get equal answers."""
    limit_seconds: float | None = None
    """Time limit of a call of this tool; None takes that of all tools."""

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Tool:
        """The tool of a function, whose types and docstring make the schema.

        Raises ConfigError where they do not say enough.
        """
        from transformers.utils.chat_template_utils import get_json_schema  # lazy

        if not callable(function):
            raise ConfigError(f"tools: {function!r:.60} cannot be called. Pass functions with types and a docstring")
        if isinstance(function, partial):
            raise ConfigError(f"tools: {function.func!r:.60} is given as a partial. Write a function that calls it")
        is_named = inspect.isroutine(function) or isinstance(function, type)
        own: str = name or (function if is_named else type(function)).__name__  # type: ignore[assignment]
        described = function if is_named else function.__call__  # type: ignore[operator]
        missing = attempt(lambda: _missing(described))
        schema = missing or attempt(lambda: _without_nameless(get_json_schema(described), described))
        if isinstance(schema, (str, Failure)):
            problem = schema if isinstance(schema, str) else schema.detail.rstrip(".!")
            raise ConfigError(
                f"tool {own}: {problem}. The policy reads of a tool its name, the types of its parameters (text, "
                f"numbers, lists and dictionaries of those), and its docstring: what the tool does, then `Args:` "
                f"and below it a line `name: what it is` for each parameter"
            )
        schema_of_tool = {**schema, "function": {**schema["function"], "name": own}}
        hints = {key: hint for key, hint in get_type_hints(described).items() if _names_enum(hint)}
        call = partial(_with_members, function, hints) if hints else function
        return cls(own, call, schema_of_tool, is_deterministic=declares(function))

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The schema of each parameter by its name."""
        return self.schema["function"]["parameters"].get("properties", {})

    @property
    def only_text(self) -> str | None:
        """The one parameter, where it is one text: a call need not name it. None elsewhere."""
        [*named] = self.parameters.items()
        return named[0][0] if len(named) == 1 and named[0][1].get("type") == "string" else None

    def mismatch(self, arguments: Mapping[str, Any]) -> str | None:
        """The fault in the arguments of a call, for whoever made it; None if there is none."""
        required = self.schema["function"]["parameters"].get("required", [])
        if unknown := sorted(arguments.keys() - self.parameters.keys()):
            return f"{self.name} has no argument {', '.join(unknown)}; it takes {', '.join(self.parameters) or 'none'}"
        if missing := [name for name in required if name not in arguments]:
            return f"{self.name} needs the argument {', '.join(missing)}"
        return None


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call as the policy wrote it; without a name it could not be read, and ``problem`` says why."""

    name: str | None
    arguments: Mapping[str, Any]
    written: str
    problem: str = ""


def _missing(function: Any) -> str:
    """The part of a tool's description that is missing; "" where all of it is there."""
    if not function.__doc__:
        return "it has no docstring"
    parameters = inspect.signature(function).parameters.values()
    named = [
        parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name != "self"
    ]
    if untyped := [parameter.name for parameter in named if parameter.annotation is parameter.empty]:
        return f"no type is given for {listed(untyped)}"
    untold = [
        parameter.name
        for parameter in named
        if not re.search(rf"^\s*{parameter.name}\s*(\(.*\))?\s*:", function.__doc__, re.M)
    ]
    return f"its docstring says nothing of {listed(untold)}" if untold else ""


def _without_nameless(schema: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function whose parameters can all be given by name, of which ``**more`` is none.

    Raises TypeError for another function.
    """
    properties = schema["function"]["parameters"]
    known = properties.get("properties", {})
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise TypeError(f"its parameter {name} cannot be given by name, as a call of the policy does")
        if name not in known and parameter.default is parameter.empty:
            raise TypeError(f"its parameter {name} is in no schema. Pass the method of an object, and not of its class")
        if parameter.kind is parameter.VAR_KEYWORD:
            known.pop(name)
            properties["required"] = [required for required in properties.get("required", []) if required != name]
    return schema


def _names_enum(hint: Any) -> bool:
    return (isinstance(hint, type) and issubclass(hint, Enum)) or any(map(_names_enum, get_args(hint)))


def _with_members(function: Callable[..., Any], hints: Mapping[str, Any], /, **arguments: Any) -> Any:
    """Call a function with members of the enumerations that its types name, where a call has their values."""
    return function(**{name: _member(hints.get(name), value) for name, value in arguments.items()})


def _member(hint: Any, value: Any) -> Any:
    """A value of JSON as its type says. Raises ValueError for what is no value of an enumeration."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    inner = [member for member in get_args(hint) if _names_enum(member)]
    if not inner or value is None:
        return value
    if isinstance(value, list):
        return [_member(inner[0], member) for member in value]
    if isinstance(value, dict):
        return {key: _member(inner[-1], member) for key, member in value.items()}
    return _member(inner[0], value)


def declares(thing: Any) -> bool:
    """A function or an environment says of itself that it is ``deterministic``."""
    return inspect.getattr_static(thing, "deterministic", False) is True


def tools_of(functions: Iterable[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Tools by name. Raises ConfigError for two of one name."""
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = function if isinstance(function, Tool) else Tool.of(function)
        if tool.name in tools:
            raise ConfigError(f"two tools are named {tool.name!r}. Rename one of them")
        tools[tool.name] = tool
    return tools


def opened(tools: Mapping[str, Tool]) -> dict[str, Tool]:
    """The tools of one episode."""
    return {name: tool if tool.open is None else replace(tool, call=tool.open()) for name, tool in tools.items()}


def answer_text(value: Any) -> str:
    """A tool's result as text that can be encoded: as it is, as JSON, or as it prints; bytes as UTF-8, whatever they
    are.

    Raises TypeError for an iterator, and for an object that prints as its address in memory.
    """
    if isinstance(value, bytes):
        value = value[:MAX_ANSWER_CHARACTERS].decode("utf-8", errors="replace")
    if isinstance(value, (Iterator, AsyncIterator)):
        raise TypeError(f"it gave a {type(value).__name__}, whose values nobody asks for; return a text or a list")
    if isinstance(value, JSON) or not isinstance(attempt(lambda: _plain(value)), (str, Failure)):
        made = attempt(lambda: json.dumps(value, ensure_ascii=False, default=_plain))
        value = value if isinstance(made, Failure) else made
    if not isinstance(value, str):
        made = attempt(lambda: str(value))
        if not isinstance(made, Failure) and _ADDRESS.search(made):
            raise TypeError(f"it gave {_ADDRESS.sub('', made)[:60]}, which is no text; return what is to be read of it")
        value = f"<{type(value).__name__}>" if isinstance(made, Failure) else made
    return value[:MAX_ANSWER_CHARACTERS].encode("utf-8", errors="replace").decode("utf-8")


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy and torch as JSON has them; anything else as it prints."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def calling(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The answer of a tool as text; to be awaited where it is async."""
    value = function(**arguments)
    return _awaited_text(value) if inspect.isawaitable(value) else answer_text(value)


async def _awaited_text(value: Any) -> str:
    return answer_text(await value)


def python_tool(wall_seconds: float) -> Tool:
    """Python in the sandbox, each call within so many seconds; an episode keeps what its earlier calls defined.

    Raises SandboxUnavailable on a machine where nothing isolates code.
    """
    sessions = _sessions(wall_seconds)
    made = Tool.of(python)
    return replace(
        made,
        open=lambda: sessions.open().run,
        close=sessions.close,
        limit_seconds=_SANDBOX_SECONDS,
    )


def sandboxed_tool(function: Callable[..., Any], wall_seconds: float) -> Tool:
    """A function of somebody's whose calls run its source file in the sandbox, each within so many seconds.

    Raises ConfigError for a function without a source file; SandboxUnavailable where nothing isolates code.
    """
    name = function.__name__ if inspect.isfunction(function) else type(function).__name__
    source = attempt(lambda: Path(inspect.getsourcefile(function) or "").read_text(encoding="utf-8"))
    if isinstance(source, Failure) or vars(sys.modules[function.__module__]).get(name) is not function:
        raise ConfigError(f"tool {name}: only a function at the top of a file can run in the sandbox. Put it there")
    made = Tool.of(function)
    if made.call is not function:
        raise ConfigError(f"tool {name}: in the sandbox a member of an Enum would arrive as text. Write Literal[...]")
    sessions = _sessions(wall_seconds)
    call = partial(sessions.call, source, name)
    return replace(made, call=lambda **arguments: call(arguments), close=sessions.close, limit_seconds=_SANDBOX_SECONDS)


_SANDBOX_SECONDS = 300.0
"""Time limit of a call with its wait for a sandbox; the code in it has a limit of its own."""


def _sessions(wall_seconds: float) -> PythonSessions:
    from oncurve.sandbox.sessions import PythonSessions  # lazy
    from oncurve.sandbox.tiers import choose_isolation  # lazy

    choose_isolation("bubblewrap")
    return PythonSessions(wall_seconds=wall_seconds)


def python(code: str) -> str:
    """
    Runs Python code. What earlier calls defined is still there.

    Args:
        code: The code. What it prints and the value of its last line are shown.

    Returns:
        The output.
    """
    raise NotImplementedError("a session in the sandbox takes its place")


def calculator(expression: str) -> str:
    """
    Works out an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as "(482913 + 77104) * 2".

    Returns:
        The value.
    """
    from oncurve.episodes.calculator import evaluate  # lazy

    return evaluate(expression)


for _function in (calculator, python):
    _function.deterministic = True  # type: ignore[attr-defined]
