"""Does Muon move the matrices of the layers and AdamW the rest, and does a run with both resume to the same bits?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import oncurve
from oncurve.core.batch import collate
from oncurve.core.errors import ConfigError
from oncurve.core.records import Group
from oncurve.policy.distributed import Processes
from oncurve.policy.from_settings import make_sharding
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.load import parse_config
from oncurve.run.trainer import Trainer

MUON = OptimizerSettings(type="muon", learning_rate=1e-2, beta2=0.95, max_gradient_norm=0)
ROWS = [{"prompt": f"User: {a}+{b}?\nAssistant:", "completion": f" It is {a + b}."} for a in range(6) for b in range(6)]


def update(policy: TrainedPolicy, groups: list[Group]) -> dict[str, torch.Tensor]:
    """An update of a policy; the gradients that it was made with."""
    batch = collate(groups, torch.ones(len(groups), len(groups[0].completions)))
    logprobs, _ = policy.logprobs(batch)
    policy.backward(-logprobs.sum())
    gradients = {
        name: weight.grad.clone() for name, weight in policy.model.named_parameters() if weight.grad is not None
    }
    policy.update()
    return gradients


def test_an_update_is_that_of_muon_for_matrices_and_of_adamw_for_the_rest(
    make_policy: Callable[..., TrainedPolicy],
    tiny_model: Callable[..., PreTrainedModel],
    random_groups: Callable[..., list[Group]],
) -> None:
    policy, other = make_policy(optimizer=MUON), tiny_model("qwen2")
    matrices, rest = [], []
    for name, weight in other.named_parameters():
        is_matrix = name.endswith("_proj.weight")
        (matrices if is_matrix else rest).append(weight)
        assert weight.ndim == 2 or not is_matrix
    by_hand = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for _ in range(2):
        gradients = update(policy, random_groups())
        for name, weight in other.named_parameters():
            weight.grad = gradients.get(name)
        for optimizer in by_hand:
            optimizer.step()
    wanted = dict(other.named_parameters())
    assert matrices
    assert all(torch.equal(weight, wanted[name]) for name, weight in policy.model.named_parameters())


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def test_a_run_with_muon_that_was_left_ends_at_the_same_bits(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    options: dict[str, Any] = {
        "optimizer": {"type": "muon", "learning_rate": 1e-3, "schedule": "linear"},
        "evaluation": {"num_prompts": 2},
        "rollouts": {"max_completion_tokens": 4},
    }
    run = {"steps": 4, "prompts_per_step": 8, "name": "run", "save_every_steps": 2}
    model = str(checkpoints["qwen2"])
    whole = oncurve.sft(model, ROWS, run={**run, "folder": str(tmp_path / "whole")}, **options)
    trainer = Trainer(model, ROWS, sft={}, run={**run, "folder": str(tmp_path / "left")}, **options)
    for step in trainer.steps():
        if step.number == 3:
            break
    assert weights(trainer.resume().folder) == weights(whole.folder)


def test_weights_in_parts_are_refused_since_muon_needs_whole_matrices() -> None:
    text = "{model: embedded, data: {type: word_problems}, optimizer: {type: muon}, policy: {parallel: fsdp}}"
    config, two = parse_config(text), Processes(rank=0, count=2)
    with pytest.raises(ConfigError, match=r"optimizer\.type is muon, which needs whole matrices"):
        make_sharding(config.policy, config.optimizer, two)
