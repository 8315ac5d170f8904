"""Do the small versions of the experiments train, survive what the large ones must, and end with a page to look at?"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oncurve.evaluate.evaluation import read_evaluation
from oncurve.recipe.files import copy_recipe

if TYPE_CHECKING:
    from nursery import Child, Nursery

RowsOf = Callable[[Path], list[dict[str, Any]]]
Serve = Callable[[], "Child"]
Reaches = Callable[[Path, int], bool]
WaitFor = Callable[..., None]


FEW = ("evaluation.num_prompts=8", "evaluation.num_prompts_during=4", "run.prompts_per_step=4")
"""Enough to see that it was measured and that it trains: how well is not what these tests are about."""


def words_for(name: str, folder: Path, *more: str) -> list[str]:
    return ["train", name, f"run.folder={folder}", "run.name=run", "run.rollouts_every_steps=1", *FEW, *more]


def on_registry(name: str, folder: Path, *more: str) -> list[str]:
    return words_for(name, folder, f"rollouts.registry={folder / 'registry'}", *more)


def versions_of(run: Path) -> list[set[int]]:
    """Which weights the completions of each written step are of, in the order of the steps."""
    found = []
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        groups = [json.loads(line) for line in path.read_text().splitlines()]
        found.append({one["policy_version"] for group in groups for one in group["completions"]})
    return found


@pytest.mark.nightly
def test_r1_zero_beside_a_server_is_killed_and_resumed(
    nursery: Nursery, serve: Serve, wait_for: WaitFor, reaches: Reaches, rows_of: RowsOf, tmp_path: Path
) -> None:
    serve()
    run = tmp_path / "run"
    trainer = nursery.start(*on_registry("math_r1_zero/tiny_serve", tmp_path))
    wait_for(lambda: reaches(run, 3), trainer)
    trainer.kill(signal.SIGKILL)
    trainer.wait()
    status, said = nursery.run("resume", run)
    assert status == 0, said
    rows = rows_of(run)
    assert len(rows) == 7
    assert versions_of(run) == [{step} for step in range(6)]
    trained, base = (read_evaluation(run / "evaluations", name) for name in ("trained", "base"))
    assert trained is not None
    assert base is not None
    assert len(trained.examples) == len(base.examples) == 8
    status, said = nursery.run(
        "evaluate", "math_r1_zero/tiny_serve", "rollouts.type=engine", "rollouts.registry=null",
        "evaluation.num_prompts=6", "--model", "embedded", "--against", run / "model",
        "--output", tmp_path / "compared",
    )  # fmt: skip
    assert status == 0, said
    assert "on 6 test problems" in said


@pytest.mark.nightly
def test_a_spot_machine_goes_and_another_comes_while_an_adapter_trains(
    nursery: Nursery, serve: Serve, wait_for: WaitFor, reaches: Reaches, rows_of: RowsOf, tmp_path: Path
) -> None:
    first, _ = serve(), serve()
    run = tmp_path / "run"
    trainer = nursery.start(*on_registry("spot_32b/tiny_serve", tmp_path))
    wait_for(lambda: reaches(run, 2), trainer)
    first.kill(signal.SIGKILL)
    serve()
    wait_for(lambda: reaches(run, 4), trainer)
    trainer.kill(signal.SIGTERM)  # the notice of a spot machine
    assert trainer.wait() == 143, trainer.output
    status, said = nursery.run("resume", run)
    assert status == 0, said
    rows = rows_of(run)
    assert versions_of(run) == [{step} for step in range(6)]
    assert all(row["completion/max_staleness_steps"] == 0 for row in rows if row["step"])
    assert any(row.get("policy/kl", 0) > 0 for row in rows)
    assert (run / "model" / "adapter_config.json").is_file()


@pytest.mark.nightly
def test_all_weights_in_two_processes_beside_servers(
    nursery: Nursery, serve: Serve, rows_of: RowsOf, tmp_path: Path
) -> None:
    serve()
    status, said = nursery.run(*on_registry("spot_32b/tiny_full", tmp_path, "run.steps=3"), "--processes", 2)
    assert status == 0, said
    assert len(rows_of(tmp_path / "run")) == 4
    assert versions_of(tmp_path / "run") == [{0}, {1}, {2}]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.nightly
def test_instruct_in_two_processes_loses_one_and_goes_on_with_its_refreshed_reference(
    nursery: Nursery, wait_for: WaitFor, reaches: Reaches, rows_of: RowsOf, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trainer = nursery.start(
        *words_for("gsm8k_instruct/tiny", tmp_path, "policy.silent_seconds=10", "run.prompts_per_step=2"),
        "--processes",
        2,
    )
    wait_for(lambda: reaches(run, 3), trainer)
    os.kill(json.loads((run / "status.json").read_text())["pid"], signal.SIGKILL)
    assert trainer.wait() == 75, trainer.output
    status, said = nursery.run("resume", run, "--processes", 2)
    assert status == 0, said
    kl = {row["step"]: row.get("policy/kl", 0.0) for row in rows_of(run)}
    assert kl[1] == kl[3] == kl[5] == pytest.approx(0, abs=1e-6), "the reference has just been refreshed"
    assert min(kl[2], kl[4], kl[6]) > 1e-6
    measure = ["evaluate", "gsm8k_instruct/tiny", "evaluation.num_prompts=4", "--model", run / "model"]
    status, said = nursery.run(*measure, "--output", tmp_path / "few")
    assert status == 0, said
    few = read_evaluation(tmp_path / "few" / "evaluations", "evaluation")
    many = read_evaluation(run / "evaluations", "trained")
    assert few is not None
    assert many is not None
    assert (len(few.examples), len(many.examples)) == (4, 8)
    assert [one.completion for one in few.examples] == [one.completion for one in many.examples[:4]]


def test_a_reward_beside_the_recipe_trains_the_model(nursery: Nursery, rows_of: RowsOf, tmp_path: Path) -> None:
    mine = copy_recipe("custom_reward", tmp_path / "mine")
    status, said = nursery.run(*words_for(str(mine), tmp_path, "run.steps=8", "run.prompts_per_step=8"))
    assert status == 0, said
    rows = rows_of(tmp_path / "run")
    assert {"reward/right", "reward/brief"} <= rows[-1].keys()
    assert sum(row["reward/right"] for row in rows[-3:]) > sum(row["reward/right"] for row in rows[1:4])


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["structured_output/tiny", "instructions/tiny"])
def test_a_form_that_a_program_verifies_is_trained(
    recipe: str, nursery: Nursery, rows_of: RowsOf, tmp_path: Path
) -> None:
    status, said = nursery.run(*words_for(recipe, tmp_path))
    assert status == 0, said
    assert len(rows_of(tmp_path / "run")) == 7
