"""Can the doctor read whatever a run left behind? Any order, any extra key, any hole."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from doctor_cases import case
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.core.errors import DataError
from oncurve.doctor.case import Case, Curve, read_case
from oncurve.doctor.diagnose import diagnose

SICK = case(
    {"reward/mean": lambda x: 0.6 if x < 0.5 else 0.0, "policy/clip_fraction": 0.5, "time/grade_seconds": 5.0},
    examples=[{"completion": "<answer> 3 </answer>", "answer": "4", "reward": 0.5}],
    lags={40: 2},
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=3), st.just([1.0]), st.just({"a": 1})
)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_neither_order_nor_extra_keys_matter(seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for row in SICK.metrics:
        items = [*row.items(), ("custom/extra", rng.random()), ("note", "text")]
        rng.shuffle(items)
        rows.append(dict(items))
    rng.shuffle(rows)
    config = {**dict(reversed(list(SICK.config.items()))), "later": {"key": 1}}
    assert diagnose(Case(rows, config=config, examples=SICK.examples, lags=SICK.lags)) == diagnose(SICK)


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 10**400, math.inf, math.nan])
def test_values_that_no_sum_can_hold_are_left_out(value: float) -> None:
    rows = [{**row, "evaluation/error_fraction": value, "reward/mean": value} for row in SICK.metrics]
    diagnose(Case(rows, config=SICK.config, examples=SICK.examples))
    assert not len(Case(rows).curve("reward/mean"))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_holes_and_nonsense_never_break_it(data: st.DataObject) -> None:
    keys = sorted({key for row in SICK.metrics for key in row})
    rows: list[dict[str, Any]] = [dict(row) for row in SICK.metrics]
    for key in data.draw(st.lists(st.sampled_from(keys), max_size=12, unique=True)):
        places = data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))
        value = data.draw(VALUES)
        for place in places:
            rows[place][key] = value
    for key in data.draw(st.lists(st.sampled_from(keys), max_size=12, unique=True)):
        for row in rows:
            row.pop(key, None)
    length = data.draw(st.integers(0, len(rows)))
    section = data.draw(st.sampled_from(list(SICK.config)))
    config = {**SICK.config, section: data.draw(VALUES)}
    examples = [{**SICK.examples[0], name: data.draw(VALUES)} for name in ("completion", "answer", "reward")]
    for finding in diagnose(Case(rows[:length], config=config, examples=[*examples, {}])):
        assert finding.evidence
        assert finding.what


def test_a_run_without_anything_has_no_findings() -> None:
    assert diagnose(Case([])) == []
    assert diagnose(Case([{"step": 0, "evaluation/correct_fraction": 0.3}])) == []
    assert diagnose(Case([{"step": k} for k in range(50)])) == []


def test_start_and_end_of_a_curve_are_means_over_a_fifth() -> None:
    curve = Curve("reward/mean", tuple(range(1, 31)), tuple(float(k) for k in range(30)))
    assert (curve.window, curve.start, curve.end) == (6, 2.5, 26.5)
    assert curve.at_end().steps == (25, 30)
    assert curve.best == (24, 26.5)
    assert not Curve("x", (1, 2, 3), (1.0, 2.0, 3.0)).has_two_ends
    assert math.isnan(Curve("x", (), ()).end)
    assert Curve("x", (), ()).best[0] == 0


def test_completions_of_the_first_and_the_last_recorded_step_are_read_and_some_between(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    rows = [{"step": step, "reward/mean": 0.5} for step in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in range(2, 33):  # those behind the last metrics were not finished
        texts = [{"text": f"of {step}", "reward": 1.0, "policy_version": max(step - 1 - k, 0)} for k in range(3)]
        group = {"prompt": "p", "answer": "4", "completions": texts}
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text(json.dumps(group) + "\n")
    found = read_case(tmp_path)
    assert [example["step"] for example in found.examples] == [2] * 3 + [30] * 3
    assert found.examples[-1] == {
        "completion": "of 30", "answer": "4", "reward": 1.0, "prompt": "p", "policy_version": 27, "step": 30
    }  # fmt: skip
    assert found.lags == {2: 1, 30: 2}
    assert [example["step"] for example in found.between()][::3] == list(range(3, 30, 3))
    assert (found.config, found.compared) == ({}, {})
    ahead = {"prompt": "p", "completions": [{"text": "a", "reward": 1.0, "policy_version": 40}]}
    (tmp_path / "rollouts" / "step_000030.jsonl").write_text(json.dumps(ahead) + "\n")
    assert read_case(tmp_path).lags[30] == 0
    (tmp_path / "evaluations").mkdir()
    torn = json.dumps({"completion": "a", "answer": "4", "reward": 1.0}) + '\n{"compl'
    (tmp_path / "evaluations" / "base.jsonl").write_text(torn)
    with pytest.raises(DataError):
        read_case(tmp_path)


@pytest.mark.parametrize(("key", "found"), [("optimizer.learning_rate", 1e-5), ("run.prompts_per_step", 16.0)])
def test_numbers_of_the_recipe_are_found_by_their_keys(key: str, found: float) -> None:
    assert SICK.number(key) == found
    assert math.isnan(Case([]).number(key))
    assert math.isnan(Case([], config={key.split(".")[0]: True}).number(key))
