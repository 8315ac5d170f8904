"""Is a model that a program changed in memory told from the files that an adapter will be loaded on?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bits.runs import tiny_model
from transformers import AutoModelForCausalLM

import oncurve
from oncurve.policy.changed_model import changed_in_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changed_weights_are_named_and_others_are_not(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if dtype is torch.float32:
        assert changed_in_memory(model, str(folder)) is None
    model.save_pretrained(tmp_path / "half")
    assert changed_in_memory(model.float(), str(tmp_path / "half")) is None
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    said = changed_in_memory(model, str(tmp_path / "half"))
    assert said is not None
    assert "1 weight of the model that was passed is not as in the files" in said
    assert "model.layers.0.mlp.up_proj.weight" in said
    model.resize_token_embeddings(model.config.vocab_size + 8)
    assert "embed_tokens" in str(changed_in_memory(model, str(tmp_path / "half")))


def test_an_adapter_on_such_a_model_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "base"))
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)
    policy = {"lora": {"rank": 2}, "device": "cpu"}
    rows = [{"question": f"{n}", "answer": f"{n}"} for n in range(12)]
    result = oncurve.train(
        model, {"rows": rows, "template": "plain"}, lambda completion: len(completion) % 3 / 2,
        policy=policy, algorithm={"group_size": 2}, rollouts={"max_completion_tokens": 4},
        evaluation={"num_prompts": 1, "num_prompts_during": 1},
        run={"steps": 1, "prompts_per_step": 2, "folder": str(tmp_path), "name": "run", "save_every_steps": 0},
    )  # fmt: skip
    assert "model.norm.weight. The adapter is trained on the model in memory" in " ".join(
        capsys.readouterr().out.split()
    )
    assert "not as in the files" in (result.folder / "log.txt").read_text(encoding="utf-8")
