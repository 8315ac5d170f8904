"""Reward for tool calls: valid under their signatures, and the right ones. None is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.answer_locations import MAX_TEXT_CHARACTERS
from oncurve.rewards.json_schema import failure_of, gold_failure, paid, value_of
from oncurve.rewards.late_graders import ToolCallsReward
from oncurve.rewards.strict_json import Around, fields_fraction, json_of, json_text, parse_json, without_nulls
from oncurve.rewards.thinking import after_thinking, spoken_text
from oncurve.rewards.validation import Level, SchemaCheck, SchemaChecker, SchemaVerdict

MAX_CALLS = 64
_COMBINING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties")
_TYPES = {
    "str": "string", "string": "string", "text": "string", "char": "string", "int": "integer", "integer": "integer",
    "long": "integer", "float": "number", "double": "number", "number": "number", "bool": "boolean",
    "boolean": "boolean", "list": "array", "array": "array", "arraylist": "array", "tuple": "array", "set": "array",
    "dict": "object", "object": "object", "hashmap": "object", "none": "null", "null": "null",
}  # fmt: skip
"""Names of types in the data sets xLAM and BFCL, which are those of Python and Java, and of JSON Schema."""
_SEVERITY: tuple[Level, ...] = ("crashed", "timeout", "unusable", "over_limit", "invalid", "keys", "valid")


@dataclass(frozen=True, slots=True)
class Call:
    """One call: ``Call("add", {"a": 2, "b": 3})``."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Task:
    """The calls of one completion, and those that its row declares and expects."""

    calls: tuple[Call, ...] | None
    """None if the calls cannot be read."""
    signatures: Mapping[str, str]
    """The schema of the arguments by the name of the tool, as JSON text."""
    gold: tuple[Call, ...] | None = None
    """None if the row has no reference."""
    problem: str = ""
    is_row_at_fault: bool = False
    is_struct: bool = False
    """The reference is no text but a value, in which nulls may stand for arguments that are not there."""


def openai_calls(text: str, *, around: Around = "nothing") -> tuple[Call, ...]:
    """The calls of a list in OpenAI's format, or of a message with such a list under "tool_calls".

    Raises ValueError.
    """
    json_part = json_text(text, around=around)
    if json_part is None:
        raise ValueError("text where only tool calls may stand")
    return calls_of(parse_json(json_part))


def hermes_calls(text: str, *, around: Around = "nothing") -> tuple[Call, ...]:
    """The calls between ``<tool_call>`` and ``</tool_call>``; a text without either calls nothing.

    With ``around="nothing"`` only space may stand beside the blocks of a text that has some. A fence is plain text.

    Raises ValueError.
    """
    values = (parse_json(piece.strip()) for piece in _tagged(text, around, _between_tags))
    calls = ({**value, "arguments": {}} if _is_bare_name(value) else value for value in values)
    return _limited([_call_of(call, is_text_allowed=False) for call in calls])


def _is_bare_name(value: Any) -> bool:
    """A call without arguments, which models of Hermes' format write for a tool that needs none."""
    return isinstance(value, dict) and set(value) == {"name"}


def qwen_coder_calls(text: str, signatures: Mapping[str, str], *, around: Around = "nothing") -> tuple[Call, ...]:
    """The calls that Qwen3-Coder writes: ``<tool_call><function=NAME><parameter=KEY>value</parameter></function>``.

    A value is text; where the tool's schema declares another type, it is read as JSON.

    Raises ValueError.
    """
    return _limited([_qwen_coder_call(piece, signatures) for piece in _tagged(text, around, _between_plain_tags)])


def _tagged(text: str, around: Around, split: Callable[[str], tuple[list[str], list[str]]]) -> list[str]:
    """The texts inside of the tags behind the thinking; ``split`` gives those outside and those inside.

    Raises ValueError.
    """
    text = after_thinking(text)
    if len(text) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"longer than {MAX_TEXT_CHARACTERS} characters")
    outside, inside = split(text)
    if inside and around != "text" and any(piece.strip() for piece in outside):
        raise ValueError("text where only tool calls may stand")
    return inside


def _between_plain_tags(text: str) -> tuple[list[str], list[str]]:
    """The texts outside of the tags and inside of them, where no tag may stand. Raises ValueError where one does."""
    pieces = re.split(r"<tool_call>(.*?)</tool_call>", text, flags=re.DOTALL)
    if any("<tool_call>" in piece or "</tool_call>" in piece for piece in pieces):
        raise ValueError("the tool_call tags do not pair up")
    return pieces[::2], pieces[1::2]


