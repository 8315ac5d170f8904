"""Is a served model a chat server, and does it keep the tokens of what it said?"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from served import Listener

from oncurve.policy.policy import TrainedPolicy
from oncurve.rollouts.agents.conversation_frames import TagFrames
from oncurve.rollouts.serving.http_app import SamplingServer

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


def test_who_has_no_token_gets_nothing(client: httpx.Client) -> None:
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer other"}):
        assert client.post("/v1/chat/completions", json={"messages": say("x")}, headers=headers).status_code == 401
        assert client.get("/session/one", headers=headers).status_code == 401


@pytest.mark.slow
def test_the_command_serves_chats(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oncurve", "serve", "embedded", "--port", "0"]
    command += ["--set", "data.template=think_answer"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if "serving on" in line)
        question = say("Tom has 3 apples and buys 4 more. How many has he?")
        with httpx.Client(base_url=url, trust_env=False, timeout=None) as made:
            answer = made.post(
                "/session/mine/v1/chat/completions", json={"messages": question, "max_tokens": 40}
            ).json()
            [row] = made.get("/session/mine").json()["conversations"]
        assert row["prompt"] == f"User: {question[0]['content']}\nAssistant: <think>"
        assert row["segments"][0]["text"] == answer["choices"][0]["message"]["content"]
    finally:
        process.terminate()
        process.communicate()
