"""Does a whole run work, through the command that a user types?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.errors import OncurveError
from oncurve.observe.metrics import unknown_keys
from oncurve.observe.record import read_metrics, read_rollouts

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.jsonl"


def recipe(folder: Path, model: Path, data: dict[str, object], **changes: object) -> Path:
    tree = {
        "model": str(model),
        "data": data,
        "algorithm": {"group_size": 4},
        "rollouts": {"max_completion_tokens": 12},
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"num_prompts": 8, "num_prompts_during": 4, "every_steps": 5},
        "run": {
            "steps": 10,
            "prompts_per_step": 2,
            "folder": str(folder / "runs"),
            "name": "run",
            "save_every_steps": 5,
        },
    }
    for key, value in changes.items():
        tree[key] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.proves("F58", "F66", "F73", "F91", "F119", "F123", "F130", "F133", "F138", "D44")
def test_ten_steps_on_gsm8k_train_evaluate_save_and_load_again(tmp_path: Path, gsm8k_checkpoint: Path) -> None:
    (tmp_path / "mine.py").write_text("def even(completion, answer):\n    return float(len(completion) % 2 == 0)\n")
    shaping = {"type": "custom", "function": f"{tmp_path / 'mine.py'}:even", "weight": 0.1}
    path = recipe(
        tmp_path,
        gsm8k_checkpoint,
        {"type": "gsm8k", "path": str(GSM8K), "limit": 200, "template": "r1_zero"},
        rewards=[{"type": "r1_zero"}, shaping],
    )
    result = CliRunner().invoke(app, ["train", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    run = tmp_path / "runs" / "run"
    metrics = read_metrics(run)
    assert [row["step"] for row in metrics] == list(range(11))
    assert unknown_keys(key for row in metrics for key in row if key != "step") == []
    assert {"evaluation/correct_fraction", "policy/entropy", "policy/gradient_norm"} <= metrics[5].keys()
    assert json.loads((run / "comparison.json").read_text())
    assert (run / "report.html").stat().st_size > 50_000
    kept = [one for group in read_rollouts(run, 10) for one in group["completions"]]
    assert all(sum(one["token_lengths"]) == len(one["text"]) for one in kept if "token_lengths" in one)
    assert all(len(one["logprobs"]) == one["num_tokens"] for one in kept if "logprobs" in one)
    assert any("token_lengths" in one for one in kept)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000005", "step_000010"]
    before = AutoModelForCausalLM.from_pretrained(gsm8k_checkpoint)
    after = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model")("How many?").input_ids
    assert any(not a.equal(b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.proves("F11", "F57", "F110", "F117")
def test_a_custom_reward_moves_the_weights_with_several_updates_and_a_reference(
    tmp_path: Path, gsm8k_checkpoint: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def even(prompts, completions, answer, **columns):\n    return [float(len(c) % 2 == 0) for c in completions]\n"
    )
    path = recipe(
        tmp_path,
        gsm8k_checkpoint,
        {"type": "gsm8k", "path": str(GSM8K), "limit": 60, "template": "gsm8k"},
        rewards=[{"type": "custom", "function": f"{tmp_path / 'mine.py'}:even"}],
        algorithm={"type": "dr_grpo", "group_size": 4, "kl_coef": 0.04},
    )
    overrides = [
        "run.steps=3",
        "run.completions_per_update=4",
        "rollouts.type=transformers",
        "optimizer.schedule=cosine",
    ]
    result = CliRunner().invoke(app, ["train", str(path), *overrides], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = read_metrics(tmp_path / "runs" / "run")[1:]
    assert rows[-1]["policy/kl"] > 0
    before = AutoModelForCausalLM.from_pretrained(gsm8k_checkpoint)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "run" / "model")
    assert any(not a.equal(b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.proves("F59")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "no/such/folder"}, "no such folder"),
        ({"data.path": "missing.jsonl"}, "missing.jsonl"),
        ({"data.columns.question": "problem"}, "problem"),
        ({"algorithm.group_size": "1"}, "a group of one has no baseline"),
        ({"run.completions_per_update": "3"}, "does not divide"),
        ({"run.prompts_per_stepp": "3"}, "run.prompts_per_step"),
        ({"run.prompts_per_step": "5000"}, "training prompts are left"),
        ({"data.template": "r1zero"}, "r1_zero"),
        ({"data.chat": "true"}, "chat template"),
        ({"data.max_prompt_tokens": "3"}, "3"),
        ({"rollouts.max_completion_tokens": "100000"}, "context"),
        ({"policy.device": "cuda:9"}, "cuda:9"),
        ({"rewards.0.function": "x"}, "rewards.0"),
    ],
)
def test_a_mistake_gets_one_message_and_leaves_nothing_behind(
    change: dict[str, str], said: str, tmp_path: Path, gsm8k_checkpoint: Path
) -> None:
    data = {"type": "gsm8k", "path": str(GSM8K), "limit": 60}
    path = recipe(tmp_path, gsm8k_checkpoint, data, rewards=[{"type": "r1_zero"}])
    overrides = [f"{key}={value}" for key, value in change.items()]
    with pytest.raises(OncurveError) as caught:
        CliRunner().invoke(app, ["train", str(path), *overrides], catch_exceptions=False)
    assert said in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_loss_of_your_own_trains_through_the_recipe(tmp_path: Path, gsm8k_checkpoint: Path) -> None:
    (tmp_path / "losses.py").write_text(
        "import torch\n\n"
        "def mine(logprobs, old_logprobs, advantages, mask):\n"
        "    return -advantages[:, None] * torch.sigmoid(torch.exp(logprobs - old_logprobs))\n\n"
        "def half(rewards):\n"
        "    return rewards.values - 0.5\n"
    )
    (tmp_path / "mine.py").write_text("def even(completion, answer):\n    return float(len(completion) % 2 == 0)\n")
    own = {
        "type": "custom",
        "function": f"{tmp_path / 'losses.py'}:mine",
        "advantage_function": f"{tmp_path / 'losses.py'}:half",
        "group_size": 4,
    }
    path = recipe(
        tmp_path,
        gsm8k_checkpoint,
        {"type": "gsm8k", "path": str(GSM8K), "limit": 60},
        rewards=[{"type": "custom", "function": f"{tmp_path / 'mine.py'}:even"}],
        algorithm=own,
    )
    result = CliRunner().invoke(app, ["train", str(path), "run.steps=2"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = read_metrics(tmp_path / "runs" / "run")[1:]
    assert all(row["policy/gradient_norm"] > 0 for row in rows)
    assert rows[0]["advantage/mean"] == pytest.approx(rows[0]["reward/mean"] - 0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.type=gspo", "algorithm.correction=truncate", "run.completions_per_update=4"], "sequence"),
        (["rollouts.top_p=0.8", "algorithm.correction=truncate"], "top_p"),
        (["algorithm.type=cispo", "algorithm.ratio_max=0.2"], "ratio_max"),
    ],
)
def test_choices_that_do_not_go_together_are_refused_or_warned_about(
    overrides: list[str], said: str, tmp_path: Path, gsm8k_checkpoint: Path
) -> None:
    path = recipe(tmp_path, gsm8k_checkpoint, {"type": "gsm8k", "path": str(GSM8K), "limit": 60})
    try:
        result = CliRunner().invoke(app, ["train", str(path), "run.steps=1", *overrides], catch_exceptions=False)
        heard = result.output
    except OncurveError as error:
        heard = str(error)
    assert said in heard
