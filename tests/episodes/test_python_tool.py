"""Does Python in the sandbox remember what an episode did, and nothing of another one's?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from scripted import make_sampler

from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.episodes.tools import python_tool
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sandbox.sessions import CodeFailed, PythonSessions
from oncurve.sandbox.tiers import describe_isolation

pytestmark = pytest.mark.skipif(
    describe_isolation().strongest != "bubblewrap", reason="bubblewrap does not work on this machine"
)


@pytest.fixture(scope="module")
def sessions() -> Iterator[PythonSessions]:
    made = PythonSessions(wall_seconds=4.0)
    yield made
    made.close()


def test_a_session_keeps_its_names_and_shows_the_newest_output_alone(sessions: PythonSessions) -> None:
    session, other = sessions.open(), sessions.open()
    assert session.run("x = 6\nprint('set')") == "set"
    assert session.run("x * 7") == "42"
    assert session.run("def f(n):\n    return n + x\nf(1)") == "7"
    with pytest.raises(CodeFailed, match="NameError: name 'x' is not defined"):
        other.run("x")


def test_a_call_that_fails_leaves_nothing_behind(sessions: PythonSessions) -> None:
    session = sessions.open()
    session.run("x = 1")
    with pytest.raises(CodeFailed, match="ZeroDivisionError"):
        session.run("x = 2\n1 / 0")
    assert session.run("x") == "1"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("while True: pass", "did not end|more time"),
        ("print('a' * 10**7)", "output"),
        ("open('/etc/passwd').read()", "Error"),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", "Error"),
        ("def", "SyntaxError"),
        ("bytearray(10**10)", "MemoryError"),
        ("x" * 30_000, "longer than"),
    ],
)
def test_what_code_does_wrong_is_said(sessions: PythonSessions, code: str, says: str) -> None:
    with pytest.raises(CodeFailed, match=says):
        sessions.open().run(code)


def test_the_policy_runs_code_in_an_episode(
    make_policy: Callable[..., TrainedPolicy], make_prompts: Callable[..., list[Prompt]]
) -> None:
    policy = make_policy()
    policy.model.config.max_position_embeddings = 4096
    turns = ["<tool>x = 20</tool>", "<tool>x + 1</tool>", "<tool>y</tool>", "done<|end|>"]
    sampler = make_sampler(
        policy,
        lambda read: turns[read.count("<result>")],
        tools=[python_tool(4.0)],  # type: ignore[list-item]
        params=SamplingParams(max_completion_tokens=500),
    )
    groups = sampler.sample(SamplingRequest(make_prompts("a", "b"), 2))
    for group in groups:
        for completion in group.completions:
            assert [call.answer for call in completion.calls] == [
                "",
                "21",
                "error: CodeFailed: NameError: name 'y' is not defined",
            ]
            assert [call.error for call in completion.calls] == [None, None, "raised"]
    sampler.close()
