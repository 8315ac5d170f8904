"""Requests for a chat completion in OpenAI's form: what is read, what is ignored, what is refused.

In training, the recipe says how tokens are drawn. A request that asks for another temperature is answered all the same,
and the answer says that this was ignored; what would have to change the answer itself is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oncurve.core.errors import single_line
from oncurve.core.records import CUTS
from oncurve.episodes.tools import Tool

DRAWING = ("temperature", *CUTS, "seed", "presence_penalty", "frequency_penalty")
"""Settings of sampling, which the recipe decides in training."""
HARMLESS = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
    "reasoning_effort", "verbosity", "timeout",
)  # fmt: skip
"""Parameters that change nothing here."""
READ = ("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream", "stream_options")
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "logit_bias": ({},),
    "logprobs": (False, True),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "tool_choice": ("auto", "none"),
}
"""Parameters that are taken with these values alone, or as null."""
INSTEAD = {
    "n": "ask as often as you want completions",
    "stop": "set rollouts.stop in the recipe",
    "functions": "use tools",
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
"""Names of tools."""


class ChatError(Exception):
    """A request that gets an error for an answer, in OpenAI's form."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """As it is sent."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A call of a tool in a message."""

    call_id: str
    name: str
    arguments: str
    """As JSON."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as far as it matters."""

    role: str
    """system, user, assistant or tool."""
    content: str
    calls: tuple[ChatCall, ...] = ()
    answers: str = ""
    """In the message of a tool: the id of the call that it answers."""
    name: str = ""

    def is_like(self, other: Message) -> bool:
        """They say the same; white space around what the policy wrote does not matter."""
        if self.role == "assistant":
            mine, theirs = self.content.strip(), other.content.strip()
            return other.role == "assistant" and mine == theirs and self.calls == other.calls
        return self == other


@dataclass(frozen=True)
class ChatRequest:
    """A chat request of an agent."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """As chat templates take them."""
    may_call: bool = False
    """There are tools, and calls of them are read."""
    model: str = ""
    max_tokens: int | None = None
    is_stream: bool = False
    wants_usage: bool = False
    """The stream ends with the numbers of tokens."""
    wants_logprobs: bool = False
    ignored: tuple[str, ...] = ()
    """Parameters that were given and change nothing."""
    drawing: Mapping[str, Any] = field(default_factory=dict)
    """The request's own settings of sampling, for a server on which nothing is trained."""

    @property
    def known_tools(self) -> dict[str, Tool]:
        """The tools by name, for reading calls of them."""
        named = {str(schema["function"]["name"]): schema for schema in self.tools}
        return {name: Tool(name, _not_here, schema) for name, schema in named.items()}


def _not_here(**arguments: Any) -> Any:
    raise NotImplementedError("the agent calls its tools itself")


def read_chat(body: Any) -> ChatRequest:
    """A request from the body that was sent. Raises ChatError that says which parameter is wrong."""
    if not isinstance(body, dict):
        raise ChatError("the body must be a JSON object")
    values = {name: value for name, value in body.items() if value is not None}
    for name, value in values.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            instead = INSTEAD.get(name, "leave it out")
            raise ChatError(f"{name}={_short(value)} is not offered; {instead}", code="unsupported_value", param=name)
        if name not in (*READ, *NEUTRAL, *DRAWING, *HARMLESS):
            raise ChatError(f"unknown parameter {name!r}; leave it out", code="unknown_parameter", param=name)
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages must be a list with at least one message", param="messages")
    read = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    if read[-1].role == "assistant":
        raise ChatError(
            "the last message is the assistant's, and it cannot be continued; end with another", param="messages"
        )
    limits = [_count(values, name) for name in ("max_tokens", "max_completion_tokens") if name in values]
    options = values.get("stream_options", {})
    return ChatRequest(
        messages=read,
        tools=(tools := _tools(values.get("tools", []))),
        may_call=bool(tools) and values.get("tool_choice") != "none",
        model=str(values.get("model", "")),
        max_tokens=min(limits) if limits else None,
        is_stream=bool(values.get("stream", False)),
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        wants_logprobs=bool(values.get("logprobs", False)),
        ignored=tuple(name for name in values if name in DRAWING),
        drawing={name: values[name] for name in values if name in DRAWING},
    )


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        raise ChatError(f"{where} needs a role: {', '.join(ROLES)}", param=where)
    role = ROLES[value["role"]]
    calls = _calls(value.get("tool_calls") or [], f"{where}.tool_calls") if role == "assistant" else ()
    content = _content(value.get("content"), f"{where}.content", needed=not calls)
    name = value.get("name") or ""
    if not isinstance(name, str) or (name and not NAME.fullmatch(name)):
        raise ChatError(f"{where}.name is {_short(name)}; use letters, digits, and _.-", param=f"{where}.name")
    answers = value.get("tool_call_id") or ""
    return Message(role, content, calls, str(answers) if role == "tool" else "", name)


def _content(value: Any, where: str, *, needed: bool) -> str:
    """Text, or the texts of parts."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
        if not all(isinstance(part, str) for part in parts):
            raise ChatError(f"{where} holds something else than text, which this model cannot read", param=where)
        value = "".join(str(part) for part in parts)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        raise ChatError(f"{where} must be text", param=where)
    return value.encode("utf-8", errors="replace").decode("utf-8")


def _calls(value: Any, where: str) -> tuple[ChatCall, ...]:
    calls: list[ChatCall] = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not NAME.fullmatch(str(function.get("name"))):
            raise ChatError(f"{where}: a call needs a function with a name and arguments", param=where)
        arguments = function.get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(ChatCall(str(call.get("id", "")), function["name"], text))
    return tuple(calls)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise ChatError("tools must be a list", param="tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not NAME.fullmatch(str(function.get("name"))):
            raise ChatError(
                f"tools[{index}] must be a function with a name of letters, digits, and _.-", param=f"tools[{index}]"
            )
    return tuple(
        {"type": "function", "function": {"description": "", "parameters": {"type": "object", "properties": {}}}
         | tool["function"]}
        for tool in value
    )  # fmt: skip


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ChatError(f"{name} is {_short(value)}; it must be a whole number of at least 1", param=name)
    return value


def _short(value: Any) -> str:
    return f"{value!r:.60}"


def read_body(text: str) -> ChatRequest:
    """A request from the text that was sent. Raises ChatError."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"the body is no JSON: {single_line(error)}") from None
    return read_chat(body)


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Raises ChatError for arguments that are no JSON."""
    written: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name:
            entry["name"] = message.name
        if message.answers:
            entry["tool_call_id"] = _nine_letters(message.answers)
        if message.calls:
            entry["tool_calls"] = [
                {
                    "id": _nine_letters(call.call_id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _parsed(call.arguments)},
                }
                for call in message.calls
            ]
        written.append(entry)
    return written


def _nine_letters(call_id: str) -> str:
    """An identifier of the length that Mistral's templates ask for; others leave identifiers out."""
    return hashlib.blake2b(call_id.encode()).hexdigest()[:9]


def _parsed(arguments: str) -> Any:
    """Templates write arguments as JSON themselves."""
    try:
        made = json.loads(arguments)
    except (ValueError, RecursionError):
        raise ChatError("the arguments of a call are no JSON", param="messages") from None
    if not isinstance(made, dict):
        raise ChatError("the arguments of a call must be a JSON object", param="messages")
    return made
