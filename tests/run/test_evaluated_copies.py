"""An evaluation of a finished run measures the numbers that the run measured, and says which they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app

RUN = (
    "word_problems",
    "policy.device=cpu",
    "policy.compute_type=bfloat16",
    "optimizer.learning_rate=1e-3",
    "run.steps=2",
    "run.prompts_per_step=2",
    "run.seed=5",
    "run.save_every_steps=2",
    "run.name=one",
    "algorithm.group_size=2",
    "evaluation.num_prompts=8",
)


def completions(path: Path) -> list[str]:
    return [json.loads(line)["completion"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("float32", "weights: copies in bfloat16, dithered by seed 5"),
        pytest.param(
            "bfloat16",
            "weights: as they are in the files; bfloat16 loses none of their digits",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_copies_of_the_run_are_evaluated(kind: str, said: str, tmp_path: Path) -> None:
    def call(*words: str) -> str:
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    call("train", *RUN, f"run.folder={tmp_path}", f"run.model_type={kind}")
    measured = completions(tmp_path / "one" / "evaluations" / "trained.jsonl")
    # a recipe with another seed: the copies are those of the run in whose folder the model lies
    words = ("word_problems", "run.seed=7", "evaluation.num_prompts=8", "policy.device=cpu")
    run = tmp_path / "one"
    model, checkpoint = (("--model", str(folder)) for folder in (run / "model", run / "checkpoints" / "step_000002"))
    targets = {"run": (str(run),), "recipe": (*words, "policy.compute_type=bfloat16", *model)}
    if kind == "float32":  # a checkpoint has float32 weights, whatever the final model's type
        targets["checkpoint"] = (*words, "policy.compute_type=bfloat16", *checkpoint)
    for place, target in targets.items():
        output = tmp_path / place
        assert said in call("evaluate", *target, "--output", str(output))
        assert completions(output / "evaluations" / "evaluation.jsonl") == measured
