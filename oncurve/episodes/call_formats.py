"""Calls of tools as models write them, read without running anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from oncurve.episodes.tools import CallRequest, Tool

Read = Callable[[str, Mapping[str, Tool]], list[CallRequest]]
"""The calls in the text of a turn, those that cannot be read among them; none if the policy called nothing."""

_TAGGED = re.compile(r"<tool>(.*?)(?:</tool>|$)", re.DOTALL)
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_tagged(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """``<tool>2+3</tool>`` for one tool of one parameter, else ``<tool>{"name": ..., "arguments": {...}}</tool>``."""
    found: list[CallRequest] = []
    only = next(iter(tools.values())) if len(tools) == 1 else None
    for match in _TAGGED.finditer(text):
        inside, whole = match.group(1), match.group(0)
        if not whole.endswith("</tool>"):
            found.append(CallRequest(None, {}, whole, "the call has no </tool>"))
        elif only is not None and len(only.parameters) == 1 and not inside.lstrip().startswith("{"):
            [(name, schema)] = only.parameters.items()
            found.append(CallRequest(only.name, {name: _typed(inside.strip(), schema)}, inside))
        else:
            found.append(_from_json(inside))
    return found


def read_hermes(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes, Qwen2.5 and Qwen3 write."""
    return [
        _from_json(match.group(1))
        if match.group(0).endswith("</tool_call>")
        else CallRequest(None, {}, match.group(0), "the call has no </tool_call>")
        for match in _HERMES.finditer(_spoken(text))
    ]


def read_functions(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """``<function=name><parameter=key>value</parameter></function>``, as Qwen3-Coder and Qwen3.5 write."""
    found: list[CallRequest] = []
    for match in _FUNCTION.finditer(_spoken(text)):
        name, inside = match.group(1), match.group(2)
        if not match.group(0).endswith("</function>"):
            found.append(CallRequest(None, {}, match.group(0), "the call has no </function>"))
            continue
        known = tools[name].parameters if name in tools else {}
        arguments = {key: _typed(value, known.get(key, {})) for key, value in _PARAMETER.findall(inside)}
        found.append(CallRequest(name, arguments, match.group(0)))
    return found


def read_bare(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """One JSON object with "name" and "parameters" as the whole turn, as Llama 3 writes."""
    said = _spoken(text).strip().removeprefix("<|python_tag|>").strip()
    if not said.startswith("{") or '"name"' not in said:
        return []
    return [_from_json(said)]


FORMATS: dict[str, Read] = {"hermes": read_hermes, "functions": read_functions, "bare": read_bare}
"""The forms in which chat models call tools."""


def _spoken(text: str) -> str:
    """A turn without its thoughts: a call that is only thought of is none."""
    return text.rpartition("</think>")[2]


def _from_json(text: str) -> CallRequest:
    try:
        made = json.loads(text)
    except (ValueError, RecursionError) as error:
        return CallRequest(None, {}, text, f"the call is not JSON: {str(error)[:100]}")
    if not isinstance(made, dict) or not isinstance(made.get("name"), str):
        return CallRequest(None, {}, text, 'the call is not an object with "name" and "arguments"')
    arguments = made.get("arguments", made.get("parameters", {}))
    if not isinstance(arguments, dict):
        return CallRequest(None, {}, text, "the arguments are not an object")
    return CallRequest(made["name"], arguments, text)


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """A value that stands there as text: as it is for a text, else as JSON if it is some."""
    if schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
