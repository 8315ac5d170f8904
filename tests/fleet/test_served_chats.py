"""Is a served model a chat server, and does it keep the tokens of what it said?"""

from __future__ import annotations

import copy
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import torch
from served import Listener

from oncurve.agents.conversation_frames import TagFrames
from oncurve.core.scheduler import RowBatch
from oncurve.fleet.serving.http_app import SamplingServer
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from nursery import Nursery

TOKEN = "a secret"


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


@pytest.fixture(scope="module")
def client(policy: TrainedPolicy) -> Iterator[httpx.Client]:
    listener = Listener()
    frames = TagFrames(policy.tokenizer, turn="U: {user}\nA:")
    server = SamplingServer(copy.copy(policy), max_rows=8, context_tokens=128, token=TOKEN, frames=frames)
    url = listener.listen(server.app())
    known = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=url, headers=known, trust_env=False, timeout=None) as made:
        yield made
    listener.close()
    server.sampling.close()


def say(*words: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(words)]


def ask(client: httpx.Client, path: str, **body: Any) -> Any:
    return client.post(f"{path}/chat/completions", json={"max_tokens": 12, **body}).json()


def test_a_session_keeps_the_tokens_and_their_logprobs(client: httpx.Client, policy: TrainedPolicy) -> None:
    first = ask(client, "/session/one/v1", messages=say("hello"), temperature=1.5)
    words = first["choices"][0]["message"]["content"]
    ask(client, "/session/one/v1", messages=say("hello", words, "and?"))
    [row] = client.get("/session/one").json()["conversations"]
    assert [part["is_policy"] for part in row["segments"]] == [True, False, True]
    assert row["segments"][0]["text"] == words
    ids = torch.tensor([[*row["prompt_ids"], *row["token_ids"]]])
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[0].float()
    for part, temperature in zip(row["segments"][::2], (1.5, 1.0), strict=True):
        places = range(part["start"], part["end"])
        at = [len(row["prompt_ids"]) + place for place in places]
        expected = torch.log_softmax(logits[[place - 1 for place in at]] / temperature, dim=-1)[
            range(len(at)), ids[0, at]
        ]
        stored = torch.tensor([row["logprobs"][place] for place in places])
        torch.testing.assert_close(stored, expected, atol=1e-5, rtol=1e-5)
    assert client.delete("/session/one").json() == {"deleted": True}
    assert client.get("/session/one").status_code == 404