def _qwen_coder_call(text: str, signatures: Mapping[str, str]) -> Call:
    function = re.fullmatch(r"\s*<function=([^<>\s]+)>(.*)</function>\s*", text, re.DOTALL)
    if function is None:
        raise ValueError("a call is <function=NAME>...</function>")
    name, body = function[1], function[2]
    pieces = re.split(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>", body, flags=re.DOTALL)
    if any(piece.strip() for piece in pieces[::3]):
        raise ValueError("text between the parameters of a call")
    properties = json.loads(signatures.get(name, "{}")).get("properties", {})
    arguments: dict[str, Any] = {}
    for key, value in zip(pieces[1::3], pieces[2::3], strict=True):
        if key in arguments:
            raise ValueError(f"the parameter {key!r} stands twice")
        schema = properties.get(key)
        is_text = not isinstance(schema, dict) or schema.get("type", "string") == "string"
        arguments[key] = value if is_text else parse_json(value)
    return Call(name, arguments)


def _between_tags(text: str) -> tuple[list[str], list[str]]:
    """The texts outside of the tags and inside of them; a tag within the JSON of a call is none.

    Raises ValueError where the tags do not pair up.
    """
    opening, closing = "<tool_call>", "</tool_call>"
    outside: list[str] = []
    inside: list[str] = []
    while opening in text:
        before, _, rest = text.partition(opening)
        end = rest.find(closing)
        with suppress(ValueError, RecursionError):
            start = len(rest) - len(rest.lstrip())
            end = rest.find(closing, json.JSONDecoder().raw_decode(rest, start)[1])
        if end < 0 or closing in before:
            raise ValueError("the tool_call tags do not pair up")
        outside.append(before)
        inside.append(rest[:end])
        text = rest[end + len(closing) :]
    if closing in text or any(opening in piece and not piece.strip().endswith("}") for piece in inside):
        raise ValueError("the tool_call tags do not pair up")
    return [*outside, text], inside


def calls_of(value: Any) -> tuple[Call, ...]:
    """Calls from a list of them in either format, or from a message that holds the list.

    Raises ValueError.
    """
    if isinstance(value, dict) and "tool_calls" in value and set(value) <= {"role", "content", "tool_calls"}:
        value = value["tool_calls"]
    if not isinstance(value, list):
        raise ValueError("the tool calls are no list")
    return _limited([_call_of(_function_of(entry), is_text_allowed=True) for entry in value])


def _limited(calls: Sequence[Call]) -> tuple[Call, ...]:
    if len(calls) > MAX_CALLS:
        raise ValueError(f"more than {MAX_CALLS} tool calls")
    return tuple(calls)


def _function_of(entry: Any) -> Any:
    if isinstance(entry, dict) and "function" in entry:
        if not set(entry) <= {"id", "type", "function"} or entry.get("type", "function") != "function":
            raise ValueError('a tool call is {"type": "function", "function": {...}}')
        return entry["function"]
    return entry


def _call_of(value: Any, *, is_text_allowed: bool) -> Call:
    if not isinstance(value, dict) or set(value) != {"name", "arguments"} or not isinstance(value["name"], str):
        raise ValueError('a call has exactly "name" and "arguments"')
    arguments = value["arguments"]
    if isinstance(arguments, str) and is_text_allowed:
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    return Call(value["name"], arguments)


def signatures_of(value: object) -> dict[str, str]:
    """The schema of the arguments of every declared tool, by name, as JSON text.

    A tool is ``{"type": "function", "function": {"name": ..., "parameters": {...}}}`` or the inner object alone;
    without parameters it takes none. Arguments that are not declared are refused, unless the schema says otherwise.
    Parameters may also stand as in xLAM, ``{"city": {"type": "str", "default": "Oslo"}}``, and have Python's or Java's
    names of types, as in BFCL.

    Raises ValueError.
    """
    tools = json_of(value)
    if not isinstance(tools, list) or not tools:
        raise ValueError("the tools are no list, or an empty one")
    signatures: dict[str, str] = {}
    for entry in tools:
        tool = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise ValueError("a tool has no name")
        if tool["name"] in signatures:
            raise ValueError(f"two tools are named {tool['name']!r}")
        schema = tool.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(schema, dict):
            raise ValueError(f"the parameters of {tool['name']!r} are no schema")
        schema = _with_json_types(_as_schema(schema), tool["name"])
        if "additionalProperties" not in schema and not any(key in schema for key in _COMBINING):
            schema = {**schema, "additionalProperties": False}
        signatures[tool["name"]] = json.dumps(schema)
    return signatures


def _as_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters as an object's schema, also where they are listed by name alone, as in xLAM.

    There a parameter is required unless it has a default or its type ends in ", optional".
    """
    is_schema = isinstance(parameters.get("type"), str) or any(key.startswith("$") for key in parameters)
    if is_schema or any(key in parameters for key in _COMBINING) or isinstance(parameters.get("properties"), dict):
        return parameters
    if not all(isinstance(value, dict) for value in parameters.values()):
        raise ValueError("parameters are a schema, or the description of each by its name")
    required = [
        name
        for name, value in parameters.items()
        if "default" not in value and not str(value.get("type", "")).endswith("optional")
    ]
    return {"type": "object", "properties": dict(parameters), "required": required}


def _with_json_types(schema: dict[str, Any], tool: str) -> dict[str, Any]:
    """A schema whose types have the names of JSON Schema, inside too.

    Raises ValueError for a type that no table has.
    """
    changed = dict(schema)
    kind = changed.get("type")
    if isinstance(kind, str):
        name = re.sub(r"[\[<(].*|,.*", "", kind).strip().lower()
        if name in ("any", "optional", "union"):  # says nothing that could be verified
            del changed["type"]
        elif name not in _TYPES:
            raise ValueError(f"the parameters of {tool!r} have the type {kind!r}, which JSON Schema does not know")
        else:
            changed["type"] = _TYPES[name]
    for key in ("properties", "$defs", "definitions"):
        if isinstance(changed.get(key), dict):
            changed[key] = {
                name: _with_json_types(value, tool) if isinstance(value, dict) else value
                for name, value in changed[key].items()
            }
    for key in ("items", "additionalProperties"):
        if isinstance(changed.get(key), dict):
            changed[key] = _with_json_types(changed[key], tool)
    return changed


def calls_fraction(calls: Sequence[Call], gold: Sequence[Call], *, in_order: bool = True) -> float:
    """The share of fields that are as in the reference calls, the name of a call being one of them.

        fraction = sum over pairs of fraction(call, gold) / max(number of calls, number of gold calls)

    In order, calls pair up by index; otherwise each gold call takes the unused call that fits best, in turn. A call of
    another tool is worth nothing, whatever its arguments.
    """
    if not calls and not gold:
        return 1.0
    total, unused = 0.0, list(calls)
    for index, expected in enumerate(gold):
        fractions = [
            fields_fraction(asdict(call), asdict(expected)) if call.name == expected.name else 0.0
            for call in (calls[index : index + 1] if in_order else unused)
        ]
        best = max(fractions, default=0.0)
        total += best
        if best > 0.0 and not in_order:
            del unused[fractions.index(best)]
    return total / max(len(calls), len(gold))


class ToolCalls:
    """Whether a completion calls declared tools with valid arguments, and the reference's calls if there are some.

    ``tools_column`` declares the tools of a row. A row with a value in ``gold_column`` (a list of calls in either
    format, or its JSON text; an empty one asks for no call) is right only if its calls are those, by index or, without
    ``in_order``, in any order; ``min_calls`` and ``max_calls`` count for the others.

    Parts: ``correct``; ``format``, 1.0 if the calls can be read and are valid; ``fields_fraction``, the share of names
    and arguments as in the reference; ``over_limit``. Graded, calls that can be read pay 0.2, declared tools in an
    allowed number with the right argument names 0.5, and valid ones from there to 1 by ``fields_fraction``.
    """

    name = "tool_calls"

    def __init__(self, section: ToolCallsReward | None = None, *, checker: SchemaChecker | None = None) -> None:
        self.section = section = section or ToolCallsReward()
        if section.max_calls is not None and section.max_calls < section.min_calls:
            raise ConfigError(
                f"rewards: min_calls is {section.min_calls} and max_calls {section.max_calls}; no number lies between."
            )
        self.checker = checker or SchemaChecker(timeout_seconds=section.timeout_seconds, workers=section.workers)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        tasks = [
            self._task(prompt.row, spoken_text(prompt, completion))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        distinct = list(dict.fromkeys(check for task in tasks for check in _checks(task)))
        verdicts = dict(zip(distinct, self.checker.check(distinct), strict=True))
        return [self._reward(task, verdicts) for task in tasks]

    def close(self) -> None:
        """Ends the checker's processes."""
        self.checker.close()

    def _task(self, row: Mapping[str, Any], text: str) -> _Task:
        try:
            if row.get(self.section.tools_column) is None:
                raise ValueError(f"the row has no column {self.section.tools_column!r}")
            tools = row[self.section.tools_column]
            signatures = signatures_of(tools if isinstance(tools, str) else without_nulls(tools))
            reference = None if self.section.gold_column is None else row.get(self.section.gold_column)
            gold = None if reference is None else calls_of(json_of(reference))
            is_struct = reference is not None and not isinstance(reference, str)
        except ValueError as error:
            return _Task(None, {}, problem=str(error)[:200], is_row_at_fault=True)
        readers = {
            "openai": openai_calls,
            "hermes": hermes_calls,
            "qwen_coder": partial(qwen_coder_calls, signatures=signatures),
        }
        try:
            calls = readers[self.section.call_format](text, around=self.section.around)
            return _Task(calls, signatures, gold, is_struct=is_struct)
        except (ValueError, RecursionError) as error:
            return _Task(None, signatures, gold, problem=str(error)[:200])

    def _reward(self, task: _Task, verdicts: Mapping[SchemaCheck, SchemaVerdict]) -> Reward:
        if task.is_row_at_fault:
            return Reward(value=None, error="unparsable_reference", detail=task.problem)
        gold = task.gold
        for call in task.gold or ():
            failure = gold_failure(_verdict(call, task, verdicts))
            if failure is not None and gold_failure(_verdict(_bare(call), task, verdicts)) is None:
                gold = tuple(map(_bare, task.gold or ()))
            elif failure is not None:
                return failure
        if task.calls is None:
            return self._paid(None, SchemaVerdict("invalid", task.problem), 0.0)
        if not task.calls and (task.gold or (task.gold is None and self.section.min_calls > 0)):
            return self._paid(None, SchemaVerdict("invalid", "no tool call"), 0.0)
        worst = min(
            [_verdict(call, task, verdicts) for call in task.calls] or [SchemaVerdict("valid")],
            key=lambda verdict: _SEVERITY.index(verdict.level),
        )
        if worst.is_failure:
            return failure_of(worst)
        if gold is not None:
            calls = tuple(map(_bare, task.calls)) if task.is_struct else task.calls
            gold = tuple(map(_bare, gold)) if task.is_struct else gold
            fraction = calls_fraction(calls, gold, in_order=self.section.in_order)
            return self._paid(task.calls, worst, fraction)
        max_calls = MAX_CALLS if self.section.max_calls is None else self.section.max_calls
        if not self.section.min_calls <= len(task.calls) <= max_calls:
            return self._paid(task.calls, SchemaVerdict("invalid", f"{len(task.calls)} tool calls"), 0.0)
        return self._paid(task.calls, worst, float(worst.level == "valid"))

    def _paid(self, calls: Sequence[Call] | None, verdict: SchemaVerdict, fraction: float) -> Reward:
        value = value_of(verdict, fraction, "binary" if calls is None else self.section.scale)
        return paid(value, verdict, fraction)


def _bare(call: Call) -> Call:
    """The call without arguments that are null, which a data set may have filled in."""
    return Call(call.name, without_nulls(call.arguments))


def _checks(task: _Task) -> list[SchemaCheck]:
    calls = [*(task.calls or ()), *(task.gold or ()), *map(_bare, task.gold or ())]
    return [_check(call, task) for call in calls if call.name in task.signatures]


def _check(call: Call, task: _Task) -> SchemaCheck:
    return SchemaCheck(json.dumps(call.arguments), schema=task.signatures[call.name])


def _verdict(call: Call, task: _Task, verdicts: Mapping[SchemaCheck, SchemaVerdict]) -> SchemaVerdict:
    if call.name not in task.signatures:
        return SchemaVerdict("invalid", f"there is no tool {call.name[:60]!a}")
    return verdicts[_check(call, task)]
