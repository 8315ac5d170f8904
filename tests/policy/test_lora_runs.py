"""Does a whole run with an adapter work, through the commands that a user types?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.observe.record import read_metrics

SHORT = (
    "run.steps=3",
    "run.prompts_per_step=8",
    "algorithm.group_size=4",
    "rollouts.max_completion_tokens=24",
    "evaluation.num_prompts=4",
    "evaluation.every_steps=0",
    "optimizer.learning_rate=1e-3",
    "algorithm.kl_coef=0.05",
)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.proves("F47")
def test_an_adapter_is_trained_saved_merged_and_trained_further(tmp_path: Path) -> None:
    own = (*SHORT, f"run.folder={tmp_path}")
    run("train", "word_problems", *own, "run.name=first", "policy.lora.rank=8")
    model = tmp_path / "first" / "model"
    described = json.loads((model / "adapter_config.json").read_text())
    assert (described["peft_type"], described["r"], described["base_model_name_or_path"]) == ("LORA", 8, "embedded")
    weights = load_file(model / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.") and ".lora_" in name for name in weights)
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name), "nothing was learned"
    assert all("policy/kl" in row for row in read_metrics(tmp_path / "first")[1:])
    run("merge", str(model), "--output", str(tmp_path / "merged"))
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    run("train", "word_problems", *own, f"model={model}", "run.name=second", "policy.lora.rank=8")
    further = load_file(tmp_path / "second" / "model" / "adapter_model.safetensors")
    assert further.keys() == weights.keys()
    assert any(not tensor.equal(weights[name]) for name, tensor in further.items())
