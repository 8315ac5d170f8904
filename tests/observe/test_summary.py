"""Does the text summary state the numbers of the run, and leave out what was not measured?"""

from __future__ import annotations

import math
from typing import Any

import pytest

from oncurve.core.errors import DataError
from oncurve.observe.columns import Columns
from oncurve.observe.summary import summarize

RUN: list[dict[str, Any]] = [
    {"step": 0, "evaluation/correct_fraction": 0.2, "evaluation/num_examples": 500.0},
    *({"step": s, "reward/mean": s / 20, "tokens/sampled": 100.0, "time/step_seconds": 2.0, "time/sample_seconds": 1.5,
       "time/train_seconds": 0.5, "group/zero_signal_fraction": 1.0 if s == 1 else 0.5} for s in range(1, 21)),
    {"step": 21, "evaluation/correct_fraction": 0.7, "evaluation/correct_low_fraction": 0.66,
     "evaluation/correct_high_fraction": 0.74, "evaluation/num_examples": 500.0, "time/elapsed_seconds": 75.0},
]  # fmt: skip


@pytest.mark.proves("F134")
def test_the_numbers_of_a_run_are_in_its_summary() -> None:
    text = summarize(Columns(RUN), title="my run")
    assert text.startswith("my run\ntraining steps: 20 (1 to 20), 2,000 tokens sampled\n")
    assert "20.0% at step 0  to 70.0% at step 21 (+50.0 points)" in text
    assert "500 examples, last 95% interval of correct 66.0% to 74.0%" in text
    assert "reward                          0.075      0.975" in text  # means of the first and last two steps
    assert "1:15 in all" in text
    assert "sample 75%, train 25%" in text
    assert "no group carried a signal in 5% of the steps" in text


@pytest.mark.proves("D56")
def test_what_was_not_recorded_has_no_line() -> None:
    text = summarize(Columns([{"step": 1, "reward/mean": 0.5}]))
    assert "During the run: not evaluated" in text
    for absent in ("entropy", "KL", "Time", "To look at", "loss"):
        assert absent not in text


def test_the_final_comparison_stands_beside_what_was_measured_during_the_run() -> None:
    share = {"successes": 20, "total": 80, "low": 0.1, "high": 0.3}
    change = {"change": 0.725, "low": 0.6, "high": 0.8}
    row = {"name": "correct", "before": share, "after": {**share, "successes": 78}, **change}
    one = {**row, "name": "cut off", "before": {**share, "successes": 0, "total": 0}, "after": {**share, "total": 1}}
    one["after"]["successes"] = 1
    text = summarize(Columns(RUN), comparison={"names": ["base", "trained"], "num_prompts": 80, "rows": [row, one]})
    assert "0.0% to 100.0% (+72.5 points" in text
    assert "Test problems, 80: base and trained" in text
    assert "25.0% to 97.5% (+72.5 points, +60.0 to +80.0)" in text
    assert "Test problems" not in summarize(Columns(RUN))


def test_failures_are_counted() -> None:
    rows = [{"step": 1, "reward/error_fraction": 0.25, "policy/skipped_updates": 1.0, "policy/nonfinite_updates": 1.0,
             "policy/loss": math.nan},
            {"step": 2, "reward/error_fraction": 0.0, "policy/skipped_updates": 1.0, "policy/loss": 0.0},
            {"step": 3, "policy/skipped_updates": 0.5, "policy/loss": 0.0}]  # fmt: skip
    text = summarize(Columns(rows))
    assert "could not be graded in 1 step, at most 25.0% of one" in text
    assert "because the gradient was not finite, in 1 step" in text
    assert "because none of their groups had a signal, in 2 steps" in text
    assert "not finite at some step: policy/loss" in text


def test_the_manifest_says_what_ran_where() -> None:
    manifest = {"oncurve": "0.1", "code": {"commit": "a" * 40, "dirty": True}, "hardware": {"cpu": "Z", "cpu_cores": 2}}
    assert "oncurve 0.1, commit aaaaaaaaaaaa with changes, on 2 cores of Z" in summarize(
        Columns(RUN), manifest=manifest
    )
    bare = {"code": None, "hardware": {"gpus": [{"name": "H200"}]}}
    assert "commit unknown, on H200" in summarize(Columns(RUN), manifest=bare)


def test_a_run_without_metrics_is_refused() -> None:
    with pytest.raises(DataError, match="no metrics"):
        summarize(Columns())
