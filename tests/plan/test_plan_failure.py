"""What does a plan say that a preemption costs, in steps, tokens, seconds and dollars?"""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app


def plan(*words: str) -> dict[str, Any]:
    command = ["plan", "gsm8k", "--json", "--mean-tokens", "100", *words]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.proves("F148")
def test_the_steps_since_the_last_checkpoint_are_done_again() -> None:
    found = plan("run.prompts_per_step=16", "run.save_every_steps=10", "--gpu", "H200")
    lost, per_step = found["failure"], 16 * 8
    assert (lost["steps"], lost["completions"], lost["tokens"]) == (10, 10 * per_step, 10 * per_step * 100)
    assert lost["seconds"] == pytest.approx(10 * found["seconds"]["step"])
    assert lost["usd"]["on_demand"] == pytest.approx(lost["seconds"] / 3600 * found["device"]["on_demand"])


def test_rarer_checkpoints_cost_more_and_none_cost_the_whole_run() -> None:
    costs = [plan(f"run.save_every_steps={steps}", "run.steps=60")["failure"]["steps"] for steps in (5, 25, 100, 0)]
    assert costs == [5, 25, 60, 60]


def test_a_lost_sampler_costs_its_share_of_one_step() -> None:
    found = plan("run.prompts_per_step=16", "--placement", "disaggregated", "--sampler-gpus", "2")
    assert found["failure"]["sampler_tokens"] == 16 * 8 * 100 / 2


@pytest.mark.proves("F148")
def test_the_text_says_it() -> None:
    result = CliRunner().invoke(app, ["plan", "gsm8k", "--placement", "disaggregated"], catch_exceptions=False)
    assert "if the trainer is preempted, you lose at most 50 steps" in result.output
    assert "if a rollout server is preempted, you lose at most" in result.output


def test_checkpoints_and_recorded_steps_are_planned_on_the_disk() -> None:
    found = plan("run.prompts_per_step=16", "run.steps=100", "run.save_every_steps=10")
    assert found["disk"]["checkpoint_bytes"] == 12 * found["trained_parameters"]
    assert (found["disk"]["checkpoints"], found["disk"]["record_bytes"]) == (2, 0)
    kept = plan(
        "run.prompts_per_step=16",
        "run.steps=100",
        "run.save_every_steps=10",
        "run.keep_every_steps=50",
        "run.record=all",
    )["disk"]
    assert kept["checkpoints"] == 4
    assert kept["record_bytes"] == 5 * 100 * 16 * 8 * 100
