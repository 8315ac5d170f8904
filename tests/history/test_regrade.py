"""A run is graded again, and the numbers are those of a plain loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from past_runs import recorded_run

import oncurve
from oncurve.core.errors import ConfigError, RewardError
from oncurve.history.regrade import regrade
from oncurve.history.replay import replay


def other(completion: str, answer: str) -> float:
    return float(len(completion) % 3)


def test_the_numbers_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=3)
    past = oncurve.open_run(run)
    found = regrade(past, other)
    assert past.steps == [1, 2, 3]
    for change in found.steps:
        step = past.step(change.step)
        was = np.array([[one.value for one in row] for row in step.rewards])
        now = np.array([[other(one.text, "") for one in group.completions] for group in step.groups])
        advantages = [
            (values - values.mean(1, keepdims=True)) / np.maximum(values.std(1, ddof=1, keepdims=True), 1e-9)
            for values in (was, now)
        ]
        signs = [np.sign(np.where(np.abs(one) < 1e-6, 0, one)) for one in advantages]
        assert change.changed == (was != now).sum()
        assert change.flipped == (signs[0] * signs[1] < 0).sum()
        spread = [np.ptp(values, axis=1) > 1e-6 for values in (was, now)]
        assert change.gained_signal == (~spread[0] & spread[1]).sum()
        assert change.lost_signal == (spread[0] & ~spread[1]).sum()
        assert change.mean_was == pytest.approx(was.mean())
        assert change.mean_now == pytest.approx(now.mean())
        both = [np.corrcoef(a, b)[0, 1] for a, b in zip(was, now, strict=True) if np.ptp(a) > 1e-6 < np.ptp(b)]
        assert change.correlations == pytest.approx(both)
    damages = [one.damage for one in found.examples]
    assert damages == sorted(damages, reverse=True)
    assert found.total("num_completions") == 48


def test_its_own_reward_agrees_with_itself_until_its_code_changes(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=2)
    assert regrade(run).total("changed") == 0
    file = tmp_path / "mine.py"
    file.write_text(file.read_text(encoding="utf-8").replace("1 + len", "3 + len"), encoding="utf-8")
    assert regrade(run).total("changed") > 5


def test_a_run_of_a_program_is_graded_by_what_is_named(tmp_path: Path) -> None:
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b), "hint": {"tens": a}} for a in range(4) for b in range(4)]
    result = oncurve.train(
        "embedded", rows, lambda completion, hint: float(str(hint["tens"]) in completion),
        run={"steps": 2, "prompts_per_step": 2, "folder": str(tmp_path), "name": "given", "record": "all"},
        rollouts={"max_completion_tokens": 6}, evaluation={"num_prompts": 2}, algorithm={"group_size": 4},
        policy={"device": "cpu"},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="its reward was a Python object"):
        regrade(result.folder)
    found = regrade(result.folder, lambda completion, hint: float(str(hint["tens"]) in completion))
    assert found.total("changed") == 0  # columns reach the reward as they were
    assert found.total("num_completions") == 16


def test_a_reward_that_cannot_be_made_from_one_word_is_refused_with_the_words_that_can(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=1)
    with pytest.raises(ConfigError, match=r"no type 'math'.*'mathematics'.*\n.*file\.py:name.*recipe"):
        regrade(run, "math")
    with pytest.raises(ConfigError, match=r"base_url: this key is needed.*(?s:.*)written in a recipe"):
        regrade(run, "judge")


def test_a_reward_that_grades_nothing_is_refused_with_what_it_gave(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=1)
    (tmp_path / "lazy.py").write_text("def pays(completion):\n    yield 1.0\n", encoding="utf-8")
    reward = f"{tmp_path / 'lazy.py'}:pays"
    for grade_again in (regrade, lambda path, other: replay(path, 1, reward=other)):
        with pytest.raises(RewardError, match=r"lazy\.py:pays.* none of .* \(write return, not yield\)"):
            grade_again(run, reward)


def test_texts_alone_can_be_graded_where_nothing_more_was_recorded(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=3, run={"record": "sampled"})
    found = regrade(run)
    assert [step.step for step in found.steps] == [1, 3]  # the first and the last are written for the report
    assert found.total("changed") == 0
    assert "1 step has no record" in found.notes[0]
