"""Does a tool of the user's run in the sandbox, from a recipe and from Python? Is it refused where there is none?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import make_sampler
from typer.testing import CliRunner

import oncurve
from oncurve.cli.app import app
from oncurve.core.errors import ConfigError
from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.data.python_objects import NOTHING
from oncurve.episodes.from_settings import make_tools
from oncurve.episodes.tools import sandboxed_tool
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.sandbox import tiers
from oncurve.sandbox.failures import SandboxUnavailable
from oncurve.sandbox.tiers import describe_isolation

needs_sandbox = pytest.mark.skipif(
    describe_isolation().strongest != "bubblewrap", reason="bubblewrap does not work on this machine"
)
OWN = '''
from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

CALLS = []


@dataclass
class Seen:
    text: str


def look(what: str, times: int = 1) -> dict:
    """
    Looks at something.

    Args:
        what: The thing.
        times: How often.
    """
    CALLS.append(what)
    print("noise")
    if what == "fail":
        raise ValueError("no such thing")
    if what == "loop":
        while True:
            pass
    if what == "host":
        home = os.environ.get("HOME", "/root")
        return os.path.exists(home) and os.listdir(home)
    if what == "leave":
        print(42)
        exit()
    return {"seen": Seen(what * times).text, "calls": len(CALLS), "process": os.getpid()}


async def later(word: str) -> str:
    """
    Says a word later.

    Args:
        word: The word.
    """
    await asyncio.sleep(0)
    return word
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def tools_named(*places: str) -> list[Any]:
    """What a recipe's tools become."""
    named = "[" + ", ".join(f"'{place}'" for place in places) + "]"
    words = [f"rollouts.tools={named}", "rollouts.episodes.tool_seconds=4"]
    return list(make_tools(load_config(find_recipe("word_problems"), words).rollouts, NOTHING).values())


@needs_sandbox
def test_calls_run_in_fresh_processes_of_the_sandbox(
    own: Path, make_policy: Callable[..., TrainedPolicy], make_prompts: Callable[..., list[Prompt]]
) -> None:
    policy = make_policy()
    policy.model.config.max_position_embeddings = 4096
    hostile = '\'; import os #\n"""\\'
    said = [
        {"name": "look", "arguments": {"what": hostile, "times": 2}},
        {"name": "look", "arguments": {"what": "b"}},
        {"name": "look", "arguments": {"what": "fail"}},
        {"name": "look", "arguments": {"what": "loop"}},
        {"name": "look", "arguments": {"what": "host"}},
        {"name": "later", "arguments": {"word": "hello"}},
        {"name": "look", "arguments": {"what": "leave"}},
    ]
    turns = [*(f"<tool>{json.dumps(call)}</tool>" for call in said), "done<|end|>"]
    sampler = make_sampler(
        policy,
        lambda read: turns[read.count("<result>")],
        tools=tools_named("sandbox:own.py:look", "sandbox:own.py:later"),
        params=SamplingParams(max_completion_tokens=2000),
    )
    [group] = sampler.sample(SamplingRequest(make_prompts("a"), 1))
    sampler.close()
    calls = group.completions[0].calls
    first, second = json.loads(calls[0].answer), json.loads(calls[1].answer)
    assert (first["seen"], first["calls"], second["seen"], second["calls"]) == (hostile * 2, 1, "b", 1)
    assert os.getpid() not in (first["process"], second["process"])
    assert "ValueError: no such thing" in calls[2].answer
    assert "did not end" in calls[3].answer or "more time" in calls[3].answer
    assert "Error" in calls[4].answer or calls[4].answer in ("false", "[]")
    assert calls[5].answer == "hello"
    assert "it ended before it returned anything" in calls[6].answer


@needs_sandbox
def test_python_takes_such_a_tool_by_its_name(own: Path) -> None:
    rows = [{"question": f"{number}", "answer": str(number)} for number in range(12)]
    result = oncurve.train(
        "embedded",
        rows,
        "mathematics",
        tools=["sandbox:own.py:look"],
        rollouts={"max_completion_tokens": 8, "episodes": {"max_turns": 2}},
        algorithm={"group_size": 2},
        run={"steps": 1, "prompts_per_step": 2, "name": "run"},
        evaluation={"num_prompts": 2},
    )
    assert result.metrics[-1]["episode/turns"] >= 1


def test_what_cannot_run_there_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(word: str) -> str:
        return word

    with pytest.raises(ConfigError, match="only a function at the top of a file"):
        sandboxed_tool(inner, 1.0)
    words = ["train", "word_problems", "rollouts.tools=['sandbox:missing.py:look']", "run.name=run"]
    done = CliRunner().invoke(app, words)
    assert "there is no file missing.py" in str(done.exception)
    with pytest.raises(ConfigError, match=r"there is no 'sandbox:look'.*sandbox:file.py:name"):
        tools_named("sandbox:look")
    monkeypatch.setattr(tiers, "_report", lambda name: tiers.TierReport(name, False, "", "it is missing", "Install it"))
    with pytest.raises(SandboxUnavailable, match=r"cannot be isolated.*Install it"):
        tools_named("sandbox:own.py:look")
