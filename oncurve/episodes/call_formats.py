"""Calls of tools as models write them, read without running anything."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from oncurve.core.errors import Failure, attempt
from oncurve.episodes.tools import CallRequest, Tool

Read = Callable[[str, Mapping[str, Tool]], list[CallRequest]]
"""The calls in the text of a turn, those that cannot be read among them; none if the policy called nothing."""

_TAGGED = re.compile(r"<tool>(.*?)(?:</tool>|$)", re.DOTALL)
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^\s<{]+)\s*(?:<arg_key>|$)")
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_INVOKED = re.compile(r"<([^<>\s]*?)invoke name=\"([^\"]+)\"\s*>(.*?)(</\1invoke>|$)", re.DOTALL)
_INVOKED_WITH = re.compile(r"<([^<>\s]*?)parameter name=\"([^\"]+)\"([^>]*)>(.*?)</\1parameter>", re.DOTALL)
_GEMMA = re.compile(r"<\|tool_call>(.*?)(<tool_call\|>|$)", re.DOTALL)
_GEMMA_TEXT = '<|"|>'
_GEMMA_WORD = re.compile(r"[^,:{}\[\]]+")
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(<｜tool▁call▁end｜>|$)", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|</s>|$)", re.DOTALL)
_HARMONY = re.compile(
    r"(?:^|<\|start\|>assistant|<\|channel\|>\w+)\s*to=(?:functions\.)?([^\s<]+)"
    r"(?:(?!<\|(?:message|start|end|call)\|>).)*<\|message\|>(.*?)(?:<\|(?:call|end|start)\|>|$)",
    re.DOTALL,
)
_PYTHON = re.compile(r"<\|tool_call_start\|>(.*?)(<\|tool_call_end\|>|$)", re.DOTALL)
_THOUGHT_ENDS = ("</think>", "[/THINK]", "<channel|>")
_LONGEST_PYTHON = 20_000
"""Characters of a call in Python's form that are parsed."""


