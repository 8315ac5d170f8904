"""Does a supervised stage train, measure, resume and hand on a model like any other run, and learn what it is shown?"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import oncurve
from oncurve.cli.app import app
from oncurve.core.errors import ConfigError
from oncurve.observe.record import read_metrics
from oncurve.run.trainer import Trainer

if TYPE_CHECKING:
    from nursery import Nursery

ROWS = [{"prompt": f"User: {a}+{b}?\nAssistant:", "completion": f" It is {a + b}."} for a in range(8) for b in range(6)]
PLAIN: dict[str, Any] = {
    "evaluation": {"num_prompts": 4, "every_steps": 2, "num_prompts_during": 4},
    "rollouts": {"max_completion_tokens": 12},
    "optimizer": {"learning_rate": 1e-3},
}


def sections(folder: Path, **run: Any) -> dict[str, Any]:
    options = {"steps": 4, "prompts_per_step": 8, "folder": str(folder), "name": "run", "save_every_steps": 2, **run}
    return {**PLAIN, "run": {key: value for key, value in options.items() if value is not None}}


def weights(run: Path) -> str:
    files = sorted((run / "model").glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_a_stage_learns_what_it_is_shown_and_leaves_a_run(tmp_path: Path) -> None:
    result = oncurve.sft("embedded", ROWS, **sections(tmp_path, steps=12))
    rows = [row for row in read_metrics(result.folder) if row["step"]]
    losses = [row["sft/loss"] for row in rows]
    assert losses[-1] < losses[0] / 3
    held_out = [row["evaluation/loss"] for row in read_metrics(result.folder) if "evaluation/loss" in row]
    assert len(held_out) == 7
    assert held_out[-1] < held_out[0] / 3
    assert not any(key.startswith(("reward/", "group/", "mismatch/")) for row in rows for key in row)
    assert (result.folder / "report.html").exists()
    config = (result.folder / "config.yaml").read_text()
    assert "rft" in config
    shown = [json.loads(line) for line in (result.folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert all(row["completions"][0]["text"].startswith(" It is ") for row in shown)


@pytest.mark.parametrize("form", ["turns", "completion"])
def test_rows_whose_answers_no_completion_reaches_are_measured_by_their_likelihood_and_nothing_of_them_is_correct(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"Find {n % 8}.", form: [" ?", " more", f" {n % 8}"], "answer": str(n % 8)} for n in range(48)]
    if form == "completion":
        rows = [{"prompt": row["prompt"], form: f" It is {row['prompt'][5]}."} for row in rows]
    result = oncurve.sft("embedded", rows, **sections(tmp_path, steps=6))
    assert result.trained is not None
    before, after = result.base.mean_reward.value, result.trained.mean_reward.value
    assert before < after < 0
    assert not any(found.judges("correct") for found in (result.base, result.trained))
    said = capsys.readouterr().out
    assert "correct" not in said
    assert f"reward: {before:.3f} before" in said
    assert "minus its loss" in said
    logged = [row for row in read_metrics(result.folder) if "evaluation/loss" in row]
    assert logged[-1]["evaluation/loss"] < logged[0]["evaluation/loss"]
    if form == "completion":  # one turn: the two are the same number, by tokens and by rows of equal length
        assert logged[0]["evaluation/mean_reward"] == pytest.approx(-logged[0]["evaluation/loss"], rel=1e-4)


def test_epochs_set_the_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Trainer: run.steps=4 and sft.epochs=1.5 both set the length"):
        Trainer("embedded", ROWS, sft={"epochs": 1.5}, **sections(tmp_path))
    result = oncurve.sft("embedded", ROWS, sft={"epochs": 1.5}, **sections(tmp_path, steps=None))
    assert max(row["step"] for row in read_metrics(result.folder)) == 8  # (48 - 4 - 4) x 1.5 / 8, rounded up


def test_a_stage_that_was_left_ends_at_the_same_bits(tmp_path: Path) -> None:
    whole = oncurve.sft("embedded", ROWS, sft={"epochs": 1}, **sections(tmp_path / "whole", steps=None))
    trainer = Trainer("embedded", ROWS, sft={"epochs": 1}, **sections(tmp_path / "left", steps=None))
    for step in trainer.steps():
        if step.number == 3:
            break
    other = [{**row, "completion": row["completion"] + "!"} for row in ROWS]
    with pytest.raises(ConfigError, match="training prompts"):
        Trainer("embedded", other, sft={"epochs": 1}, **sections(tmp_path / "left", steps=None)).resume()
    result = trainer.resume()
    assert weights(result.folder) == weights(whole.folder)


@pytest.mark.proves("F36")
def test_the_command_trains_an_adapter_and_grpo_goes_on_from_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["run.steps=2", "run.prompts_per_step=4", "evaluation.num_prompts=4", "rollouts.max_completion_tokens=24"]
    words = ["sft", "word_problems", *small, "run.name=warm", "policy.lora.rank=4"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "loss " in done.output
    words = ["train", "word_problems", *small, "run.name=next", "model=runs/warm", "algorithm.group_size=4"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_rows_with_nothing_to_learn_get_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"prompt": "2+3?", "completion": ""}) + "\n")
    words = ["sft", "word_problems", "data.type=jsonl", "data.path=rows.jsonl"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, oncurve.OncurveError)
    assert "rows.jsonl, line 1: 'completion' is empty" in str(done.exception)


@pytest.mark.nightly
def test_two_processes_learn_what_one_does(nursery: Nursery, tmp_path: Path) -> None:
    small = ["run.steps=2", "run.prompts_per_step=4", "evaluation.num_prompts=4", "rollouts.max_completion_tokens=24"]
    losses = []
    for name, more in (("one", []), ("two", ["--processes", "2"])):
        status, said = nursery.run("sft", "word_problems", *small, f"run.name={name}", *more, cwd=tmp_path)
        assert status == 0, said
        losses.append([row["sft/loss"] for row in read_metrics(tmp_path / "runs" / name) if row["step"]])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_rows_that_are_too_long_are_counted_in_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = [{"prompt": "User: 1?\nAssistant:", "completion": " one" * 40}] * 3
    options = sections(tmp_path, steps=1) | {"evaluation": {"num_prompts": 4}}
    result = oncurve.sft("embedded", [*ROWS, *long], sft={"max_tokens": 40}, **options)
    assert "3 rows too long for sft.max_tokens=40" in " ".join(capsys.readouterr().out.split())
    left_out = json.loads((result.folder / "manifest.json").read_text())["prompts"]["too_long"]
    assert left_out == 3
    assert "left out as too long" in (result.folder / "report.html").read_text()
