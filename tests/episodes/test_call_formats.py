"""Are the calls of today's model families read, and is what only looks like one told apart?"""

from __future__ import annotations

from typing import Any

import pytest

from oncurve.episodes.call_formats import FORMATS, learned_format, read_tagged
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


@pytest.mark.parametrize(
    ("form", "turn", "calls"),
    [
        ("gemma", "<|tool_call>call: f{a:[1,<|\"|>b,<|\"|>,],c:{d:true,e:x y}}<tool_call|>",
         [("f", {"a": [1, "b,"], "c": {"d": True, "e": "x y"}})]),
        ("gemma", "<|tool_call>call:f{}<tool_call|>", [("f", {})]),
        ("gemma", "<|tool_call>call:f{a:1}", "is not call:name"),
        ("gemma", "<|tool_call>f<tool_call|>", "is not call:name"),
        ("python", "<|tool_call_start|>[f(a=true, b=[null]), g()]<|tool_call_end|>", "is not"),
        ("python", "<|tool_call_start|>f(a=true, b=null), g(c='false')<|tool_call_end|>",
         [("f", {"a": True, "b": None}), ("g", {"c": "false"})]),
        ("python", "<|tool_call_start|>f(a=1)", "is not"),
        ("python", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "is not"),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}[TOOL_CALLS]["x", {"name": "g"}]',
         [("f", {}), (None, {}), ("g", {})]),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "arguments of f are not a JSON object"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "the call has no end"),
        ("deepseek", "<｜tool▁call▁begin｜>" + "f" * 70 + "<｜tool▁sep｜><｜tool▁call▁end｜>",
         "of " + "f" * 60 + " are"),
        ("hermes", '<tool_call>{"name": "f"}', "the call has no </tool_call>"),
        ("hermes", '<tool_call>{"name": 1}</tool_call>', "is not an object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": 1}</tool_call>', "the arguments are not an object"),
        ("hermes", "<tool_call>" + "x" * 200 + "</tool_call>", "the call is not JSON: Expecting value"),
        ("functions", "<function=f><parameter=a>1</parameter>", "the call has no </function>"),
        ("functions", "<function=f><parameter=a>1</parameter><parameter=b>[x</parameter></function>",
         [("f", {"a": 1, "b": "[x"})]),
        ("functions", "<function=search><parameter=query>1</parameter></function>", [("search", {"query": "1"})]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>" + "[" * 100_000 + "</arg_value></tool_call>",
         [("f", {"a": "[" * 100_000})]),
        ("invoke", '<invoke name="f"><parameter name="a">1</parameter>', "the call has no end"),
        ("bare", '<|python_tag|> {"name": "f"}', [("f", {})]), ("bare", '{"called": "f"}', []),
        ("bare", '{"name": "f"', "the call is not JSON"),
        ("harmony", "to=functions.f<|message|>{}<|call|>", [("f", {})]),
        ("harmony", "to=f<|message|>{<|call|>", "arguments of f are not"),
    ],
)  # fmt: skip
def test_each_form_is_read_to_its_end_or_says_its_fault(form: str, turn: str, calls: Any) -> None:
    read = FORMATS[form](turn, TOOLS)
    if isinstance(calls, str):
        [call] = read
        assert call.name is None
        assert calls in call.problem
        assert call.written in turn
    else:
        assert [(call.name, call.arguments) for call in read] == calls


def test_a_call_in_python_is_read_up_to_20000_characters() -> None:
    for length, name in ((20_000, "f"), (20_001, None)):
        [call] = FORMATS["python"](f"<|tool_call_start|>f(a='{'x' * (length - 7)}')<|tool_call_end|>", {})
        assert call.name == name


def test_a_tag_holds_the_one_argument_of_the_one_tool_or_json() -> None:
    def double(number: int) -> int:
        """Double.

        Args:
            number: Any.
        """
        return 2 * number

    one, two = {"double": Tool.of(double)}, {"double": Tool.of(double), **TOOLS}
    named = '<tool> {"name": "double", "arguments": {"number": 2}}</tool>'
    for turn, tools, calls in (
        ("<tool> 12 </tool>x<tool>a</tool>", one, [("double", {"number": 12}), ("double", {"number": "a"})]),
        (named, one, [("double", {"number": 2})]), (named, two, [("double", {"number": 2})]),
        ("<tool>12</tool>", two, [(None, {})]), ("<tool>a</tool>", TOOLS, [(None, {})]),
        ("<tool>12", one, [(None, {})]),
        ("12", one, []),
    ):  # fmt: skip
        assert [(call.name, call.arguments) for call in read_tagged(turn, tools)] == calls
