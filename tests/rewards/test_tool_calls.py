"""Tool calls pay when their tools are declared, their arguments valid, and they are those of the reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from reward_records import completion_of, prompt_of

from oncurve.core.errors import ConfigError
from oncurve.core.records import Reward
from oncurve.rewards.late_graders import ToolCallsReward
from oncurve.rewards.tool_calls import (
    Call,
    ToolCalls,
    calls_fraction,
    hermes_calls,
    openai_calls,
    qwen_coder_calls,
    signatures_of,
)
from oncurve.rewards.validation import SchemaChecker

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TOOLS = [WEATHER, {"name": "now"}]
ROW = {"tools": TOOLS}


@pytest.fixture(scope="module")
def checker() -> Iterator[SchemaChecker]:
    shared = SchemaChecker()
    yield shared
    shared.close()


def call(name: str = "weather", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def hermes(*calls: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


def rewards_of(checker: SchemaChecker, *texts: object, row: dict[str, Any] = ROW, **options: Any) -> list[Reward]:
    written = [text if isinstance(text, str) else json.dumps(text) for text in texts]
    function = ToolCalls(ToolCallsReward(**options), checker=checker)
    return function([prompt_of(row=row)] * len(texts), [completion_of(text) for text in written])


def values_of(checker: SchemaChecker, *texts: object, **options: Any) -> list[float | None]:
    return [reward.value for reward in rewards_of(checker, *texts, **options)]


def test_both_ways_of_writing_arguments_are_openais() -> None:
    expected = (Call("weather", {"city": "Ulm"}),)
    as_object = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call(city="Ulm")]}
    for value in ([call(city="Ulm")], [as_object], message, [as_object["function"]]):
        assert openai_calls(json.dumps(value)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "weather(Ulm)",
        "{}",
        '[{"name": "now"}]',
        '[{"name": "now", "arguments": []}]',
        '[{"name": "now", "arguments": "[]"}]',
        '[{"name": "now", "arguments": "{\\"a\\": 1, \\"a\\": 1}"}]',
        '[{"name": 1, "arguments": {}}]',
        '[{"name": "now", "arguments": {}, "result": 1}]',
        '[{"type": "tool", "function": {"name": "now", "arguments": {}}}]',
        json.dumps([{"name": "now", "arguments": {}}] * 65),
        'Calling: [{"name": "now", "arguments": {}}]',
    ],
)
def test_what_is_no_list_of_calls_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        openai_calls(text)


def test_hermes_calls_stand_between_tags() -> None:
    text = hermes(("now", {}), ("weather", {"city": "Ulm"}))
    expected = (Call("now", {}), Call("weather", {"city": "Ulm"}))
    assert hermes_calls(text) == hermes_calls(f"<think> <tool_call> </think>\n{text}\n") == expected
    assert hermes_calls(f"I look it up.\n{text}", around="text") == expected
    assert hermes_calls("It rains.") == ()


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "</tool_call><tool_call>",
        hermes(("now", {})) + "<tool_call>",
        "<tool_call>" + hermes(("now", {})) + "</tool_call>",
        "Now: " + hermes(("now", {})),
        "<tool_call></tool_call>",
        '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
    ],
)
def test_hermes_blocks_that_do_not_pair_up_or_hold_no_call_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        hermes_calls(text)


@pytest.mark.proves("F108")
def test_arguments_must_be_those_of_the_signature(checker: SchemaChecker) -> None:
    texts = [
        [call(city="Ulm")],
        [call(city="Ulm", days=2), call("now")],
        [call(city=3)],
        [call()],
        [call(city="Ulm", hour=3)],
        [call("now", city="Ulm")],
        [call("rm", path="/")],
        [call(city="Ulm"), call("rm")],
    ]
    assert values_of(checker, *texts) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert values_of(checker, *texts, scale="graded") == [1.0, 1.0, 0.5, 0.2, 0.2, 0.2, 0.2, 0.2]


def test_the_number_of_calls_counts(checker: SchemaChecker) -> None:
    none: list[Any] = []
    texts = [none, [call("now")], [call("now")] * 2, [call("now")] * 3]
    assert values_of(checker, *texts, max_calls=2) == [0.0, 1.0, 1.0, 0.0]
    assert values_of(checker, *texts, min_calls=0, max_calls=0) == [1.0, 0.0, 0.0, 0.0]
    assert values_of(checker, none, "", scale="graded") == [0.0, 0.0]


@pytest.mark.proves("F108")
def test_the_reference_calls_must_be_made(checker: SchemaChecker) -> None:
    first, second = call(city="Ulm"), call(city="Bonn", days=1)
    row = {**ROW, "answer": json.dumps([first, second])}
    texts = [[first, second], [second, first], [first], [first, second, second], [call("now")]]
    assert values_of(checker, *texts, row=row) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert values_of(checker, *texts, row=row, in_order=False) == [1.0, 1.0, 0.0, 0.0, 0.0]
    fractions = [graded.parts["fields_fraction"] for graded in rewards_of(checker, *texts, row=row)]
    assert fractions == pytest.approx([1.0, (1 / 3 + 1 / 3) / 2, 0.5, 2 / 3, 0.0])
    hermes_text = hermes(("weather", {"city": "Ulm"}), ("weather", {"city": "Bonn", "days": 1}))
    assert values_of(checker, hermes_text, row=row, call_format="hermes") == [1.0]


def test_calling_nothing_can_be_the_right_thing(checker: SchemaChecker) -> None:
    row = {**ROW, "answer": []}
    assert values_of(checker, "It rains.", hermes(("now", {})), row=row, call_format="hermes") == [1.0, 0.0]


def test_a_call_that_fits_nothing_takes_no_place() -> None:
    first, second = Call("a", {"x": 1}), Call("b", {"x": 1})
    assert calls_fraction([second], [first, second], in_order=False) == 0.5
    assert calls_fraction([second], [first, second]) == 0.0
    assert calls_fraction([], []) == 1.0
    assert calls_fraction([first], [first, first], in_order=False) == 0.5  # one call answers one of the two
    assert calls_fraction([first, second], [first, first]) == 0.5


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"tools": "["},
        {"tools": []},
        {"tools": [{"parameters": {}}]},
        {"tools": [{"name": "a"}, {"name": "a"}]},
        {"tools": [{"name": "now", "parameters": {"type": "objekt"}}], "answer": [call("now")]},
        {**ROW, "answer": "now()"},
        {**ROW, "answer": [call("rm")]},
        {**ROW, "answer": [call(city=3)]},
    ],
    ids=str,
)
def test_a_row_at_fault_is_an_error(row: dict[str, Any], checker: SchemaChecker) -> None:
    assert rewards_of(checker, [call("now")], "x", row=row)[1].error == "unparsable_reference"


def test_a_schema_may_allow_arguments_that_it_does_not_declare() -> None:
    schema = {"type": "object", "additionalProperties": True}
    assert json.loads(signatures_of([{"name": "a", "parameters": schema}])["a"]) == schema


def test_limits_that_exclude_everything_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_calls"):
        ToolCalls(ToolCallsReward(min_calls=2, max_calls=1))


def test_arguments_that_a_data_set_filled_with_null_are_not_there(checker: SchemaChecker) -> None:
    row = {"tools": TOOLS, "answer": [{"name": "weather", "arguments": {"city": "Ulm", "days": None}}]}
    assert values_of(checker, [call(city="Ulm")], [call(city="Ulm", days=2)], row=row) == [1.0, 0.0]


def test_a_call_in_a_thinking_that_does_not_end_is_none(checker: SchemaChecker) -> None:
    text = hermes(("weather", {"city": "Ulm"}))
    written = ("<think>" + text, "<think>hm</think>" + text, text + "</think> no")
    assert values_of(checker, *written, call_format="hermes", row=ROW) == [0.0, 1.0, 0.0]


def test_a_tag_inside_of_an_argument_is_text() -> None:
    text = '<tool_call>{"name": "say", "arguments": {"words": "a </tool_call> b <tool_call>"}}</tool_call>'
    [call] = hermes_calls(text)
    assert call.arguments == {"words": "a </tool_call> b <tool_call>"}
    for broken in ("<tool_call>{}", "{}</tool_call>", "<tool_call><tool_call>{}</tool_call></tool_call>"):
        with pytest.raises(ValueError, match=r"pair up|JSON|Expecting"):
            hermes_calls(broken)


def test_tools_of_xlam_and_bfcl_are_schemas_too(checker: SchemaChecker) -> None:
    xlam = [
        {
            "name": "weather",
            "parameters": {
                "city": {"description": "c", "type": "str"},
                "days": {"type": "int", "default": 3},
                "tags": {"type": "List[str], optional"},
            },
        }
    ]
    bfcl = [
        {
            "name": "weather",
            "parameters": {
                "type": "dict",
                "required": ["city"],
                "properties": {
                    "city": {"type": "String"},
                    "days": {"type": "float"},
                    "tags": {"type": "array", "items": {"type": "any"}},
                },
            },
        }
    ]
    for tools in (xlam, bfcl, json.dumps(xlam)):
        values = {
            text: grade([{"name": "weather", "arguments": json.loads(text)}], tools, checker)
            for text in ('{"city": "Oslo"}', '{"city": "Oslo", "days": 2, "tags": ["a"]}', '{"city": 5}', '{"days": 2}')
        }
        assert list(values.values()) == [1.0, 1.0, 0.0, 0.0], values
    with pytest.raises(ValueError, match="the type 'colour', which JSON Schema does not know"):
        signatures_of([{"name": "paint", "parameters": {"type": "object", "properties": {"a": {"type": "colour"}}}}])
    with pytest.raises(ValueError, match="a schema, or the description of each by its name"):
        signatures_of([{"name": "paint", "parameters": {"a": "colour"}}])


def grade(calls: list[dict[str, Any]], tools: object, checker: SchemaChecker) -> float | None:
    function = ToolCalls(ToolCallsReward(gold_column=None), checker=checker)
    return function([prompt_of(row={"tools": tools})], [completion_of(json.dumps(calls))])[0].value


CODER = """<tool_call>
<function=add>
<parameter=a>
2
</parameter>
<parameter=note>
2 > 1
</parameter>
</function>
</tool_call>"""
ADD = {"add": json.dumps({"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}})}


def test_calls_of_qwen_coder_stand_in_tags_alone() -> None:
    assert qwen_coder_calls(CODER, ADD) == (Call("add", {"a": 2, "note": "2 > 1"}),)
    assert qwen_coder_calls("no call", ADD) == ()
    assert qwen_coder_calls(f"so {CODER}", ADD, around="text") == qwen_coder_calls(CODER, ADD)
    assert qwen_coder_calls("<tool_call><function=now></function></tool_call>", ADD) == (Call("now", {}),)


@pytest.mark.parametrize(
    "text",
    [
        f"so {CODER}",
        CODER.removesuffix("</tool_call>"),
        CODER.replace("<function=add>", "add"),
        CODER.replace("\n2\n", "\ntwo\n"),
        CODER.replace("note", "a"),
        CODER.replace("<parameter=note>", "words <parameter=note>"),
        "<tool_call>" * 5000,
        "<tool_call><function=add>" + "<parameter=a>" * 5000 + "</function></tool_call>",
    ],
)
def test_calls_of_qwen_coder_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        qwen_coder_calls(text, ADD)


def test_a_tool_without_required_arguments_may_be_called_without_any() -> None:
    assert hermes_calls('<tool_call>{"name": "time"}</tool_call>') == (Call("time", {}),)
