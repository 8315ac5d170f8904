"""The learning rate of runs that go on for more updates than their schedule was made for."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from bits.runs import recipe_in
from rich.console import Console

import oncurve
from oncurve.core.errors import ConfigError
from oncurve.observe.record import read_metrics
from oncurve.policy.settings import OptimizerSettings
from oncurve.recipe.load import load_config, parse_config
from oncurve.recipe.schema import Config
from oncurve.run import builder
from oncurve.run.checkpoint_manifest import read_manifest
from oncurve.run.checkpointer import Checkpointer
from oncurve.run.extension import extended, rate_differences
from oncurve.run.training import resume_run


def recipe(steps: int, schedule: str = "cosine", **optimizer: Any) -> Config:
    text = f"{{model: embedded, data: {{type: word_problems, limit: 99}}, run: {{steps: {steps}}}}}"
    keys = {"learning_rate": 1.0, "schedule": schedule, **optimizer}
    return parse_config(text, [f"optimizer.{key}={value}" for key, value in keys.items()])


def rates(config: Config, total: int) -> list[float]:
    return [round(config.optimizer.rate(update, total), 3) for update in range(total)]


def manifest(config: Config, step: int) -> dict[str, Any]:
    return {"config": config.model_dump(mode="json"), "step": step}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_an_extension_says_what_it_does_to_the_rate_and_the_past_stays(schedule: str) -> None:
    was = recipe(4, schedule)
    past = rates(was, 4)
    for name in ("restart", "hold"):
        longer = extended(recipe(8, schedule, extension=name), manifest(was, 4), decides=True)
        assert longer.optimizer.planned_updates == (4,)
        assert rates(longer, 8) == past + (past if name == "restart" else past[-1:] * 4)
    assert rates(extended(recipe(8, schedule, extension="stretch"), manifest(was, 4), decides=True), 8) == rates(
        recipe(8, schedule), 8
    )


def test_a_second_extension_keeps_what_the_first_one_did() -> None:
    once = extended(recipe(8, extension="restart"), manifest(recipe(4), 4), decides=True)
    twice = extended(recipe(10, extension="restart"), manifest(once, 8), decides=True)
    assert twice.optimizer.planned_updates == (4, 8)
    assert rates(twice, 10)[:8] == rates(once, 8)
    assert rates(twice, 10)[8:] == [1.0, 0.5]


def test_without_a_decision_the_choices_are_drawn() -> None:
    with pytest.raises(ConfigError) as refused:
        extended(recipe(8), manifest(recipe(4), 4), decides=True)
    said = str(refused.value)
    assert "stretch: the schedule of a run of that length from the beginning: 0.5, 0.309, 0.146, 0.0381 at" in said
    assert "restart: the warm-up and the schedule again, over the new updates: 1, 0.854, 0.5, 0.146 at" in said
    assert (
        "hold: the rate of the last update that was planned: 0.146, 0.146, 0.146, 0.146 at updates 5, 6, 7, 8" in said
    )
    assert extended(recipe(8), manifest(recipe(4), 4), decides=False).optimizer.extension is None
    assert extended(recipe(8, "constant"), manifest(recipe(4, "constant"), 4), decides=True).optimizer.rate(7, 8) == 1


def test_rates_to_come_are_said_where_they_change(tmp_path: Path) -> None:
    was = recipe(8)
    assert rate_differences(was, manifest(was, 4)) == []
    [shorter] = rate_differences(recipe(6), manifest(was, 4))
    assert shorter == "the learning rate: 0.691 at update 4, then 0.25, 0.067 at updates 5, 6"
    assert rate_differences(recipe(9, "constant"), manifest(recipe(8, "constant"), 4)) == []
    assert "then 0.5, 0.5" in rate_differences(recipe(6, "constant", learning_rate=0.5), manifest(was, 4))[0]


LOGGED = [
    "model: trained with packed", "weights: 14 tensors", "beside them: nothing", "config.json: Qwen2ForCausalLM,",
    "tokenizer: 262 tokens", "generation_config.json: nothing in", "your model's own pass:",
]  # fmt: skip
"""How the lines in the log of a short run begin."""


def logged() -> list[str]:
    """The first words of the log's lines, as many as stand in ``LOGGED``."""
    lines = Path("run/log.txt").read_text(encoding="utf-8").splitlines()
    begins = [*LOGGED, "SEVERE: Completions"]
    texts = [line.split("  ", 1)[1] for line in lines if line]
    return [next((start for start in begins if text.startswith(start)), text) for text in texts]