def read_tagged(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """``<tool>2+3</tool>`` for one tool of one parameter, else ``<tool>{"name": ..., "arguments": {...}}</tool>``."""
    requests: list[CallRequest] = []
    only = next(iter(tools.values())) if len(tools) == 1 else None
    for match in _TAGGED.finditer(text):
        inside, whole = match.group(1), match.group(0)
        if not whole.endswith("</tool>"):
            requests.append(CallRequest(None, {}, whole, "the call has no </tool>"))
        elif only is not None and len(only.parameters) == 1 and not inside.lstrip().startswith("{"):
            [(name, schema)] = only.parameters.items()
            requests.append(CallRequest(only.name, {name: _typed(inside.strip(), schema)}, inside))
        else:
            requests.append(_from_json(inside))
    return requests


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
    requests: list[CallRequest] = []
    for match in _FUNCTION.finditer(_spoken(text)):
        name, inside = match.group(1), match.group(2)
        if not match.group(0).endswith("</function>"):
            requests.append(CallRequest(None, {}, match.group(0), "the call has no </function>"))
            continue
        known = tools[name].parameters if name in tools else {}
        arguments = {key: _typed(value, known.get(key, {})) for key, value in _PARAMETER.findall(inside)}
        requests.append(CallRequest(name, arguments, match.group(0)))
    return requests


def read_bare(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """One JSON object with "name" and "parameters" as the whole turn, as Llama 3 writes."""
    turn = _spoken(text).strip().removeprefix("<|python_tag|>").strip()
    if not turn.startswith("{") or '"name"' not in turn:
        return []
    return [_from_json(turn)]


def read_glm(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """``<tool_call>name`` and pairs of ``<arg_key>``, ``<arg_value>``, as GLM-4.5 writes."""
    requests: list[CallRequest] = []
    for match in _HERMES.finditer(_spoken(text)):
        whole, inside = match.group(0), match.group(1)
        named = _GLM_NAME.match(inside)
        if named is None or not whole.endswith("</tool_call>"):
            requests.append(CallRequest(None, {}, whole, "the call has no name or no </tool_call>"))
            continue
        name = named.group(1)
        requests.append(CallRequest(name, _all_typed(name, _GLM_ARGUMENT.findall(inside), tools), whole))
    return requests


def read_invoked(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """``<invoke name="f"><parameter name="key">value</parameter></invoke>``, as MiniMax and DeepSeek-V3.2 write."""
    requests: list[CallRequest] = []
    for match in _INVOKED.finditer(_spoken(text)):
        name, inside, whole = match.group(2), match.group(3), match.group(0)
        if not match.group(4):
            requests.append(CallRequest(None, {}, whole, "the call has no end"))
            continue
        pairs = [(key, value) for _, key, _, value in _INVOKED_WITH.findall(inside)]
        requests.append(CallRequest(name, _all_typed(name, pairs, tools), whole))
    return requests


def read_gemma(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>``, as Gemma 4 writes."""
    requests: list[CallRequest] = []
    for match in _GEMMA.finditer(_spoken(text)):
        name, brace, inside = match.group(1).removeprefix("call:").partition("{")
        value = attempt(lambda inside=inside: _gemma_value("{" + inside, 0)[0], log=False)
        if not (brace and match.group(2)) or not isinstance(value, dict):
            requests.append(CallRequest(None, {}, match.group(0), "the call is not call:name{key:value}<tool_call|>"))
        else:
            requests.append(CallRequest(name.strip(), value, match.group(0)))
    return requests


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    """A value of Gemma's form and where it ends. Raises ValueError for what is none."""
    if text.startswith(_GEMMA_TEXT, at):
        start = at + len(_GEMMA_TEXT)
        end = text.index(_GEMMA_TEXT, start)
        return text[start:end], end + len(_GEMMA_TEXT)
    if text[at : at + 1] in ("{", "["):
        close, items, pairs = {"{": "}", "[": "]"}[text[at]], [], {}
        at += 1
        while text[at : at + 1] != close:
            value, at = _gemma_value(text, at)
            if close == "}":
                if text[at : at + 1] != ":":
                    raise ValueError("a key without a value")
                pairs[str(value)], at = _gemma_value(text, at + 1)
            else:
                items.append(value)
            at += text[at : at + 1] == ","
        return (pairs if close == "}" else items), at + 1
    word = _GEMMA_WORD.match(text, at)
    if word is None:
        raise ValueError("no value")
    return _typed(word.group().strip(), {}), word.end()


def read_deepseek(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """A call between DeepSeek's marks: V3 and R1 fence its arguments behind the name, V3.1 writes them bare."""
    requests: list[CallRequest] = []
    for match in _DEEPSEEK.finditer(_spoken(text)):
        head, _, rest = match.group(1).partition("<｜tool▁sep｜>")
        name, fence, fenced = rest.partition("\n```json\n")
        name, arguments = (name, fenced.strip().removesuffix("```")) if fence else (head, rest)
        requests.append(_named(name, arguments, match.group(0), ended=bool(match.group(2))))
    return requests


def read_mistral(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` of newer ones."""
    requests: list[CallRequest] = []
    for match in _MISTRAL.finditer(_spoken(text)):
        inside = match.group(1).strip()
        name, args, arguments = inside.partition("[ARGS]")
        if args:
            requests.append(_named(name.partition("[CALL_ID]")[0], arguments, inside, ended=True))
            continue
        listed = attempt(lambda inside=inside: json.loads(inside), log=False)
        calls = listed if isinstance(listed, list) else [inside]
        requests += [_from_json(json.dumps(call) if isinstance(call, dict) else str(call)) for call in calls]
    return requests


def read_harmony(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """``to=functions.name<|channel|>commentary json<|message|>{...}<|call|>``, as gpt-oss writes."""
    return [_named(match.group(1), match.group(2), match.group(0), ended=True) for match in _HARMONY.finditer(text)]


def read_python(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
    """``<|tool_call_start|>[name(key='value')]<|tool_call_end|>``, as LFM2 writes. It is parsed, and never run."""
    requests: list[CallRequest] = []
    for match in _PYTHON.finditer(_spoken(text)):
        whole, inside = match.group(0), match.group(1).strip()
        calls = attempt(lambda inside=inside: _python_calls(inside), log=False)
        if isinstance(calls, Failure) or not match.group(2):
            requests.append(CallRequest(None, {}, whole, "the call is not [name(key=value)]<|tool_call_end|>"))
        else:
            requests += [CallRequest(name, arguments, whole) for name, arguments in calls]
    return requests


def _python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    if len(text) > _LONGEST_PYTHON:
        raise ValueError("too long")
    parsed: Any = ast.parse(text, mode="eval").body
    listed = parsed.elts if isinstance(parsed, (ast.List, ast.Tuple)) else [parsed]
    calls = [call for call in listed if isinstance(call, ast.Call) and not call.args]
    if len(calls) < len(listed):
        raise ValueError("not a list of calls with named arguments")
    return [
        (ast.unparse(call.func), {str(keyword.arg): _python_value(keyword.value) for keyword in call.keywords})
        for call in calls
    ]


def _python_value(node: ast.expr) -> Any:
    """A literal; true, false and null of JSON are read too."""
    constants = {"true": True, "false": False, "null": None}
    return constants[node.id] if isinstance(node, ast.Name) and node.id in constants else ast.literal_eval(node)


FORMATS: dict[str, Read] = {
    "hermes": read_hermes,
    "functions": read_functions,
    "glm": read_glm,
    "gemma": read_gemma,
    "deepseek": read_deepseek,
    "mistral": read_mistral,
    "harmony": read_harmony,
    "python": read_python,
    "invoke": read_invoked,
    "bare": read_bare,
}
"""The forms in which chat models call tools."""
MARKS = {"python": "<|tool_call_start|>", "mistral": "[TOOL_CALLS]"}
"""Marks in a template whose models write calls that the template itself never renders."""


def learned_format(turn: str, name: str, arguments: Mapping[str, Any]) -> Read | None:
    """The call format of a template that is not known: arguments as JSON somewhere behind the name.

    ``turn`` is its call of ``name`` with ``arguments``. None where it does not write them so.
    """
    before, separator, behind = turn.partition(name)
    start = behind.find("{")
    parsed = attempt(lambda: json.JSONDecoder().raw_decode(behind, start), log=False)
    if not separator or start < 0 or isinstance(parsed, Failure) or parsed[0] != arguments:
        return None
    mark = before.rpartition("</think>")[2].strip()[-40:]
    if not mark:
        return None
    between = behind[:start]
    form = re.compile(re.escape(mark) + r"\s*([\w.-]+)" + r"\s*".join(map(re.escape, between.split())) + r"\s*(?=\{)")

    def read(text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
        spoken = _spoken(text)
        calls: list[CallRequest] = []
        for match in form.finditer(spoken):
            made = attempt(lambda match=match: json.JSONDecoder().raw_decode(spoken, match.end())[1], log=False)
            end = len(spoken) if isinstance(made, Failure) else made
            calls.append(_named(match.group(1), spoken[match.end() : end], spoken[match.start() : end], ended=True))
        return calls

    return read


def _spoken(text: str) -> str:
    """A turn without its thoughts: a call that is only thought of is none."""
    return text[max(text.rfind(mark) + len(mark) if mark in text else 0 for mark in _THOUGHT_ENDS) :]


def _named(name: str, arguments: str, written: str, *, ended: bool) -> CallRequest:
    """A call whose arguments are the text of a JSON object."""
    if not ended:
        return CallRequest(None, {}, written, "the call has no end")
    made = attempt(lambda: json.loads(arguments), log=False)
    if not isinstance(made, dict):
        return CallRequest(None, {}, written, f"the arguments of {name.strip()[:60]} are not a JSON object")
    return CallRequest(name.strip(), made, written)


def _all_typed(name: str, pairs: list[tuple[str, str]], tools: Mapping[str, Tool]) -> dict[str, Any]:
    known = tools[name].parameters if name in tools else {}
    return {key: _typed(value, known.get(key, {})) for key, value in pairs}


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
