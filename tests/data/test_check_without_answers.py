"""Can `oncurve check` be passed by a reward that has no right answer, and still not by one whose grader fails?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app

FUNCTIONS = r"""
import re

def short(completion):
    return -abs(len(completion) - 40) / 40


def short_in_batches(completions, **columns):
    return [-len(text) / 40 for text in completions]


def right(completion, answer):
    return float(completion.rstrip().endswith(f"{answer} </answer>"))


def wrong(completion, answer):
    return -1.0


def distance(completion, answer):
    found = re.findall(r"-?\d+", completion)
    return -abs(int(found[-1]) - int(answer.split()[0])) if found else -100


def shorter(completion, answer):
    return -1.0 - len(completion) / 10


def broken(completion):
    raise ValueError("no")
"""


def check(folder: Path, reward: str, *, answers: bool) -> tuple[int, str]:
    rows = [{"question": f"Write a line about {number} cats."} for number in range(40)]
    rows = [row | ({"answer": f"{index} cats"} if answers else {}) for index, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(FUNCTIONS)
    (folder / "recipe.yaml").write_text(
        "model: embedded\ndata: {type: jsonl, path: rows.jsonl}\nevaluation: {num_prompts: 8}\n"
        f"rewards: [{reward}]\n"
    )
    ended = CliRunner().invoke(app, ["check", str(folder / "recipe.yaml")])
    return ended.exit_code, ended.output


@pytest.mark.parametrize(
    "reward",
    [
        "{type: custom, function: 'rewards.py:short'}",
        "{type: custom, function: 'rewards.py:short_in_batches'}",
        "{type: length, min_tokens: 3, max_tokens: 9}",
        "{type: repetition}",
    ],
)
@pytest.mark.parametrize("answers", [False, True])
def test_a_reward_without_a_right_answer_passes(reward: str, answers: bool, tmp_path: Path) -> None:
    code, output = check(tmp_path, reward, answers=answers)
    assert code == 0, output
    assert "no reward looks at an answer" in output
    assert "<-" not in output  # none of the probes is suspicious where nothing is right


def test_a_reward_that_looks_at_an_answer_must_pay_for_it(tmp_path: Path) -> None:
    assert check(tmp_path, "{type: custom, function: 'rewards.py:right'}", answers=True)[0] == 0
    code, output = check(tmp_path, "{type: custom, function: 'rewards.py:wrong'}", answers=True)
    assert code == 1
    assert "pays the row's own reference answer 0 or less, and no more than another row's" in output


def test_a_penalty_must_pay_the_right_answer_more_than_another(tmp_path: Path) -> None:
    code, output = check(tmp_path, "{type: custom, function: 'rewards.py:distance'}", answers=True)
    assert code == 0, output  # the best answer earns 0, every other less
    assert "gives probes less than them" in output
    assert "<- '" not in output
    code, output = check(tmp_path, "{type: custom, function: 'rewards.py:shorter'}", answers=True)
    assert code == 1
    assert "no more than another row's" in output
    assert "probes earn more than what the reference answers earn" in output
    assert "20%" not in output


def test_a_grader_that_fails_never_passes(tmp_path: Path) -> None:
    code, output = check(tmp_path, "{type: custom, function: 'rewards.py:broken'}", answers=False)
    assert code == 1
    assert "failed" in output


def test_rows_without_an_answer_are_refused_where_a_reward_asks_for_one(tmp_path: Path) -> None:
    ended = check(tmp_path, "{type: custom, function: 'rewards.py:right'}", answers=False)
    assert ended[0] != 0
