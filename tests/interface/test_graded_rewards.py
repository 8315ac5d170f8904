"""Rewards besides 0 and 1: a similarity, points up to 10, penalties. Nothing that is said of them is untrue."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oncurve
from oncurve.core.errors import RewardError
from oncurve.doctor.case import read_case
from oncurve.doctor.diagnose import diagnose
from oncurve.evaluate.evaluation import Evaluation, read_evaluation
from oncurve.observe.record import read_metrics
from oncurve.report.comparing import compare_runs
from oncurve.report.overview import overview

ROWS = [{"question": f"How much is {a} + {b}?", "answer": a + b} for a in range(1, 9) for b in range(1, 6)]
SMALL: dict[str, Any] = {
    "algorithm": {"group_size": 4},
    "rollouts": {"max_completion_tokens": 12},
    "optimizer": {"learning_rate": 1e-4},
}


def similarity(completion: str, answer: str) -> float:
    return 0.9 * len(set(completion) & set("abcdefgh ")) / 9


def points(completion: str, answer: str) -> float:
    return float(len(completion) % 11)


def penalty(completion: str, answer: str) -> float:
    return -0.1 * len(completion)


def right_or_wrong(completion: str, answer: str) -> float:
    return float(len(completion) % 2)


def train(folder: Path, reward: Any, **evaluation: Any) -> oncurve.Result:
    run = {"steps": 2, "prompts_per_step": 2, "folder": str(folder), "name": "run"}
    return oncurve.train("embedded", ROWS, reward, run=run, evaluation={"num_prompts": 6, **evaluation}, **SMALL)


@pytest.mark.parametrize("reward", [similarity, points, penalty])
def test_the_mean_reward_is_what_is_said_of_a_graded_reward(
    reward: Callable[..., float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path, reward, every_steps=1, num_prompts_during=4)
    said = capsys.readouterr().out
    assert "reward: " in said.splitlines()[-1]
    assert "correct" not in said
    assert "right format" not in said
    folder = result.folder
    base, trained = (read_evaluation(folder / "evaluations", name) for name in ("base", "trained"))
    rewards = np.array([[example.reward for example in one.examples] for one in (base, trained)], dtype=float)
    compared = json.loads((folder / "comparison.json").read_text())
    assert not compared["is_binary"]
    assert compared["reward"]["before"]["value"] == pytest.approx(rewards[0].mean())
    assert compared["reward"]["change"] == pytest.approx((rewards[1] - rewards[0]).mean())
    assert compared["reward"]["low"] <= compared["reward"]["change"] <= compared["reward"]["high"]
    assert [row["name"] for row in compared["rows"]] == ["cut off at limit"]
    metrics = read_metrics(folder)
    assert all("reward/correct" not in row and "evaluation/correct_fraction" not in row for row in metrics)
    assert all(math.isfinite(row["evaluation/mean_reward"]) for row in metrics)
    told = overview(folder)
    assert [one["shares"] for one in told["evaluation"]["measured"]] == [{}, {}]
    assert "correct" not in (folder / "summary.txt").read_text()
    for finding in diagnose(read_case(folder)):
        assert "right" not in finding.what
        assert "solved" not in finding.what
    assert "reward" in repr(result)
    assert f"{rewards[1].mean():.3f}" in repr(result)


def test_runs_of_graded_rewards_are_compared_by_their_mean_reward(tmp_path: Path) -> None:
    first, second = train(tmp_path / "a", points), train(tmp_path / "b", points)
    rows = dict(compare_runs([first.folder, second.folder]).rows)
    assert all("%" not in cell.text for cells in rows.values() for cell in cells if "reward" in cell.text)
    assert any("+0.000" in cell.text for cell in rows["  difference from the first"])


def test_rewards_of_two_functions_are_not_compared(tmp_path: Path) -> None:
    first, second = train(tmp_path / "a", points), train(tmp_path / "b", penalty)
    compared = compare_runs([first.folder, second.folder])
    assert [cell.text for cell in dict(compared.rows).get("  difference from the first", [])] in ([], ["-", "-"])
    assert any("other rewards, so that means say nothing" in note for note in compared.notes)


def test_what_counts_as_correct_can_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"type": "custom", "function": f"{__file__}:points", "correct_at": 5}
    result = train(tmp_path, section)
    said = capsys.readouterr().out
    assert "Correct: custom gives 5 or more." in said.replace("\n", " ")
    assert said.splitlines()[-2].startswith("reward: ")
    assert said.splitlines()[-1].startswith("correct: ")
    for example in result.base.examples:
        assert example.is_correct == ((example.reward or 0.0) >= 5)


def test_a_reward_of_zeros_and_ones_says_what_is_correct(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(tmp_path, right_or_wrong)
    assert result.base.is_binary
    assert "reward: " not in capsys.readouterr().out
    assert [one.is_correct for one in result.base.examples] == [one.reward == 1.0 for one in result.base.examples]


def test_what_is_paid_if_correct_needs_to_know_what_is(tmp_path: Path) -> None:
    short = {"type": "length", "max_tokens": 20, "weight": 0.1, "only_if_correct": True}
    with pytest.raises(RewardError, match=r"no reward says what is correct\. Set correct_at"):
        train(tmp_path, [points, short])


def test_what_was_not_graded_is_neither_correct_nor_wrong(tmp_path: Path) -> None:
    def some(completion: str, answer: str) -> float | None:
        return None if int(answer) % 2 else float(len(completion) % 2)

    found: Evaluation = train(tmp_path, some, num_prompts_during=4).base
    graded = [example for example in found.examples if example.reward is not None]
    assert 0 < len(graded) < 6
    assert found.correct.total == len(graded)
    assert found.counts["error"] == 6 - len(graded)
