"""Do the smaller commands and keys do what they say, through the command line and on the embedded model?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.evaluate.evaluation import read_evaluation
from oncurve.observe.record import read_metrics

QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
SMALL = ("run.prompts_per_step=2", "algorithm.group_size=4", "evaluation.num_prompts=6", "evaluation.every_steps=0")


def run(*words: str, typed: str | None = None) -> str:
    result = CliRunner().invoke(app, list(words), input=typed, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.proves("F144")
def test_a_question_is_completed_as_often_as_asked() -> None:
    said = run("sample", "embedded", QUESTION, "--count", "3", "--temperature", "1", "--max-tokens", "40")
    assert said.count(QUESTION) == 3
    assert "model: sampled through our own layers" in said
    assert said.count(" tokens, ") == 3


@pytest.mark.proves("F144")
def test_questions_are_asked_for_until_an_empty_line() -> None:
    said = run("sample", "embedded", "--max-tokens", "40", typed=f"{QUESTION}\nHow much is 2 + 3?\n\nnever read\n")
    assert said.count("question (empty to stop)") == 3
    assert said.count(" tokens, ") == 2
    assert "How much is 2 + 3?" in said
    assert "never read" not in said


@pytest.mark.proves("F84")
def test_check_describes_the_rows() -> None:
    said = run("check", "word_problems", "data.limit=200", "evaluation.every_steps=0", "evaluation.num_prompts=20")
    assert "rows, 0 repeated questions" in said
    assert "model: trained with packed rows through our own layers; sampled through our own layers (shown by" in said
    assert "answers: " in said
    assert "median" in said


@pytest.mark.proves("F40")
def test_measuring_in_float16_gives_what_float32_gives(tmp_path: Path) -> None:
    found = []
    for kind in ("float32", "float16"):
        run("evaluate", "word_problems", f"policy.compute_type={kind}", "evaluation.num_prompts=6", "--output",
            str(tmp_path / kind))  # fmt: skip
        found.append(read_evaluation(tmp_path / kind / "evaluations", "evaluation"))
    texts = [[one.completion for one in evaluation.examples] for evaluation in found]
    same = sum(one == other for one, other in zip(*texts, strict=True))
    assert same >= 5, "rounding may turn a near tie, and no more"


@pytest.mark.nightly
@pytest.mark.proves("F40")
def test_training_in_float16_learns_with_a_scaled_loss(tmp_path: Path) -> None:
    """Updates are those of float32, nearly, and a checkpoint holds the scale."""
    found = {}
    for kind in ("float32", "float16"):
        words = [*SMALL, "run.steps=2", f"run.folder={tmp_path}", f"run.name={kind}", "run.save_every_steps=1"]
        run("train", "word_problems", f"policy.compute_type={kind}", *words)
        found[kind] = read_metrics(tmp_path / kind)[1]
    state = json.loads((tmp_path / "float16" / "checkpoints" / "step_000001" / "state.json").read_text())
    assert state["loss_scale"] == {"value": 4096.0, "num_finite": 1}
    assert found["float16"]["policy/loss_scale"] == 4096
    assert found["float16"]["policy/gradient_norm"] == pytest.approx(found["float32"]["policy/gradient_norm"], rel=0.05)
    assert 0.9 < found["float16"]["policy/arrived"] < 1.1


@pytest.mark.proves("F143", "F155")
def test_a_run_leaves_an_analysis_of_both_measurements_and_the_speed_of_every_step(tmp_path: Path) -> None:
    run("train", "word_problems", *SMALL, "run.steps=2", f"run.folder={tmp_path}", "run.name=run")
    for name in ("base", "trained"):
        page = (tmp_path / "run" / "evaluations" / f"{name}.md").read_text()
        assert "| Right answer in the right form |" in page
        assert "completion:" in page
    for row in read_metrics(tmp_path / "run")[1:]:
        sampled = row["tokens/sampled"] / row["time/sample_seconds"]
        assert row["speed/sampled_tokens_per_second"] == pytest.approx(sampled)
        if row["policy/skipped_updates"] == 0:
            assert row["speed/trained_tokens_per_second"] > 0


@pytest.mark.proves("F35", "F122", "D8", "D19", "D49")
def test_a_run_prints_how_its_numbers_follow_from_each_other(tmp_path: Path) -> None:
    said = run("train", "word_problems", *SMALL, "run.steps=1", "data.limit=70", f"run.folder={tmp_path}")
    assert "each step: 2 prompts x 4 completions = 8 completions, 1 update" in said
    assert "the run: 1 step, 70 training prompts (0.029 passes), 6 test" in said
