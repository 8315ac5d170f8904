"""Are the calls of today's model families read, and is what only looks like one told apart?"""

from __future__ import annotations

from typing import Any

import pytest

from oncurve.episodes.call_formats import FORMATS, learned_format
from oncurve.episodes.tools import Tool


def search(query: str, count: int = 3) -> str:
    """Search.

    Args:
        query: What to look for.
        count: How many results.
    """
    return query * count


TOOLS = {"search": Tool.of(search)}
ARGUMENTS = {"query": 'a "b", <c>', "count": 2}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "search", "arguments": {"query": "a \\"b\\", <c>", "count": 2}}\n</tool_call>',
    "functions": '<tool_call>\n<function=search>\n<parameter=query>\na "b", <c>\n</parameter>\n<parameter=count>\n2\n'
    "</parameter>\n</function>\n</tool_call>",
    "glm": '<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a "b", <c></arg_value>\n<arg_key>count</arg_key>\n'
    "<arg_value>2</arg_value>\n</tool_call>",
    "gemma": '<|tool_call>call:search{query:<|"|>a "b", <c><|"|>,count:2}<tool_call|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
    '{"query": "a \\"b\\", <c>", "count": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek 3.1": "<｜tool▁call▁begin｜>search<｜tool▁sep｜>"
    '{"query": "a \\"b\\", <c>", "count": 2}<｜tool▁call▁end｜>',
    "mistral": '[TOOL_CALLS][{"name": "search", '
    '"arguments": {"query": "a \\"b\\", <c>", "count": 2}, "id": "a12345678"}]',
    "mistral new": '[TOOL_CALLS]search[ARGS]{"query": "a \\"b\\", <c>", "count": 2}',
    "mistral ids": '[TOOL_CALLS]search[CALL_ID]a12345678[ARGS]{"query": "a \\"b\\", <c>", "count": 2}',
    "harmony": " to=functions.search<|channel|>commentary json<|message|>"
    '{"query": "a \\"b\\", <c>", "count": 2}<|call|>',
    "harmony as sampled": "<|channel|>analysis<|message|>I search to=functions.other{}<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "a \\"b\\", <c>", "count": 2}',
    "python": "<|tool_call_start|>[search(query='a \"b\", <c>', count=2)]<|tool_call_end|>",
    "invoke": '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">a "b", <c></parameter>\n'
    '<parameter name="count">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "invoke marked": '<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="query" string="true">a "b", <c>'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="count" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>',
    "bare": '{"name": "search", "parameters": {"query": "a \\"b\\", <c>", "count": 2}}',
}


@pytest.mark.parametrize("form", WRITTEN)
def test_a_call_is_read_with_the_types_of_its_arguments(form: str) -> None:
    read = FORMATS[form.split(" ", maxsplit=1)[0]]
    [call] = read(WRITTEN[form], TOOLS)
    assert (call.name, call.arguments, call.problem) == ("search", ARGUMENTS, "")
    assert read("There is no call here.", TOOLS) == []
    assert read('{"city": "Rome"} is no call either', TOOLS) == []


@pytest.mark.parametrize("form", [form for form in WRITTEN if not form.startswith(("harmony", "bare"))])
def test_a_call_that_is_only_thought_of_is_none(form: str) -> None:
    read = FORMATS[form.split(" ", maxsplit=1)[0]]
    assert read(f"<think>{WRITTEN[form]}</think>Done.", TOOLS) == []
    assert len(read(f"<think>{WRITTEN[form]}</think>{WRITTEN[form]}", TOOLS)) == 1


@pytest.mark.parametrize("form", [form for form in WRITTEN if form not in ("bare", "harmony as sampled")])
def test_a_call_that_breaks_off_is_said_to_be_malformed_or_is_none(form: str) -> None:
    read = FORMATS[form.split(" ", maxsplit=1)[0]]
    for length in range(len(WRITTEN[form])):
        for call in read(WRITTEN[form][:length], TOOLS):
            assert call.problem or dict(call.arguments) == ARGUMENTS
    if form == "glm":  # an answer says what is wrong, where silence would end the episode
        [call] = read(WRITTEN[form].removesuffix("</tool_call>"), TOOLS)
        assert (call.name, call.problem) == (None, "the call has no name or no </tool_call>")


@pytest.mark.parametrize(
    "inside",
    ["__import__('os').system('x')", "f(a=open('x'))", "f(a=[x for x in 'ab'])", "(" * 3000, "f('a')", "f(a=1" * 900],
)
def test_what_is_no_literal_is_not_run(inside: str) -> None:
    [call] = FORMATS["python"](f"<|tool_call_start|>[{inside}]<|tool_call_end|>", TOOLS)
    assert call.name is None
    assert call.problem


@pytest.mark.parametrize("value", ["{" * 5000, "{a:" * 2000, '{a:<|"|>b', "{a}", "{a:1,,}", "{:}"])
def test_what_is_no_value_of_gemma_is_malformed(value: str) -> None:
    [call] = FORMATS["gemma"](f"<|tool_call>call:search{value}<tool_call|>", TOOLS)
    assert call.name is None


def test_a_form_that_nobody_named_is_learned_from_one_call() -> None:
    turn = '<think>\n</think>\n<|calls|><|call|>functions.probe:0<|args|>{"text": "x"}<|end_call|><|end_calls|>'
    read = learned_format(turn, "probe", {"text": "x"})
    assert read is not None
    made: Any = '<|calls|><|call|>functions.search:0<|args|>{"query": "a", "count": 2}<|end_call|><|end_calls|>'
    [call] = read(f"I look it up.\n{made}", TOOLS)
    assert (call.name, call.arguments) == ("search", {"query": "a", "count": 2})
    [broken] = read(made.replace("2}", "2"), TOOLS)
    assert broken.name is None
    assert learned_format("CALL probe WITH nothing", "probe", {"text": "x"}) is None
    assert learned_format("no call", "probe", {"text": "x"}) is None
