"""Does the supervised stage of a recipe learn its solutions, and does the recipe go on from it?"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.observe.record import read_json, read_metrics

ONE_PROCESS = {
    "gsm8k_lora_8gb": ["policy.parallel=none", "policy.deepspeed=null"],
    "spot_32b": ["rollouts.type=engine", "rollouts.vllm_servers=0", "rollouts.vllm_options=[]"],
}
"""What makes the tiny version need neither DeepSpeed nor vLLM."""
SHORT = ["evaluation.num_prompts=2", "evaluation.every_steps=0", "rollouts.max_completion_tokens=16"]


def oncurve(*words: str) -> None:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.proves("F36")
@pytest.mark.nightly
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_a_recipe_goes_on_from_its_supervised_stage(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    oncurve("sft", f"{name}/tiny_sft", "run.name=warm", *SHORT)
    losses = [row["sft/loss"] for row in read_metrics(tmp_path / "runs" / "warm") if row["step"]]
    assert len(losses) == 12
    assert losses[-1] < 0.8 * losses[0]
    model = "runs/warm"
    if name == "spot_32b":  # servers begin with a whole model
        oncurve("merge", "runs/warm/model", "--output", "runs/warm/merged")
        model = "runs/warm/merged"
    words = ["run.name=after", f"model={model}", "run.steps=2", *ONE_PROCESS[name], *SHORT]
    oncurve("train", f"{name}/tiny", *words)
    assert [row["step"] for row in read_metrics(tmp_path / "runs" / "after")][-1] == 2


@pytest.mark.nightly
def test_the_small_gsm8k_learns_its_form_and_goes_on_with_grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["evaluation.num_prompts=20", "evaluation.data.limit=20"]
    oncurve("sft", "gsm8k_small/tiny_sft", "run.name=warm", *few)
    before, after = (read_json(tmp_path / f"runs/warm/evaluations/{name}.json") for name in ("base", "trained"))
    assert before["correct"]["successes"] == 0, "the embedded model writes no ####"
    assert after["correct"]["successes"] > 0
    oncurve("train", "gsm8k_small/tiny", "run.name=after", "model=runs/warm", "run.steps=2", *few)
    rows = [row for row in read_metrics(tmp_path / "runs" / "after") if row["step"]]
    assert len(rows) == 2
    assert all(row["group/zero_signal_fraction"] < 1 for row in rows)
