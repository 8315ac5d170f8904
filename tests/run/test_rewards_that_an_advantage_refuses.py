"""Do rewards that an advantage cannot use end in a sentence, and do small differences of large rewards count?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import oncurve
from oncurve.algorithm.advantages import multi_objective
from oncurve.algorithm.losses import soft_gated
from oncurve.cli.app import app
from oncurve.core.batch import Rewards, stack_rewards
from oncurve.core.errors import ConfigError, RewardError, TrainingError
from oncurve.core.formulas import group_relative
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.rewards.custom import from_function
from oncurve.rewards.weighted_sum import Term, WeightedSum
from oncurve.run.builder import make_algorithm
from oncurve.run.verbs import Scores

RECIPE = [
    "word_problems", "run.name=small", "run.steps=1", "run.prompts_per_step=2", "evaluation.num_prompts=2",
    "evaluation.every_steps=0", "rollouts.max_completion_tokens=8", "data.limit=40", "algorithm.group_size=2",
    "run.completions_per_update=null",
]  # fmt: skip


def group_of(*rewards: Reward) -> tuple[list[Group], list[list[Reward]]]:
    prompt = Prompt("q", (1,), 0, {}, None)
    completions = tuple(Completion((1,), (2,), "a", (0.0,), "stop", 0, place) for place in range(len(rewards)))
    return [Group(prompt, completions)], [list(rewards)]


@pytest.mark.slow
def test_a_negative_reward_where_the_mean_divides_is_a_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def mine(completion):\n    return -0.5\n")
    words = ["algorithm.advantage=mean_normalized", "rewards=[{type: custom, function: 'mine.py:mine'}]"]
    ended = CliRunner().invoke(app, ["train", *RECIPE, *words])
    assert isinstance(ended.exception, RewardError)
    assert "algorithm.advantage refuses the rewards of this step" in str(ended.exception)
    assert "mean_normalized needs rewards of 0 or more, and there is one of -0.5" in str(ended.exception)
    assert (tmp_path / "runs" / "small" / "metrics.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "body", "said"),
    [("advantage_function", "return int('a')", "raised ValueError: invalid literal for int"),
     ("advantage_function", "return rewards.values.mean()", "gave a tensor of [], not a tensor of [2, 2]"),
     ("function", "return logprobs @ logprobs", "raised RuntimeError: "),
     ("function", "return logprobs.tolist()", "gave list, not a tensor of")],
)  # fmt: skip
def test_a_mistake_in_an_own_formula_is_said_with_its_place(
    key: str, body: str, said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    takes = "rewards" if key == "advantage_function" else "logprobs, old_logprobs, advantages, mask"
    Path("own.py").write_text(f"def formula({takes}):\n    {body}\n")
    Path("mine.py").write_text("def mine(completion):\n    return len(completion) % 7\n")
    kind = ["algorithm.type=custom"] if key == "function" else []
    reward = "rewards=[{type: custom, function: 'mine.py:mine'}]"
    ended = CliRunner().invoke(app, ["train", *RECIPE, *kind, f"algorithm.{key}=own.py:formula", reward])
    assert isinstance(ended.exception, TrainingError), ended.output
    assert f"algorithm.{key}: own.py:formula {said}" in str(ended.exception)
    assert "raised" not in said or 'own.py", line 2, in formula' in str(ended.exception)


LOSS = """def formula(logprobs, old_logprobs, advantages, mask, height=1.0):
    numbers = height * (logprobs - old_logprobs).exp()
    return -advantages[:, None] * numbers, RETURNED
