"""Does a converted recipe train, with the reward function as it is and TRL's own loss?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.config.load import load_config, parse_config
from oncurve.convert.draft import recipe_text
from oncurve.convert.options import DatasetSource, OptionOutcome, OptionValue, RewardSource
from oncurve.convert.trl import convert

LIMIT = 50
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": LIMIT},
    "dapo, wider above": {"loss_type": "dapo", "epsilon_high": 0.28},
    "luspo for each token": {"loss_type": "luspo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 3e-4},
    "two-sided": {"loss_type": "dapo", "delta": 1.5},
    "kl": {"loss_type": "grpo", "beta": 0.04},
    "kl as printed": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.01},
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES.keys())
def test_the_loss_of_a_converted_recipe_is_trls(options: dict[str, Any]) -> None:
    import trl_reference

    from oncurve.wiring.algorithm import make_algorithm

    if trl_reference.REASON:
        pytest.skip(trl_reference.REASON)
    given = {name: OptionValue(value, 1) for name, value in {"num_generations": 4, **options}.items()}
    reward = RewardSource({"type": "custom", "function": "mine.py:one"}, ("answer",))
    found = OptionOutcome(
        "train.py", given, OptionValue("embedded", 1), DatasetSource("rows.jsonl", is_json=True), rewards=[reward]
    )
    algorithm = make_algorithm(parse_config(recipe_text(convert(found, rows=64), "")))
    theirs = {name: value for name, value in options.items() if name not in ("epsilon", "epsilon_high")}
    low = options.get("epsilon", 0.2)
    rows = trl_reference.Rows.random(3)
    expected = trl_reference.loss(rows, epsilon_low=low, epsilon_high=options.get("epsilon_high", low), **theirs)
    logprobs, entropy = rows.logprobs.clone().requires_grad_(), rows.entropy.clone().requires_grad_()
    value, _ = algorithm.loss(logprobs, entropy, rows.batch())
    gradients = torch.autograd.grad(value, (logprobs, entropy), allow_unused=True, materialize_grads=True)
    for mine, other in zip((value.detach(), *gradients), expected, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-7)


def test_a_converted_script_trains_and_its_reward_is_asked(script: Callable[..., Path]) -> None:
    rows = [{"prompt": f"User: How much is {n} + 1?\nAssistant: <think>", "gold": str(n + 1)} for n in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = """
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    def close(prompts, completions, gold, completion_ids, **kwargs):
        assert all(prompt.startswith("User: How much is") for prompt in prompts)
        return [float(g in c) + 0.001 * len(ids) for c, g, ids in zip(completions, gold, completion_ids)]
    """
    config = """
    args = GRPOConfig("out", per_device_train_batch_size=4, steps_per_generation=2, num_generations=4, max_steps=4,
                      max_completion_length=12, bf16=False, use_cpu=True, loss_type="grpo", learning_rate=1e-4)
    """
    trainer = "GRPOTrainer('embedded', close, args, load_dataset('json', data_files='rows.jsonl', split='train'))"
    path = script(config, trainer, head)
    done = CliRunner().invoke(app, ["convert", str(path), "--rows", "40"])
    assert done.exit_code == 0, done.output
    config_read = load_config("recipe.yaml")
    assert (config_read.completions_per_step, config_read.updates_per_step, config_read.run.steps) == (8, 2, 2)
    done = CliRunner().invoke(app, ["train", "recipe.yaml", "run.name=short"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    metrics = [json.loads(line) for line in Path("out/short/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in metrics if "reward/mean" in row]
    assert len(trained) == 2
    assert all(0 < row["reward/mean"] < 1.1 and row.get("reward/error_fraction", 0) == 0 for row in trained)


def test_what_is_lost_shows_in_the_exit_code(script: Callable[..., Path]) -> None:
    path = script("args = GRPOConfig('out', shuffle_dataset=False)")
    done = CliRunner().invoke(app, ["convert", str(path), "--rows", "40", "--output", "-"])
    assert done.exit_code == 1
    assert "# - train.py, line 7: shuffle_dataset" in done.output
    parse_config(done.output)