def test_without_a_session_nothing_is_kept(client: httpx.Client) -> None:
    again = [ask(client, "/v1", messages=say("hello"), seed=3)["choices"][0]["message"] for _ in range(2)]
    assert again[0] == again[1]
    greedy = [ask(client, "/v1", messages=say("hello"), temperature=0)["choices"][0]["message"] for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["policy"]


def test_a_stream_and_wrong_requests(client: httpx.Client) -> None:
    body = {"messages": say("hello"), "max_tokens": 3, "stream": True}
    assert client.post("/v1/chat/completions", json=body).text.endswith("data: [DONE]\n\n")
    for change, param in (({"temperature": -1}, "temperature"), ({"n": 3}, "n"), ({"messages": []}, "messages")):
        answer = client.post("/v1/chat/completions", json={**body, **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    long = client.post("/v1/chat/completions", json={"messages": say("x" * 300)})
    assert long.json()["error"]["code"] == "context_length_exceeded"


@pytest.fixture
def own_server(policy: TrainedPolicy) -> Iterator[tuple[SamplingServer, httpx.Client]]:
    """A server whose sampling a test may change, and its client."""
    listener = Listener()
    server = SamplingServer(copy.copy(policy), max_rows=8, context_tokens=128, frames=TagFrames(policy.tokenizer))
    with httpx.Client(base_url=listener.listen(server.app()), trust_env=False, timeout=None) as made:
        yield server, made
    listener.close()
    server.sampling.close()


LONG = {"messages": say("hello"), "max_tokens": 40, "seed": 5, "temperature": 2.0}


def events_of(client: httpx.Client, body: dict[str, Any] = LONG) -> Iterator[dict[str, Any]]:
    with client.stream("POST", "/session/s/v1/chat/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_words_of_a_stream_come_while_the_turn_is_sampled(
    own_server: tuple[SamplingServer, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler waits within a turn until its reader has read a word of it."""
    server, client = own_server
    whole = client.post("/v1/chat/completions", json=LONG).json()["choices"][0]
    has_read, in_time, turn, turns = threading.Event(), [], server.sampling.scheduler.turn, iter(range(1000))

    def waiting_turn() -> None:
        turn()
        if next(turns) == 20:
            in_time.append(has_read.wait(60))

    monkeypatch.setattr(server.sampling.scheduler, "turn", waiting_turn)
    words, reason = "", None
    for event in events_of(client):
        [choice] = event["choices"]
        words += choice["delta"].get("content", "")
        reason = choice["finish_reason"]
        if words:
            has_read.set()
    assert in_time == [True]
    assert (words, reason) == (whole["message"]["content"], whole["finish_reason"])
    [row] = client.get("/session/s").json()["conversations"]
    assert row["segments"][0]["text"] == words


@pytest.mark.parametrize(
    ("said", "streamed", "called"),
    [
        ("First 1 < 2, so I add. <tool>2+3</tool>", "First 1 < 2, so I add.", '{"expression": "2+3"}'),
        ("First 1 < 2, then a <tool", "First 1 < 2, then a <tool", None),
    ],
)
def test_words_of_a_turn_with_tools_come_while_it_is_sampled(
    said: str,
    streamed: str,
    called: str | None,
    own_server: tuple[SamplingServer, httpx.Client],
    policy: TrainedPolicy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model's tokens are given; sampler and reader wait for each other as above."""
    server, client = own_server
    ids = np.array([*policy.tokenizer.encode(said, add_special_tokens=False), policy.tokenizer.eos_token_id])

    def given(self: Any, logits: Any, keys: Any, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return ids[positions], np.full(len(positions), -0.5, dtype=np.float32)

    monkeypatch.setattr(RowBatch, "_draw", given)
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": parameters}}
    body = {"messages": say("2+3?"), "tools": [tool], "max_tokens": 60}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    has_read, in_time, turn = threading.Event(), [], server.sampling.scheduler.turn
    turns = iter(range(1000))

    def waiting_turn() -> None:
        turn()
        if next(turns) == 9:
            in_time.append(has_read.wait(60))

    monkeypatch.setattr(server.sampling.scheduler, "turn", waiting_turn)
    words, calls, reason = "", [], None
    for event in events_of(client, body):
        [choice] = event["choices"]
        words += choice["delta"].get("content", "")
        calls += choice["delta"].get("tool_calls", [])
        reason = choice["finish_reason"]
        if "First" in words:
            has_read.set()
    assert in_time == [True]
    assert words == streamed == whole["message"]["content"]
    assert [call["function"]["arguments"] for call in calls] == ([] if called is None else [called])
    assert reason == whole["finish_reason"] == ("stop" if called is None else "tool_calls")


def test_a_stream_that_cannot_go_on_ends_with_an_error(
    own_server: tuple[SamplingServer, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = own_server
    once, turns = server.sampling.scheduler.turn, iter(range(1000))

    def breaking() -> None:
        if next(turns) == 10:
            raise RuntimeError("the machine is on fire")
        once()

    monkeypatch.setattr(server.sampling.scheduler, "turn", breaking)
    *_, last = events_of(client)
    assert "on fire" in last["error"]["message"]
    monkeypatch.undo()
    assert client.get("/session/s").json() == {"conversations": []}
    *_, last = events_of(client)
    assert last["choices"][0]["finish_reason"], "the session goes on"


def test_who_has_no_token_gets_nothing(client: httpx.Client) -> None:
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer other"}):
        assert client.post("/v1/chat/completions", json={"messages": say("x")}, headers=headers).status_code == 401
        assert client.get("/session/one", headers=headers).status_code == 401


@pytest.mark.slow
def test_the_command_serves_chats(nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.start("serve", "embedded", "--port", 0, "--set", "data.template=think_answer", cwd=tmp_path)
    while not (found := re.search(r"serving on (\S+)\n", child.output)):
        assert child.is_running(), child.output
        time.sleep(0.01)
    question = say("Tom has 3 apples and buys 4 more. How many has he?")
    with httpx.Client(base_url=found[1], trust_env=False, timeout=None) as made:
        answer = made.post("/session/mine/v1/chat/completions", json={"messages": question, "max_tokens": 40}).json()
        [row] = made.get("/session/mine").json()["conversations"]
    assert row["prompt"] == f"User: {question[0]['content']}\nAssistant: <think>"
    assert row["segments"][0]["text"] == answer["choices"][0]["message"]["content"]
    child.kill(signal.SIGTERM)
    assert child.wait() == 0, child.output
