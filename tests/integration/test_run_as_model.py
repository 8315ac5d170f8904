"""Does a run's folder stand for its trained model in every command that takes a model?"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.evaluate.evaluation import Evaluation, read_evaluation
from oncurve.run_errors import CheckpointError

QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
SMALL = ("evaluation.num_prompts=12", "rollouts.max_completion_tokens=64", "policy.compute_type=float32")


def command(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose learning rate is so large that its model writes other texts than its base."""
    folder = tmp_path_factory.mktemp("runs")
    command(
        "train", "word_problems", "run.steps=2", "run.prompts_per_step=4", "optimizer.learning_rate=0.01",
        "optimizer.warmup_updates=0", "evaluation.every_steps=0", "run.save_every_steps=0", f"run.folder={folder}",
        "run.name=far", *SMALL,
    )  # fmt: skip
    return folder / "far"


def texts(evaluation: Evaluation) -> list[str]:
    return [example.completion for example in evaluation.examples]


def test_a_run_is_evaluated_with_its_trained_model(trained: Path, tmp_path: Path) -> None:
    said = command("evaluate", str(trained), "--output", str(tmp_path / "out"))
    found = read_evaluation(tmp_path / "out" / "evaluations", "evaluation")
    base, after = (read_evaluation(trained / "evaluations", name) for name in ("base", "trained"))
    assert texts(base) != texts(after), "the training changed what the model writes"
    assert texts(found) == texts(after)
    assert str(trained / "model") in said


def test_a_run_can_be_named_where_a_recipe_is_evaluated_with_another_model(trained: Path, tmp_path: Path) -> None:
    said = command(
        "evaluate", "word_problems", "--model", "embedded", "--against", str(trained), *SMALL,
        "--output", str(tmp_path / "out"),
    )  # fmt: skip
    found = read_evaluation(tmp_path / "out" / "evaluations", "base")  # what the model is compared with
    assert texts(found) == texts(read_evaluation(trained / "evaluations", "trained"))
    assert "far" in said


def test_a_run_answers_questions_with_its_trained_model(trained: Path) -> None:
    said = [
        command("sample", str(model), QUESTION, "--max-tokens", "24")
        for model in (trained, trained / "model", "embedded")
    ]
    assert said[0] == said[1] != said[2]


def test_a_run_is_trained_further_from_its_model(trained: Path, tmp_path: Path) -> None:
    command(
        "train", "word_problems", f"model={trained}", "run.steps=1", "run.prompts_per_step=2", "run.name=further",
        f"run.folder={tmp_path}", "run.save_every_steps=0", "evaluation.every_steps=0", *SMALL,
    )  # fmt: skip
    first = read_evaluation(tmp_path / "further" / "evaluations", "base")
    assert texts(first) == texts(read_evaluation(trained / "evaluations", "trained"))


@pytest.mark.parametrize("words", [("evaluate",), ("sample", QUESTION)], ids=["evaluate", "sample"])
def test_an_unfinished_run_is_refused_with_the_way_to_finish_it(
    words: tuple[str, ...], trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "cut"
    run.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "status.json"):
        (run / name).write_bytes((trained / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"has not finished. `oncurve resume"):
        command(words[0], str(run), *words[1:])
