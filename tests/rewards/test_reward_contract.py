"""One suite for every reward function of the package."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from cpu_time import assert_ends_within
from reward_records import children, completion_of, prompt_of

from oncurve.core.grading import RewardFunction
from oncurve.core.records import Prompt
from oncurve.rewards.custom import from_function
from oncurve.rewards.formats import BoxedFormat, HashFormat, StepFormat, TagFormat
from oncurve.rewards.instructions import Instructions
from oncurve.rewards.json_schema import JsonSchema
from oncurve.rewards.late_graders import InstructionsReward, JudgeReward
from oncurve.rewards.llm_judge import Judge
from oncurve.rewards.mathematics import Mathematics
from oncurve.rewards.r1_zero import R1Zero
from oncurve.rewards.rotation import HeldOut, Rotating
from oncurve.rewards.shaping import CosineLength, LengthWindow, Overlong, Repetition, correctness_format_length
from oncurve.rewards.tool_calls import ToolCalls
from oncurve.rewards.weighted_sum import Term, WeightedSum, categorize

ONE = Term(from_function(lambda completion: 1.0, name="one"))
BOXED, TAGGED, HASHED = r"So \boxed{5}", "<think> a </think> <answer> 5 </answer>", "a\n#### 5"
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
ANN = json.dumps({"age": 7})
TOOLS = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALL = json.dumps([{"name": "weather", "arguments": {"city": "Ulm"}}])
ROWS: dict[str, dict[str, Any]] = {
    "json schema": {"answer": json.loads(ANN)},
    "tool calls": {"answer": json.loads(CALL), "tools": TOOLS},
    "instructions": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
}
"""Columns of the row, where a reference answer of 5 is not what the function reads."""


class _Opinion(BaseHTTPRequestHandler):
    """A model that gives full marks to every completion and says so as it was asked to."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        [word] = re.findall(r"VERDICT (\w+): N", body["messages"][0]["content"])
        choice = {"message": {"role": "assistant", "content": f"VERDICT {word}: 10"}, "finish_reason": "stop"}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice]}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class _LocalJudge(Judge):
    """A judge that brings the model it asks."""

    def __init__(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Opinion)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        section = JudgeReward(base_url=f"http://127.0.0.1:{self.server.server_address[1]}/v1", model="m")
        super().__init__(section, retries=0)

    def close(self) -> None:
        super().close()
        self.server.shutdown()
        self.server.server_close()


FUNCTIONS: dict[str, tuple[Callable[[], RewardFunction], str]] = {
    "mathematics": (lambda: Mathematics(timeout_seconds=0.5), BOXED),
    "mathematics, signed": (lambda: Mathematics(answer_from="hash", scale="signed"), HASHED),
    "mathematics, prose": (lambda: Mathematics(answer_from="prose", scale="graded"), "5"),
    "r1_zero": (R1Zero, TAGGED),
    "tags": (TagFormat, TAGGED),
    "per tag": (lambda: TagFormat(per_tag=True), TAGGED),
    "boxed": (BoxedFormat, BOXED),
    "hash": (HashFormat, HASHED),
    "steps": (StepFormat, "1. a\n2. b"),
    "length": (lambda: LengthWindow(1, 10), "5"),
    "overlong": (lambda: WeightedSum([Term(Overlong(10, 2)), ONE]), "5"),
    "repetition": (lambda: WeightedSum([Term(Repetition(2)), ONE]), "5"),
    "cosine": (lambda: CosineLength(Mathematics(), max_tokens=1_000_000), BOXED),
    "shaped": (
        lambda: correctness_format_length(
            Mathematics(), BoxedFormat(), LengthWindow(1, 10), weights=(0.8, 0.1, 0.1), only_if_correct=True
        ),
        BOXED,
    ),
    "custom": (lambda: from_function(lambda completion, answer: float(completion == answer), name="custom"), "5"),
    "json schema": (lambda: JsonSchema(schema=PERSON), ANN),
    "tool calls": (ToolCalls, CALL),
    "instructions": (lambda: Instructions(InstructionsReward()), "5"),
    "judge": (_LocalJudge, "5"),
    "rotating": (lambda: Rotating([Mathematics(name="m"), BoxedFormat()], every_steps=1), BOXED),
    "held out": (lambda: HeldOut(Mathematics(), BoxedFormat()), BOXED),
}
ODD_TEXTS = [
    "",
    " ",
    "\x00",
    "\ud800",
    "\u202e5",
    "é" * 100,
    "<answer>" * 1000,
    r"\boxed{" * 1000,
    "a" * 10**6,
    "5" * 10**5,
]


Case = tuple[RewardFunction, str, Prompt]


@pytest.fixture(params=FUNCTIONS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    make, gold = FUNCTIONS[request.param]
    function = make()
    yield function, gold, prompt_of(text="Q:", row=ROWS.get(request.param))
    function.close()


def test_it_has_the_protocol(case: Case) -> None:
    assert isinstance(case[0], RewardFunction)
    assert case[0].name


def test_a_good_completion_earns_full_reward(case: Case) -> None:
    function, gold, prompt = case
    reward = function([prompt], [completion_of(gold)])[0]
    assert reward.value == pytest.approx(1.0, abs=1e-6)
    assert categorize(reward) in ("correct", "wrong", "graded")


def test_rewards_are_aligned_with_completions(case: Case) -> None:
    function, gold, prompt = case
    texts = [gold, "", "nothing", gold, "x"]
    together = function([prompt] * len(texts), [completion_of(text) for text in texts])
    alone = [function([prompt], [completion_of(text)])[0] for text in texts]
    assert together == alone
    assert function([], []) == []


@pytest.mark.parametrize("text", ODD_TEXTS, ids=lambda text: ascii(text[:8]) + f" {len(text)}")
def test_odd_texts_neither_fail_nor_last(text: str, case: Case) -> None:
    function, _, prompt = case

    def grade() -> None:
        assert function([prompt], [completion_of(text)])[0].error is None

    assert_ends_within(1.0, grade)


def test_closing_ends_what_was_started_and_closing_twice_is_harmless(case: Case) -> None:
    before = children()
    function, gold, prompt = case
    function([prompt], [completion_of(gold)])
    function.close()
    assert children() <= before
    function.close()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: CosineLength(inner, max_tokens=10),
        lambda inner: WeightedSum([ONE, Term(inner)]),
        lambda inner: Rotating([R1Zero(), inner], every_steps=1),
        lambda inner: HeldOut(inner, BoxedFormat()),
        lambda inner: HeldOut(BoxedFormat(), inner),
    ],
)
def test_what_holds_a_reward_closes_it(wrap: Callable[[RewardFunction], RewardFunction]) -> None:
    inner = BoxedFormat()
    closed: list[str] = []
    inner.close = lambda: closed.append("inner")  # type: ignore[method-assign]
    wrap(inner).close()
    assert closed == ["inner"]
