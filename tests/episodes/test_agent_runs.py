"""Does an agent that knows nothing of training train a model, from Python, from a recipe, and after a kill?"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_kit import say
from typer.testing import CliRunner

import oncurve
from oncurve.cli.app import app
from oncurve.core.batch import collate
from oncurve.core.errors import ConfigError
from oncurve.observe.record import read_metrics
from oncurve.policy.trained_policy import TrainedPolicy

HERE = Path(__file__).parent
SMALL: dict[str, Any] = {
    "rollouts": {"type": "engine", "max_completion_tokens": 40, "episodes": {"max_turns": 4}},
    "algorithm": {"group_size": 4},
    "evaluation": {"num_prompts": 2},
}


def small_run(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return {"steps": 2, "prompts_per_step": 2, "name": name, "folder": str(folder), **more}


async def twice(row: dict[str, Any], client: Any) -> float:
    """Asks, and asks for the number behind it; pays by length, so that there is something to learn."""
    messages: list[Any] = say(row["question"])
    for more in ("And one more?", None):
        reply = await client.chat.completions.create(model="any", messages=messages)
        if more is not None:
            messages += [reply.choices[0].message, *say(more)]
    return -float(len(reply.choices[0].message.content))


twice.deterministic = True  # type: ignore[attr-defined]


async def at_once(row: dict[str, Any], client: Any) -> float:
    """Two conversations at the same time, one of them as a stream."""
    import asyncio

    async def streamed() -> str:
        words = ""
        stream = await client.chat.completions.create(model="any", messages=say(row["question"]), stream=True)
        async for part in stream:
            words += (part.choices[0].delta.content or "") if part.choices else ""
        return words

    async def whole() -> str:
        reply = await client.chat.completions.create(model="any", messages=say(f"Again: {row['question']}"))
        return reply.choices[0].message.content or ""

    return -float(sum(map(len, await asyncio.gather(streamed(), whole()))))


def checksum(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def check_logprobs(policy: TrainedPolicy, step: Any) -> None:
    """The sampler's log-probabilities are the trainer's, on every token that the policy wrote."""
    batch = collate(step.groups, torch.zeros(len(step.groups), len(step.groups[0].completions)))
    with torch.no_grad():
        logprobs, _ = policy.logprobs(batch)
    torch.testing.assert_close(logprobs[batch.mask], batch.sampler_logprobs[batch.mask], atol=1e-5, rtol=1e-5)


def test_an_agent_trains_and_its_tokens_have_the_trainers_logprobs(tmp_path: Path) -> None:
    frozen = {"learning_rate": 1e-30}
    trainer = oncurve.Trainer(
        "embedded", "word_problems", agent=at_once, optimizer=frozen, run=small_run(tmp_path, "exact"), **SMALL
    )
    for step in trainer.steps():
        assert step.metrics["episode/rows"] == 2.0
        assert step.metrics["reward/error_fraction"] == 0.0
        check_logprobs(trainer.policy, step)
        assert all(len(one.branches) == 1 for group in step.groups for one in group.completions)


def test_the_same_run_and_a_resumed_run_give_the_same_bits(tmp_path: Path) -> None:
    ends: list[str] = []
    learning: dict[str, Any] = {"agent": twice, "optimizer": {"learning_rate": 1e-3}}
    result = oncurve.train("embedded", "word_problems", run=small_run(tmp_path, "whole"), **learning, **SMALL)
    ends.append(checksum(result.folder))
    run = small_run(tmp_path, "left")
    trainer = oncurve.Trainer("embedded", "word_problems", run=run, **learning, **SMALL)
    for _ in trainer.steps():
        break
    ends.append(checksum(trainer.resume().folder))
    assert ends[0] == ends[1]


def test_an_agent_on_the_openai_package_trains_unchanged(tmp_path: Path) -> None:
    if importlib.util.find_spec("openai") is None:
        pytest.skip("the openai package is not installed: pip install openai")
    lines = (HERE / "openai_agent.py").read_text().splitlines()
    assert len(lines) <= 45
    sys.path.insert(0, str(HERE))
    try:
        from openai_agent import solve
    finally:
        sys.path.remove(str(HERE))
    result = oncurve.train("embedded", "word_problems", agent=solve, run=small_run(tmp_path, "python"), **SMALL)
    assert (result.folder / "model" / "model.safetensors").exists()
    assert result.metrics[-1]["reward/error_fraction"] == 0.0


RECIPE = """
model: embedded
data: {{type: word_problems}}
rewards: [{{type: environment}}]
rollouts:
  type: engine
  max_completion_tokens: 60
  agent: {agent}
algorithm: {{group_size: 4}}
run: {{steps: 2, prompts_per_step: 2, folder: {folder}, name: {name}}}
evaluation: {{num_prompts: 2}}
"""
FUNCTION = '''"""Solves word problems over the wire."""
import json
import urllib.request


def solve(row, base_url, api_key):
    body = {"model": "any", "messages": [{"role": "user", "content": row["question"]}]}
    head = {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), head)
    text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    return float(f"<answer> {row['answer']} </answer>" in text)
'''
PROGRAM = (
    FUNCTION
    + """

if __name__ == "__main__":
    import os
    import sys

    print(solve(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
"""
)


@pytest.mark.parametrize("kind", ["function", "program"])
def test_a_recipe_names_its_agent(tmp_path: Path, kind: str) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = f"{{command: [{sys.executable}, agent.py], deterministic: true}}"
    agent = "agent.py:solve" if kind == "function" else command
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(agent=agent, folder=tmp_path, name=kind))
    done = CliRunner().invoke(app, ["train", str(recipe)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert [row["reward/error_fraction"] for row in read_metrics(tmp_path / kind)[1:]] == [0.0, 0.0]
    assert (tmp_path / kind / "model" / "model.safetensors").exists()


def test_an_agent_and_tools_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="brings its own tools"):
        oncurve.Trainer("embedded", "word_problems", agent=twice, tools=["calculator"])
    with pytest.raises(ConfigError, match="cannot be called"):
        oncurve.Trainer("embedded", "word_problems", agent=3)
