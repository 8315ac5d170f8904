"""Do tools answer the policy, and does nothing that they say become a mark, a token to train on, or a zero?"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from hanging import Hanging
from scripted import HOSTILE, make_sampler, one

from oncurve.core.errors import ConfigError, SamplerError
from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.episodes.calculator import evaluate
from oncurve.episodes.call_formats import read_tagged
from oncurve.episodes.dialects import ForeignText
from oncurve.episodes.episode_sampler import EpisodeSampler
from oncurve.episodes.tools import Tool, answer_text, calculator, sandboxed_tool
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from oncurve.core.records import Completion

MakePrompts = Callable[..., list[Prompt]]


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    made = make_policy()
    made.model.config.max_position_embeddings = 100_000
    return made


def calls_then_answers(call: str, answer: str = "fine<|end|>") -> Callable[[str], str]:
    """A policy that calls once and then answers."""
    return lambda read: answer if "<result>" in read else f"<tool>{call}</tool>"


def words(completion: Completion) -> list[str]:
    """What the environment said."""
    return [part.text for part in completion.segments if not part.is_policy]


def add(left: int, right: int = 1) -> int:
    """
    Adds.

    Args:
        left: A number.
        right: Another.
    """
    return left + right


def echo(text: str) -> str:
    """
    Says it again.

    Args:
        text: What to say.
    """
    return text


def test_the_policy_calls_a_tool_and_goes_on_behind_its_answer(
    policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    sampler = make_sampler(policy, calls_then_answers("2+3"), tools=[calculator])
    completion = one(sampler, make_prompts("q"))
    assert completion.text == "<tool>2+3</tool><result>5</result>fine"
    assert [part.is_policy for part in completion.segments] == [True, False, True]
    assert completion.as_graded().text == "<tool>2+3</tool>\nfine"
    assert completion.finish_reason == "stop"
    assert (completion.num_turns, completion.policy_version) == (2, 3)
    assert [(call.name, call.arguments, call.answer, call.error) for call in completion.calls] == [
        ("calculator", '{"expression": "2+3"}', "5", None)
    ]
    told = completion.segments[1]
    assert set(completion.sampler_logprobs[told.start : told.end]) == {0.0}
    sampler.close()


def test_tokens_are_made_once(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    """The second turn goes on from exactly the tokens of the first, however a tokenizer would have cut the text."""
    sampler = make_sampler(policy, calls_then_answers("2+3"), tools=[calculator])
    [prompt] = make_prompts("question")
    completion = one(sampler, [prompt])
    first, second = sampler.sampler.opened[0].read
    assert first == prompt.prompt_ids
    last = completion.segments[-1]
    assert second == (*prompt.prompt_ids, *completion.token_ids[: last.start])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        ('{"name": "add", "arguments": {"left": 2}}', None, "3"),
        ('{"name": "add", "arguments": {}}', "bad_arguments", "needs the argument left"),
        ('{"name": "add", "arguments": {"left": 2, "by": 3}}', "bad_arguments", "no argument by"),
        ('{"name": "add", "arguments": {"left": "2"}}', "raised", "TypeError"),
        ('{"name": "sub", "arguments": {}}', "unknown_tool", "no tool sub"),
        ('{"name": "add"', "malformed", "not JSON"),
        ('{"arguments": {}}', "malformed", "not an object"),
        ('{"name": "add", "arguments": [1]}', "malformed", "not an object"),
        ("[" * 50_000, "malformed", "not JSON"),
    ],
)
def test_every_way_to_call_wrongly_is_answered_and_counted_as_its_own(
    call: str, error: str | None, says: str, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    sampler = make_sampler(
        policy,
        calls_then_answers(call),
        tools=[add, echo],
        params=SamplingParams(max_completion_tokens=200_000),
        max_answer_tokens=300,
    )
    completion = one(sampler, make_prompts("q"))
    [made] = completion.calls
    assert made.error == error
    assert says in words(completion)[0]
    assert completion.finish_reason == "stop"
    assert completion.failure is None


def test_a_tool_may_be_async_or_slow_or_exit(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    async def waits(text: str) -> str:
        """
        Waits.

        Args:
            text: Anything.
        """
        await asyncio.sleep(0.01)
        return f"waited {text}"

    def leaves(text: str) -> str:
        """
        Leaves.

        Args:
            text: Anything.
        """
        raise SystemExit(3)

    done = threading.Event()

    def hangs(text: str) -> str:
        """
        Hangs.

        Args:
            text: Anything.
        """
        done.wait()
        return "late"

    async def hangs_async(text: str) -> str:
        """
        Hangs.

        Args:
            text: Anything.
        """
        await asyncio.sleep(3600)
        return "late"

    for tool, error, says in (
        (waits, None, "waited x"),
        (leaves, "raised", "sys.exit"),
        (hangs, "timeout", "0.3 s"),
        (hangs_async, "timeout", "0.3 s"),
    ):
        sampler = make_sampler(policy, calls_then_answers("x"), tools=[tool], tool_seconds=0.3)
        completion = one(sampler, make_prompts("q"))
        assert [call.error for call in completion.calls] == [error]
        assert says in words(completion)[0]
        assert completion.failure is None
        sampler.close()
    done.set()


def test_one_tool_that_hangs_holds_up_nobody_else(
    policy: TrainedPolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    forever = Hanging(monkeypatch)

    def tool(text: str) -> str:
        """
        Hangs for one of them.

        Args:
            text: Anything.
        """
        if text == "0":
            forever.wait()
        ended.append(text)
        return text

    sampler = make_sampler(
        policy,
        lambda read: "ok<|end|>" if "<result>" in read else f"<tool>{read[-1]}</tool>",
        tools=[tool],
        tool_seconds=600,
    )
    groups = sampler.sample(SamplingRequest(make_prompts(*(f"p{place}" for place in range(10))), 2))
    reasons = [completion.finish_reason for group in groups for completion in group.completions]
    assert reasons == ["stop"] * 20
    assert sorted(set(ended)) == list("123456789")
    errors = [call.error for group in groups for completion in group.completions for call in completion.calls]
    assert errors == ["timeout"] * 2 + [None] * 18
    forever.set()
    sampler.close()


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_that_a_tool_says_becomes_a_mark_or_is_trained_on(
    answer: Any, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    def tool(text: str) -> Any:
        """
        Hostile.

        Args:
            text: Anything.
        """
        return answer

    sampler = make_sampler(policy, calls_then_answers("x"), tools=[tool], max_answer_tokens=60)
    completion = one(sampler, make_prompts("q"))
    assert [part.is_policy for part in completion.segments] == [True, False, True]
    told = completion.segments[1]
    marks = set(policy.tokenizer.all_special_ids)
    assert not marks & set(completion.token_ids[told.start : told.end])
    assert told.end - told.start <= 60 + 20  # the frame of the dialect
    assert completion.text.endswith("fine")
    assert completion.as_graded().text == "<tool>x</tool>\nfine"
    assert not any(completion.written[told.start : told.end])


def test_a_long_answer_is_cut_with_a_mark(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    sampler = make_sampler(policy, calls_then_answers("z" * 50), tools=[echo], max_answer_tokens=20)
    completion = one(sampler, make_prompts("q"))
    assert words(completion)[0] == f"<result>{'z' * 14} [cut]</result>"
    assert completion.calls[0].answer == "z" * 50


def test_limits_end_an_episode_each_with_a_reason_of_its_own(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    def always(read: str) -> str:
        return "<tool>1</tool>"

    def reason(script: Callable[[str], str] = always, tokens: int = 500, **limits: float) -> str:
        params = SamplingParams(max_completion_tokens=tokens)
        sampler = make_sampler(policy, script, tools=[calculator], params=params, **limits)
        completion = one(sampler, make_prompts("q"))
        assert completion.is_truncated == (completion.finish_reason != "malformed")
        sampler.close()
        return completion.finish_reason

    assert reason(max_turns=3) == "turns"
    assert reason(tokens=40) == "length"
    assert reason(lambda read: "<tool>1</tool" + "x" * 900, tokens=40) == "length"
    assert reason(max_seconds=1e-9) == "seconds"
    assert reason(lambda read: "<tool>{</tool>", max_malformed_calls=2, max_turns=50) == "malformed"
    policy.model.config.max_position_embeddings = 70
    try:
        assert reason(max_turns=50) == "context"
    finally:
        policy.model.config.max_position_embeddings = 100_000


def test_no_token_is_read_or_written_beyond_either_limit_and_none_less(
    policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    prompts = make_prompts("q")

    def episode(tokens: int, context: int) -> Completion:
        params = SamplingParams(max_completion_tokens=tokens)
        sampler = make_sampler(policy, lambda read: "<tool>1+2</tool>", tools=[calculator], params=params, max_turns=3)
        sampler.setup = replace(sampler.setup, context_tokens=context)
        found = one(sampler, prompts)
        sampler.close()
        return found

    whole = episode(500, 10_000)
    turn, told = whole.segments[:2]
    assert (whole.finish_reason, [part.is_policy for part in whole.segments]) == ("turns", [True, False] * 2 + [True])
    for room in (turn.end - 1, turn.end, told.end - 1, told.end, told.end + 1, told.end + 2):
        found = episode(500, len(prompts[0].prompt_ids) + room)
        assert found.finish_reason == "context"
        assert len(found.token_ids) == (turn.end if turn.end < room <= told.end else room)
    for tokens in (1, turn.end - 1, turn.end, turn.end + 1, 2 * turn.end):
        found = episode(tokens, 10_000)
        assert (found.finish_reason, found.num_tokens, len(found.calls)) == ("length", tokens, tokens // turn.end)
        assert found.token_ids == whole.token_ids[: len(found.token_ids)]


def test_sixteen_calls_of_a_turn_are_answered_and_each_malformed_one_counts(
    policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    said: list[str] = []
    sampler = make_sampler(
        policy, lambda read: "<tool>{</tool>" if len(said) < 9 and not said.append(read) else "fine<|end|>",
        tools=[calculator], params=SamplingParams(max_completion_tokens=500, stop=("x", "</tool>")),
        max_malformed_calls=3, max_turns=9,
    )  # fmt: skip
    with pytest.raises(SamplerError, match="no weights yet"):
        EpisodeSampler(sampler.sampler, sampler.params, sampler.setup).sample(SamplingRequest(make_prompts("q"), 1))
    found = one(sampler, make_prompts("q"))
    assert (found.finish_reason, len(found.calls), found.num_turns) == ("malformed", 3, 3)
    assert [call.turn for call in found.calls] == [0, 1, 2]
    assert sampler.sampler.opened[0].stop == ("x", "</tool>")
    sampler._dialect.read = lambda text, tools: read_tagged(text * 17, tools) if "<tool>" in text else []
    said[:] = "12345678"
    found = one(sampler, make_prompts("q"))
    assert len(found.calls) == 16
    assert found.waiting_seconds == pytest.approx(sum(call.seconds for call in found.calls))
    sampler.close()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7//2", "3"), ("7%4", "3"), ("-5+2", "-3"), ("+5*3", "15"), ("1.5-1", "0.5"), ("9/4", "2.25"),
        ("2**-2", "0.25"),
        ("10**60", "1" + "0" * 60), ("10**61", None), ("10**60+1", None), ("1/10**60", "1e-60"), ("1/10**60/2", None),
        ("1**60", "1"), ("1**61", None), ("1**-60", "1"), ("1**-61", None), ("4**0.5", None), ("True", None),
        ("1/0", None),
        ("1" + "+1" * 99 + " ", "100"), ("1" + "+1" * 100, None), ("a", None), ("(1", None), ("1<2", None),
        ("~1", None),
    ],
)  # fmt: skip
def test_the_calculator_is_exact_within_its_borders(expression: str, value: str | None) -> None:
    if value is not None:
        assert evaluate(expression) == value
        return
    with pytest.raises(ValueError, match=r"expression|digits|exponent|division by zero"):
        evaluate(expression)


class Wide:
    """A tokenizer with one token for 64 characters."""

    added_tokens_decoder: ClassVar[dict[int, str]] = {9: "<m>"}
    all_special_ids: ClassVar[list[int]] = [8]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [1] * -(-len(text) // 64)


def test_words_of_others_are_cut_at_the_limit_and_framed_as_one_text(policy: TrainedPolicy) -> None:
    wide, foreign = ForeignText(Wide()), ForeignText(policy.tokenizer)  # type: ignore[arg-type]
    assert [wide.cut("a" * length, 4) for length in (64, 128, 129)] == [[1], [1, 1], [1, 1, 1]]
    assert wide.marks == {8, 9}
    assert (wide.holds_mark("a<m>"), wide.holds_mark("a<m")) == (True, False)
    encode = partial(policy.tokenizer.encode, add_special_tokens=False)
    mark = encode(" [cut]")
    for length in (len(mark) + 3, len(mark), 2, 0):
        assert foreign.cut("z" * length, length) == encode("z" * length)
        assert foreign.cut("z" * (length + 1), length) == encode("z" * max(0, length - len(mark))) + mark[:length]
    parts = [("<|end|>U: a", False), ("b <|end|> c", True), ("<|end|>", False)]
    framed = foreign.framed(parts)
    assert policy.tokenizer.decode(framed) == "<|end|>U: ab <|end|> c<|end|>"
    assert [at for at, token in enumerate(framed) if token in foreign.marks] == [0, len(framed) - 1]
    assert foreign.framed([("<|end", True), ("|>", False)]) == encode("<") + encode("|end|>")
    assert foreign.framed([("U: ", False), ("the <|end|>", True)]) == encode("U: the <") + encode("|end|>")
    assert encode("U: ") + encode("the <") != encode("U: the <"), "words are no text apart from what stands around them"


def test_a_tool_that_says_too_little_is_refused_with_what_it_lacks() -> None:
    def untold(x: int) -> int:
        return x

    def untyped(x):  # type: ignore[no-untyped-def]
        """Gives it back."""
        return x

    def half(x: int, y: int) -> int:
        """
        Adds.

        Args:
            x (int): The first, and y: nothing.
        """
        return x + y

    for tool, lacks in ((untold, "no docstring"), (untyped, "no type is given for 'x'"), (half, "says nothing of 'y'")):
        with pytest.raises(ConfigError, match=rf"tool {tool.__name__}: .*{lacks}.*`Args:`"):
            Tool.of(tool)


class Adder:
    """A tool that remembers."""

    def __call__(self, left: int) -> int:
        """
        Adds.

        Args:
            left: A number.
        """
        return left + 1


def test_an_object_that_can_be_called_is_a_tool_and_what_cannot_be_called_by_name_is_refused() -> None:
    assert Tool.of(Adder()).name == "Adder"
    assert list(Tool.of(Adder()).parameters) == ["left"]

    def several(*left: int) -> int:
        """
        Adds.

        Args:
            left: Numbers.
        """
        return sum(left)

    for one_of_them in (
        several,
        partial(add, 2),
        Adder.__call__,
        lambda left: left,
        {"type": "function"},
        "calculator",
        len,
    ):
        with pytest.raises(
            ConfigError, match=r"by name|no docstring|no type|as a partial|cannot be called|in no schema"
        ):
            Tool.of(one_of_them)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({(0, 1): "a"}, "{(0, 1): 'a'}"), ({1, }, "{1}"), (np.arange(2), "[0, 1]"), (np.float64(0.5), "0.5"),
        (None, "null"), ({"a": np.int64(1)}, '{"a": 1}'), (Path("a"), "a"), (b"a", "a"),
    ],
)  # fmt: skip
def test_a_result_is_json_or_as_it_prints(value: Any, text: str) -> None:
    assert answer_text(value) == text


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ((letter for letter in "ab"), "it gave a generator"), (map(str, [1]), "it gave a map"),
        (threading.Event, None), (object(), "it gave <object>, which"), (Adder(), "Adder>, which is no text"),
    ],
)  # fmt: skip
def test_what_has_no_text_is_no_result(value: Any, says: str | None) -> None:
    if says is None:
        assert answer_text(value) == "<class 'threading.Event'>"
        return
    with pytest.raises(TypeError, match=says):
        answer_text(value)


class Color(Enum):
    """What a tool may be asked for."""

    RED = "red"
    BLUE = "blue"


def paint(color: Color, more: list[Color] | None = None, by: dict[str, Color] | None = None, **rest: str) -> str:
    """
    Paints.

    Args:
        color: Which.
        more: Others.
        by: Others by name.
        rest: Anything.
    """
    assert isinstance(color, Color)
    return f"{color.name} {[one.name for one in more or []]} {[one.name for one in (by or {}).values()]} {rest}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"color": "red"}, "RED [] [] {}"),
        ({"color": "red", "more": ["blue", "red"], "by": {"a": "blue"}}, "RED ['BLUE', 'RED'] ['BLUE'] {}"),
        ({"color": "green"}, "'green' is not a valid Color"),
        ({"color": "red", "rest": "x"}, "has no argument rest"),
    ],
)
def test_a_value_of_an_enumeration_arrives_as_its_member(
    arguments: dict[str, Any], says: str, policy: TrainedPolicy, make_prompts: MakePrompts
) -> None:
    call = json.dumps({"name": "paint", "arguments": arguments})
    sampler = make_sampler(policy, calls_then_answers(call), tools=[paint, echo])
    assert says in words(one(sampler, make_prompts("q")))[0]
    sampler.close()
    with pytest.raises(ConfigError, match="a member of an Enum would arrive as text"):
        sandboxed_tool(paint, 1.0)


def test_what_a_tool_breaks_in_the_process_is_put_back_and_an_exception_of_any_kind_is_told(
    policy: TrainedPolicy, make_prompts: MakePrompts, caplog: pytest.LogCaptureFixture
) -> None:
    def wanders(text: str) -> str:
        """
        Goes elsewhere.

        Args:
            text: Anything.
        """
        os.chdir("/")
        raise asyncio.CancelledError("gone")

    before = Path.cwd()
    sampler = make_sampler(policy, calls_then_answers("x"), tools=[wanders])
    assert "it raised CancelledError: gone" in words(one(sampler, make_prompts("q")))[0]
    assert Path.cwd() == before
    assert "tools or environments set the working folder to /, which would change the run" in caplog.text
    sampler.close()


def test_many_slow_tools_wait_beside_each_other(policy: TrainedPolicy, make_prompts: MakePrompts) -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def slow(text: str) -> str:
        """
        Takes a while.

        Args:
            text: Anything.
        """
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.2)
        with lock:
            running -= 1
        return text

    sampler = make_sampler(policy, calls_then_answers("x"), tools=[slow])
    sampler.sample(SamplingRequest(make_prompts("q"), 64))
    assert most > 32
    sampler.close()
