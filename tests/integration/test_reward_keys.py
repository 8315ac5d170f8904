"""Do the keys of a reward that say when it pays hold in a whole run, from the recipe to the metrics?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.errors import ConfigError
from oncurve.observe.metrics import unknown_keys
from oncurve.observe.record import read_metrics

MINE = """
def even(completion, answer):
    return {"reward": float(len(completion) % 2 == 0), "correct": float(len(completion) % 2 == 0)}

def thousand(completion, answer):
    return {"reward": 1000.0, "correct": 0.0}

def broken(completion, answer):
    raise ValueError("held out and broken")

def one(completion, answer):
    return 1.0 + 0.001 * (len(completion) % 3)

def knows(completion, step, trainer_state, log_metric):
    log_metric("tens", 10 * step)
    log_metric("epoch", trainer_state.epoch)
    return 1.0 + step / trainer_state.max_steps

def two(completion, answer):
    return 2.0 + 0.001 * (len(completion) % 3)
"""


def train(folder: Path, name: str, rewards: list[dict[str, Any]], *, steps: int = 2) -> Path:
    """The folder of a tiny run with some functions of the file above as rewards."""
    (folder / "mine.py").write_text(MINE)
    tree = {
        "model": "embedded",
        "data": {"type": "word_problems", "limit": 40},
        "rewards": [
            {"type": "custom", "name": keys["function"], **keys, "function": f"{folder / 'mine.py'}:{keys['function']}"}
            for keys in rewards
        ],
        "algorithm": {"group_size": 4},
        "rollouts": {"max_completion_tokens": 8},
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"num_prompts": 4, "num_prompts_during": 2},
        "run": {"steps": steps, "prompts_per_step": 2, "folder": str(folder / "runs"), "name": name},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    result = CliRunner().invoke(app, ["train", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder / "runs" / name


def weights_of(run: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.proves("F131")
def test_a_held_out_reward_is_logged_and_changes_no_weight(tmp_path: Path) -> None:
    alone = train(tmp_path, "alone", [{"function": "even"}])
    held_out = [{"function": "thousand", "held_out": True}, {"function": "broken", "held_out": True}]
    watched = train(tmp_path, "watched", [{"function": "even"}, *held_out])
    assert torch.equal(weights_of(alone), weights_of(watched))
    for before, after in zip(read_metrics(alone)[1:], read_metrics(watched)[1:], strict=True):
        assert after["reward/held_out/thousand"] == 1000.0
        assert "reward/held_out/broken" not in after
        assert [before[key] for key in ("reward/mean", "reward/correct", "reward/error_fraction")] == [
            after[key] for key in ("reward/mean", "reward/correct", "reward/error_fraction")
        ]


@pytest.mark.proves("F113")
def test_rewards_that_rotate_pay_in_turn_and_are_all_logged(tmp_path: Path) -> None:
    rewards = [{"function": name, "rotate_every_steps": 2} for name in ("one", "two")]
    rows = read_metrics(train(tmp_path, "rotating", rewards, steps=4))[1:]
    paid = [round(row["reward/mean"]) for row in rows]
    assert paid[0] == paid[1] != paid[2] == paid[3]
    assert set(paid) == {1, 2}
    for row in rows:
        assert (round(row["reward/one"]), round(row["reward/two"])) == (1, 2)
        assert row["reward/rotating"] == pytest.approx(row["reward/mean"])
        assert unknown_keys(row) == []


def test_check_says_what_is_held_out_and_what_takes_turns(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: embedded\ndata: {type: word_problems, limit: 40}\nevaluation: {num_prompts: 4, num_prompts_during: 2}\n"
        "run: {prompts_per_step: 2}\nrewards:\n"
        "  - {type: r1_zero, rotate_every_steps: 5}\n"
        "  - {type: mathematics, answer_from: answer_tag, rotate_every_steps: 5}\n"
        "  - {type: mathematics, name: loose, held_out: true}\n"
    )
    said = CliRunner().invoke(app, ["check", str(path)], catch_exceptions=False).output
    assert "rewards: r1_zero, mathematics take turns of 5 steps" in said
    assert "rewards: loose is held out: logged as reward/held_out/loose, never trained on" in said


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([{"function": "even", "held_out": True}], "every one of them is held_out"),
        ([{"function": "even", "rotate_every_steps": 5}, {"function": "one"}], "only one of them has rotate_every"),
        (
            [{"function": "even", "rotate_every_steps": 5}, {"function": "one", "rotate_every_steps": 4}],
            "those that rotate have rotate_every_steps 5, 4",
        ),
        (
            [{"function": "even", "rotate_every_steps": 5}, {"function": "one", "rotate_every_steps": 5, "weight": 2}],
            "those that rotate have weight 1.0, 2.0",
        ),
        ([{"function": "even", "held_out": True, "rotate_every_steps": 5}], "rewards: even is held_out"),
        ([{"function": "even", "held_out": True, "only_if_correct": True}], "only_if_correct is about what it pays"),
        (
            [{"function": "even"}, *[{"function": "one", "name": "x", "held_out": True}] * 2],
            "two that are held out are named 'x'",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(rewards: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, "refused", rewards)
    assert said in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_reward_that_knows_the_step_is_weighted_by_it_in_check_and_in_training(tmp_path: Path) -> None:
    run = train(tmp_path, "knowing", [{"function": "knows", "weight_by_step": [[0, 0.5], [1, 1.0]]}])
    first, second = [row for row in read_metrics(run) if "reward/mean" in row]
    assert (first["reward/mean"], first["reward/knows"], first["reward/tens"]) == (0.5, 1.0, 0.0)
    assert (second["reward/mean"], second["reward/knows"], second["reward/tens"]) == (1.5, 1.5, 10.0)
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "knowing.yaml")], catch_exceptions=False)
    assert "crashed" not in checked.output
    assert "34 training rows" in checked.output
    assert (first["reward/epoch"], second["reward/epoch"]) == (0.0, pytest.approx(2 / 34))
    assert "on the weight of knows, 1, the factor is 0.5 at step 0, 1 at step 1" in " ".join(checked.output.split())