"""


def test_a_statistic_of_an_own_loss_is_in_the_log(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(LOSS.replace("RETURNED", "{'far': numbers > 0.5, 'three': 3 * numbers}"))
    Path("mine.py").write_text("def mine(completion):\n    return len(completion) % 7\n")
    words = ["algorithm.type=custom", "algorithm.function=own.py:formula", "algorithm.loss_options={height: 2.0}"]
    ended = CliRunner().invoke(app, ["train", *RECIPE, *words, "rewards=[{type: custom, function: 'mine.py:mine'}]"])
    assert ended.exit_code == 0, ended.output
    *_, row = [json.loads(line) for line in Path("runs/small/metrics.jsonl").read_text().splitlines()]
    assert row["loss/far"] == 1.0
    assert row["loss/three"] == pytest.approx(6.0, rel=1e-3)
    assert "policy/clip_fraction" not in row


@pytest.mark.parametrize(
    ("returned", "said"),
    [("[1]", "gave list beside the loss, not a dictionary of statistics"),
     ("{'far': numbers.sum()}", r"gave for the statistic 'far' a tensor of \[\], not a tensor of \[2, 3\]"),
     ("{'a/b': numbers}", "gave a statistic 'a/b'; name it as a variable")],
)  # fmt: skip
def test_what_is_no_statistic_is_refused(returned: str, said: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(LOSS.replace("RETURNED", returned))
    config = load_config(find_recipe("word_problems"), ["algorithm.type=custom", "algorithm.function=own.py:formula"])
    zeros = torch.zeros(2, 3)
    with pytest.raises(TrainingError, match=f"algorithm.function: own.py:formula {said}"):
        make_algorithm(config).token_loss(zeros, zeros, torch.ones(2), zeros == 0)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [("algorithm.type=sapo", r"loss_options: width is no parameter of the loss. .*: sharpness_positive, sharpness_neg"),
     ("algorithm.type=dapo", r"loss_options: width is no parameter of the loss. Parameters of the loss: none")],
)  # fmt: skip
def test_an_option_that_no_loss_has_is_refused(chosen: str, said: str) -> None:
    config = load_config(find_recipe("word_problems"), [chosen, "algorithm.loss_options={width: 2.0}"])
    with pytest.raises(ConfigError, match=f"algorithm.{said}"):
        make_algorithm(config)


def test_options_reach_the_loss() -> None:
    config = load_config(
        find_recipe("word_problems"), ["algorithm.type=sapo", "algorithm.loss_options={sharpness_positive: 3}"]
    )
    now, old, ones = torch.full((1, 1), 0.5), torch.zeros(1, 1), torch.ones(1)
    expected = soft_gated(now, old, ones, now == now, sharpness_positive=3.0)
    assert torch.equal(make_algorithm(config).token_loss(now, old, ones, now == now), expected)


@pytest.mark.slow
def test_a_reward_whose_error_is_no_utf_8_is_counted_and_shown(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    body = "def mine(completion):\n    print('\\udcff')\n    raise ValueError('half \\ud83d of a pair')\n"
    Path("mine.py").write_text(body)
    words = ["rewards=[{type: custom, function: 'mine.py:mine'}]", "evaluation.num_prompts=2"]
    ended = CliRunner().invoke(app, ["train", *RECIPE, *words])
    assert isinstance(ended.exception, RewardError), ended.output
    str(ended.exception).encode("utf-8")


def test_an_error_of_half_a_sign_can_be_written() -> None:
    def mine(completion: str) -> float:
        raise ValueError("half \ud83d of a pair")

    groups, _ = group_of(Reward(0.0))
    reward = from_function(mine)([groups[0].prompt], list(groups[0].completions))[0]
    assert reward.error == "crashed"
    assert "half \\ud83d of a pair" in reward.detail
    (reward.detail + reward.trace).encode("utf-8")


def test_large_rewards_that_differ_little_have_exact_advantages() -> None:
    values = [100_000.01, 100_000.02, 100_000.03, 100_000.04]
    given = stack_rewards(*group_of(*[Reward(value) for value in values]))
    expected = group_relative(Rewards.of([[0.01, 0.02, 0.03, 0.04]]))
    assert torch.allclose(group_relative(given).float(), expected, atol=1e-4)
    assert stack_rewards(*group_of(Reward(0.0), Reward(1.0))).values.dtype == torch.float32
    assert stack_rewards(*group_of(Reward(0.7), Reward(0.7))).values.dtype == torch.float32


def test_a_part_that_does_not_apply_is_in_no_mean_of_that_part() -> None:
    """As TRL's normalize_then_sum does it: the first completion has an opinion of the first function alone."""
    first, second = [1.0, 2.0, 4.0, 3.0], [None, 1.0, 5.0, 3.0]
    one = from_function(lambda completion: 0.0)
    terms = [Term(one, name="first"), Term(one, name="second")]
    absent = Reward(None, error="not_applicable")
    rewards = [
        WeightedSum(terms)._combine([Reward(a), Reward(b) if b is not None else absent], [1.0, 1.0])
        for a, b in zip(first, second, strict=True)
    ]
    found = multi_objective(stack_rewards(*group_of(*rewards)), weights={"first": 1.0, "second": 1.0})
    a = torch.tensor(first, dtype=torch.float64)
    b = torch.tensor(second[1:], dtype=torch.float64)
    total = (a - a.mean()) / (a.std() + 1e-4)
    total[1:] += (b - b.mean()) / (b.std() + 1e-4)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    assert torch.allclose(found[0].double(), expected, atol=1e-5)


def test_advantages_of_a_program_refuse_a_negative_reward_in_a_sentence() -> None:
    groups, rewards = group_of(Reward(-1.0), Reward(1.0))
    with pytest.raises(ConfigError, match="advantages: mean_normalized needs rewards of 0 or more"):
        oncurve.advantages(Scores(groups, rewards), "grpo", advantage="mean_normalized")
