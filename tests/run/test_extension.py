"""The learning rate of runs that go on for more updates than their schedule was made for."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from bits.runs import recipe_in
from rich.console import Console

import oncurve
from oncurve.core.errors import ConfigError
from oncurve.observe.record import read_metrics
from oncurve.policy.settings import OptimizerSettings
from oncurve.recipe.load import parse_config
from oncurve.recipe.schema import Config
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


def test_a_run_is_extended_as_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(recipe_in(tmp_path))
    text = path.read_text(encoding="utf-8").replace("steps: 4", "steps: 2")
    path.write_text(text.replace("1.0e-2", "1.0e-2, schedule: linear"), encoding="utf-8")
    oncurve.Trainer.from_recipe(str(path)).train()
    said = io.StringIO()

    def go_on(*words: str) -> None:
        resume_run("run", ["run.steps=4", *words], allow_change=True, console=Console(file=said, width=500))

    with pytest.raises(ConfigError, match=r"Say how the learning rate goes on, with optimizer\.extension"):
        go_on()
    go_on("optimizer.extension=restart")
    assert "the learning rate: 0.005 at update 2, then 0.01, 0.005 at updates 3, 4" in said.getvalue()
    measured = [row["policy/learning_rate"] for row in read_metrics(Path("run")) if row["step"]]
    assert measured == pytest.approx([1e-2, 5e-3, 1e-2, 5e-3])


def test_settings_alone_are_the_schedule_of_before() -> None:
    assert OptimizerSettings(schedule="cosine", learning_rate=1.0).rate(5, 10) == pytest.approx(0.5)