def left_in(run: str) -> tuple[list[str], list[str]]:
    """Names of checkpoints and of rollouts."""
    return tuple(sorted(path.name for path in Path(run, kind).iterdir()) for kind in ("checkpoints", "rollouts"))  # type: ignore[return-value]


def status() -> dict[str, Any]:
    found = json.loads(Path("run/status.json").read_text(encoding="utf-8"))
    assert found.pop("pid") == os.getpid()
    return found


def test_a_run_is_extended_as_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(recipe_in(tmp_path))
    text = path.read_text(encoding="utf-8").replace("steps: 4", "steps: 2")
    path.write_text(text.replace("1.0e-2", "1.0e-2, schedule: linear"), encoding="utf-8")
    saved: list[int] = []
    save = Checkpointer.save
    monkeypatch.setattr(
        Checkpointer, "save", lambda self, *given: (saved.append(self._marked[0]), save(self, *given))[1]
    )
    kept: list[bool] = []
    monkeypatch.setattr(builder, "keep_freed_memory", lambda *, always: kept.append(always))
    result = oncurve.Trainer.from_recipe(str(path)).train()
    assert (result.base.name, result.trained.name if result.trained else None) == ("base", "trained")
    assert (saved, kept) == ([0, 1, 2], [True])
    shown = capsys.readouterr().out
    for line in (
        "each step: 4 prompts x 4 completions = 16 completions, 1 update\n",
        "the run: 2 steps, 22 training prompts (0.36 passes), 1 test, 1 validation",
        "(evaluation.every_steps is 0: not measured)",
        "step 1/2  reward 0.075  no signal 0%  length 11",
        "step 2/2  reward 0.025  no signal 25%  length 12",
        "run finished: run",
    ):
        assert line in shown, line
    assert logged() == LOGGED
    assert left_in("run") == (["step_000002"], ["step_000001.jsonl", "step_000002.jsonl"])
    assert [row["step"] for row in read_metrics(Path("run"))] == [0, 1, 2]
    assert status() == {"step": 2, "phase": "finished"}
    facts = read_manifest(Path("run/checkpoints/step_000002"))
    assert (facts["step"], facts["weights"], facts["device"], facts["threads"]) == (
        2,
        "whole",
        "cpu",
        torch.get_num_threads(),
    )
    assert (facts["rank"], facts["world_size"], facts["environment"], facts["data"]["num_prompts"]) == (0, 1, {}, 22)
    assert facts["columns"].keys() == {"question", "answer"}
    assert facts["code"].keys() == {"reward custom: reward.py"}
    assert facts["base"]["name"] == "model"
    assert {"config.json", "tokenizer.json"} <= facts["model_files"].keys()
    said = io.StringIO()

    def go_on(*words: str) -> None:
        resume_run("run", ["run.steps=4", *words], allow_change=True, console=Console(file=said, width=500))

    with pytest.raises(ConfigError, match=r"Say how the learning rate goes on, with optimizer\.extension"):
        go_on()
    go_on("optimizer.extension=restart")
    assert "the learning rate: 0.005 at update 2, then 0.01, 0.005 at updates 3, 4" in said.getvalue()
    assert saved == [0, 1, 2, 2, 3, 4], "the checkpoint that goes on says with which recipe"
    assert logged() == [*LOGGED, "resumed after step 2 from step_000002", LOGGED[0], LOGGED[-1], "SEVERE: Completions"]
    assert "resuming after step 2 of 4, from run/checkpoints/step_000002" in said.getvalue()
    assert left_in("run") == (
        ["step_000004"], ["step_000001.jsonl", "step_000002.jsonl", "step_000004.jsonl"]
    )  # fmt: skip
    assert [row["step"] for row in read_metrics(Path("run"))] == [0, 1, 2, 3, 4]
    assert status() == {"step": 4, "phase": "finished"}
    again = load_config(Path("run/config.yaml"), []).optimizer
    assert (again.extension, again.planned_updates) == ("restart", (2,))
    with pytest.raises(ConfigError, match="this run is finished"):
        go_on()
    measured = [row["policy/learning_rate"] for row in read_metrics(Path("run")) if row["step"]]
    assert measured == pytest.approx([1e-2, 5e-3, 1e-2, 5e-3])


def test_settings_alone_are_the_schedule_of_before() -> None:
    assert OptimizerSettings(schedule="cosine", learning_rate=1.0).rate(5, 10) == pytest.approx(0.5)
