"""Are pass@k and the vote those of counting every set, and do intervals hold what they promise?"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from oncurve.evaluate.estimators import majority_at_k, runs_interval
from oncurve.stats import bootstrap_interval, pass_at_k, wilson_interval

Votes = list[tuple[str | None, bool]]


def slow_pass(outcomes: list[bool], k: int) -> float:
    chosen = list(itertools.combinations(outcomes, k))
    return float(Fraction(sum(any(one) for one in chosen), len(chosen)))


def slow_majority(votes: Votes, k: int) -> float:
    total = Fraction(0)
    chosen = list(itertools.combinations(votes, k))
    for one in chosen:
        counts = Counter("right" if is_right else answer for answer, is_right in one if is_right or answer is not None)
        most = max(counts.values(), default=0)
        first = [answer for answer, count in counts.items() if count == most]
        total += Fraction("right" in first, max(len(first), 1))
    return float(total / len(chosen))


def some_votes(seed: int) -> Votes:
    draw = random.Random(seed)
    options: Votes = [("4", True), ("4.0", True), ("5", False), ("6", False), ("7", False), (None, False)]
    return [draw.choice(options) for _ in range(draw.randint(1, 8))]


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_sets_with_a_right_one(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        outcomes = [place < num_correct for place in range(num_samples)]
        for k in range(1, num_samples + 1):
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(slow_pass(outcomes, k), abs=1e-15)


def test_pass_at_k_grows_with_k_and_with_right_ones_and_neither_overflows_nor_rounds_away() -> None:
    rising = [pass_at_k(64, 3, k) for k in range(1, 65)]
    assert rising == sorted(rising)
    assert rising[-1] == 1.0
    assert pass_at_k(4096, 1, 1) == 1 / 4096
    assert pass_at_k(10**6, 1, 3) == pytest.approx(3e-6, rel=1e-12)
    assert 0.0 < pass_at_k(5000, 2, 2500) < 1.0


@pytest.mark.parametrize("seed", range(40))
def test_the_vote_is_the_mean_over_every_set(seed: int) -> None:
    votes = some_votes(seed)
    for k in range(1, len(votes) + 1):
        assert majority_at_k(votes, k) == pytest.approx(slow_majority(votes, k), abs=1e-12)


def test_a_vote_of_one_is_the_share_of_right_ones_and_order_does_not_matter() -> None:
    votes: Votes = [("4", True), ("5", False), (None, False), ("5", False)]
    assert majority_at_k(votes, 1) == pytest.approx(0.25)
    assert majority_at_k(votes[::-1], 3) == majority_at_k(votes, 3)


@pytest.mark.parametrize(
    ("votes", "wanted"),
    [
        ([("4", True), ("5", False)], 0.5),
        ([("4", True), ("5", False), ("6", False)], 1 / 3),
        ([("4", True), (None, False), (None, False)], 1.0),
        ([("4", True), ("5", False), ("5", False)], 0.0),
        ([("4", True), ("4.0", True), ("5", False)], 1.0),
        ([(None, False), (None, False)], 0.0),
    ],
)
def test_ties_share_the_place_and_who_gives_no_answer_does_not_vote(votes: Votes, wanted: float) -> None:
    assert majority_at_k(votes, len(votes)) == pytest.approx(wanted)


def test_a_vote_of_many_is_counted_in_no_time() -> None:
    votes: Votes = [("4", True)] * 20 + [(str(place // 3), False) for place in range(100, 144)]
    assert 0.9 < majority_at_k(votes, 64) <= 1.0


@pytest.mark.parametrize("k", [0, 3])
def test_impossible_sizes_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        majority_at_k([("4", True), ("5", False)], k)
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(2, 1, k)


def share_of_hits(intervals: list[tuple[float, float]], truth: float | list[float]) -> float:
    truths = truth if isinstance(truth, list) else [truth] * len(intervals)
    hits = [low <= value <= high for (low, high), value in zip(intervals, truths, strict=True)]
    return sum(hits) / len(hits)


def test_the_interval_over_prompts_covers_the_truth_of_new_prompts_and_new_completions() -> None:
    """Prompts of mean difficulty 0.4 (beta distributed), 60 of them, 4 completions each: 95 % of 300 repetitions."""
    draw = np.random.default_rng(1)
    intervals = []
    for repetition in range(300):
        chances = draw.beta(0.8, 1.2, size=60)
        means = draw.binomial(4, chances) / 4
        intervals.append(bootstrap_interval(means.tolist(), seed=repetition, num_resamples=1000))
    assert 0.92 <= share_of_hits(intervals, 0.4) <= 0.98


@pytest.mark.parametrize(("truth", "total"), [(0.05, 40), (0.5, 40), (0.97, 100)])
def test_the_interval_of_one_completion_each_covers(truth: float, total: int) -> None:
    draw = np.random.default_rng(2)
    intervals = [wilson_interval(int(count), total) for count in draw.binomial(total, truth, size=2000)]
    assert 0.93 <= share_of_hits(intervals, truth) <= 0.985


def test_the_interval_over_runs_covers_more_than_that_over_prompts_alone() -> None:
    """Eight training seeds that differ by a standard deviation of 0.05: the interval over prompts does not know it."""
    draw = np.random.default_rng(4)
    crossed, alone, truth = [], [], 0.5
    for repetition in range(200):
        difficulty = draw.normal(truth, 0.15, size=80)
        runs = difficulty[None, :] + draw.normal(0, 0.05, size=(8, 1))
        outcomes = (draw.random((8, 80)) < np.clip(runs, 0, 1)).astype(float)
        crossed.append(runs_interval(outcomes.tolist(), seed=repetition, num_resamples=500))
        alone.append(bootstrap_interval(outcomes.mean(axis=0).tolist(), seed=repetition, num_resamples=500))
    assert share_of_hits(crossed, truth) >= 0.92
    assert share_of_hits(alone, truth) < share_of_hits(crossed, truth)


def test_one_run_gives_the_bootstrap_over_prompts_in_width() -> None:
    values = [0.0, 0.25, 0.5, 0.75, 1.0] * 12
    one, usual = runs_interval([values], seed=0), bootstrap_interval(values, seed=0)
    assert one == pytest.approx(usual, abs=0.02)


def test_intervals_depend_on_their_seed_alone() -> None:
    values = [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    assert runs_interval(values, seed=5) == runs_interval(values, seed=5)


def test_runs_over_other_prompts_cannot_be_put_together() -> None:
    with pytest.raises(ValueError, match="cannot be put together"):
        runs_interval([[1.0, 0.0], [1.0]], seed=0)
    with pytest.raises(ValueError, match="cannot be put together"):
        runs_interval([[]], seed=0)
    assert not math.isnan(runs_interval([[1.0]], seed=0)[0])
