"""Is a model that the program loaded trained, resumed and sampled from like one that a recipe names?"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import gate
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import oncurve
from oncurve.core.errors import ConfigError
from oncurve.observe.run_model import locate
from oncurve.run.trainer import Trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)  # peft's word to transformers

ROWS = [{"question": f"How much is {a} + {b}?", "answer": a + b} for a in range(1, 9) for b in range(1, 6)]
SMALL: dict[str, Any] = {
    "evaluation": {"num_prompts": 4},
    "algorithm": {"group_size": 4},
    "rollouts": {"max_completion_tokens": 24},
    "optimizer": {"learning_rate": 1e-4},
}


def run_of(folder: Path, name: str) -> dict[str, Any]:
    return {"steps": 3, "prompts_per_step": 2, "folder": str(folder), "name": name}


def short(completion: str) -> float:
    return float(len(completion) % 5)


def loaded() -> tuple[Any, Any]:
    place = locate("embedded")
    return AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)


def with_adapter() -> tuple[PeftModel, Any]:
    model, tokenizer = loaded()
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])), tokenizer


def weights(run: Path) -> str:
    (file,) = (run / "model").glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_loaded_model_ends_with_the_weights_of_the_named_one_and_is_the_object_that_was_passed(
    tmp_path: Path,
) -> None:
    named = oncurve.train("embedded", ROWS, short, run=run_of(tmp_path, "named"), **SMALL)
    model, tokenizer = loaded()
    trainer = Trainer(model, ROWS, short, tokenizer=tokenizer, run=run_of(tmp_path, "loaded"), **SMALL)
    result = trainer.train()
    assert weights(result.folder) == weights(named.folder)
    assert trainer.policy.model is model
    saved = load_file(result.folder / "model" / "model.safetensors")
    assert all(torch.equal(dict(model.named_parameters())[name], saved[name]) for name in saved)


@pytest.mark.parametrize("make", gate([loaded, with_adapter], with_adapter))
def test_it_is_left_and_resumed_in_this_process_and_in_another(make: Any, tmp_path: Path) -> None:
    model, tokenizer = make()
    whole = Trainer(model, ROWS, short, tokenizer=tokenizer, run=run_of(tmp_path, "whole"), **SMALL).train()
    model, tokenizer = make()
    trainer = Trainer(model, ROWS, short, tokenizer=tokenizer, run=run_of(tmp_path, "parted"), **SMALL)
    for step in trainer.steps():
        trainer.sample("How much is 2 + 2?", n=2)  # looking in between changes nothing
        trainer.evaluate()
        if step.number == 1:
            break
    fresh, tokenizer = make()  # as a program that starts again would
    again = Trainer(fresh, ROWS, short, tokenizer=tokenizer, run=run_of(tmp_path, "parted"), **SMALL)
    next(again.resume_steps())
    assert weights(trainer.resume().folder) == weights(whole.folder)


def test_another_model_is_refused_and_so_is_a_moved_one_that_would_be_its_own_reference(tmp_path: Path) -> None:
    sections = {**SMALL, "algorithm": {"group_size": 4, "kl_coef": 0.1}}
    model, tokenizer = loaded()
    trainer = Trainer(model, ROWS, short, tokenizer=tokenizer, run=run_of(tmp_path, "kl"), **sections)
    next(trainer.steps())
    with pytest.raises(ConfigError, match="the weights of the base model"):
        trainer.resume()
    fresh, tokenizer = loaded()
    again = Trainer(fresh, ROWS, short, tokenizer=tokenizer, run=run_of(tmp_path, "kl"), **sections)
    assert not again.resume().is_interrupted


def test_a_model_without_a_name_trains_here_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    made, tokenizer = loaded()
    model = AutoModelForCausalLM.from_config(made.config)
    model.name_or_path = ""
    with pytest.raises(ConfigError, match="Pass tokenizer="):
        oncurve.train(model, ROWS, short, run=run_of(tmp_path, "one"), **SMALL)
    served = {**SMALL, "rollouts": {**SMALL["rollouts"], "type": "servers", "own_servers": 1}}
    with pytest.raises(ConfigError, match="a server cannot load it"):
        oncurve.train(model, ROWS, short, tokenizer=tokenizer, run=run_of(tmp_path, "two"), **served)
    result = oncurve.train(model, ROWS, short, tokenizer=tokenizer, run=run_of(tmp_path, "three"), **SMALL)
    assert (result.folder / "model").is_dir()


def test_an_adapter_is_saved_as_one(tmp_path: Path) -> None:
    model, tokenizer = with_adapter()
    result = oncurve.train(model, ROWS, short, tokenizer=tokenizer, run=run_of(tmp_path, "peft"), **SMALL)
    assert (result.folder / "model" / "adapter_config.json").is_file()
    assert (result.folder / "report.html").is_file()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # of peft
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"use_dora": True}, marks=pytest.mark.nightly),
        {"modules_to_save": ["lm_head"]},
        pytest.param({"trainable_token_indices": [5, 6]}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_parts_beside_an_adapter_are_sampled_trained_and_saved(kind: dict[str, Any], tmp_path: Path) -> None:
    """As those of a folder are; the reference is the model as it was passed."""
    base, tokenizer = loaded()
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **kind))
    with torch.no_grad():
        for weight in (one for one in model.parameters() if one.requires_grad):
            weight.add_(0.02 * torch.randn_like(weight))
    options: dict[str, Any] = {**SMALL, "algorithm": {"group_size": 4, "kl_coef": 0.01}}
    options |= {"optimizer": {"learning_rate": 1e-3}, "policy": {"compute_type": "float32"}}
    trainer = oncurve.Trainer(model, ROWS, short, tokenizer=tokenizer, run=run_of(tmp_path, "parts"), **options)
    steps = [step.metrics for step in trainer.steps()]
    assert all(abs(step["mismatch/kl"]) < 1e-6 for step in steps)
    assert steps[0]["policy/kl"] == 0 < steps[-1]["policy/kl"]
    back = PeftModel.from_pretrained(loaded()[0], str(trainer.save(tmp_path / "saved")))
    ids = torch.tensor([[1, 5, 6, 7]])
    torch.testing.assert_close(back(input_ids=ids).logits, model(input_ids=ids).logits)
