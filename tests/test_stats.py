"""Are intervals and tests the ones of the textbooks?"""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest

from oncurve.stats import (
    bootstrap_interval,
    mcnemar_exact,
    paired_difference_interval,
    pass_at_k,
    sign_flip_p,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (20, 30, 0.48780, 0.80770),
        (29, 30, 0.83329, 0.99409),
        (0, 10, 0.0, 0.27754),
        (10, 10, 0.72246, 1.0),
        (1, 1, 0.20654, 1.0),
    ],
)
def test_wilson_intervals_are_those_of_the_formula(successes: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(successes, total) == pytest.approx((low, high), abs=1e-5)


def test_a_wilson_interval_solves_its_own_equation() -> None:
    z = 1.959963984540054
    for successes, total in [(3, 17), (250, 500), (499, 500)]:
        for end in wilson_interval(successes, total):
            assert abs(successes / total - end) == pytest.approx(z * math.sqrt(end * (1 - end) / total))


def test_over_nothing_anything_is_possible() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert all(math.isnan(end) for end in bootstrap_interval([], seed=0))


@pytest.mark.parametrize(("successes", "total"), [(-1, 3), (4, 3)])
def test_impossible_counts_are_refused(successes: int, total: int) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        wilson_interval(successes, total)


def test_a_higher_confidence_gives_a_wider_interval() -> None:
    narrow, wide = wilson_interval(30, 100), wilson_interval(30, 100, confidence=0.99)
    assert wide[0] < narrow[0] < 0.3 < narrow[1] < wide[1]


def test_the_bootstrap_of_yes_and_no_is_close_to_wilson() -> None:
    found = bootstrap_interval([1.0] * 200 + [0.0] * 300, seed=0)
    assert found == pytest.approx(wilson_interval(200, 500), abs=0.01)


def test_the_bootstrap_depends_on_its_seed_and_on_nothing_else() -> None:
    values = [0.0, 0.25, 0.5, 1.0, 0.75, 0.1]
    np.random.seed(1)  # noqa: NPY002  (the global generator must not matter)
    first = bootstrap_interval(values, seed=3)
    np.random.seed(2)  # noqa: NPY002
    assert bootstrap_interval(values, seed=3) == first
    assert bootstrap_interval(values, seed=4) != first


def test_the_bootstrap_of_many_values_meets_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [float(number % 17) for number in range(5001)]
    limit = bootstrap_interval(values, seed=0)
    monkeypatch.setattr("oncurve.stats.MOST_RESAMPLED", len(values))
    assert bootstrap_interval(values, seed=0) == pytest.approx(limit, abs=0.02 * (limit[1] - limit[0]))


def test_the_bootstrap_of_a_constant_has_no_width() -> None:
    assert bootstrap_interval([0.5] * 20, seed=0) == (0.5, 0.5)


def test_a_paired_interval_by_hand() -> None:
    # p1 = 0.2, p2 = 0.6; ad - bc = 8*36 - 12*44 < 0, so it is not corrected
    first, second = wilson_interval(20, 100), wilson_interval(52, 100)
    phi = (8 * 36 - 12 * 44) / math.sqrt(20 * 80 * 52 * 48)
    below, above = 0.52 - second[0], first[1] - 0.2
    low = 0.32 - math.sqrt(below**2 - 2 * phi * below * above + above**2)
    assert paired_difference_interval(8, 12, 44, 36)[0] == pytest.approx(low)


def test_swapping_the_models_mirrors_the_interval() -> None:
    low, high = paired_difference_interval(30, 5, 20, 45)
    assert paired_difference_interval(30, 20, 5, 45) == pytest.approx((-high, -low))


def test_agreeing_models_are_known_more_exactly_than_independent_ones() -> None:
    agreeing, independent = paired_difference_interval(45, 5, 5, 45), paired_difference_interval(25, 25, 25, 25)
    assert agreeing[1] - agreeing[0] < 0.7 * (independent[1] - independent[0])


def test_no_change_at_all_still_leaves_a_doubt() -> None:
    low, high = paired_difference_interval(0, 0, 0, 50)
    assert -0.08 < low < 0.0 < high < 0.08
    assert paired_difference_interval(0, 0, 10, 0)[1] == 1.0


@pytest.mark.proves("D20")
def test_paired_intervals_cover_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    counts = generator.multinomial(80, [0.3, 0.05, 0.25, 0.4], size=2000)
    intervals = [paired_difference_interval(*map(int, row)) for row in counts]
    assert 0.93 < np.mean([low <= 0.2 <= high for low, high in intervals]) < 0.975


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (1, -1, 2, 3)])
def test_a_paired_interval_needs_counts(counts: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no counts"):
        paired_difference_interval(*counts)


def test_mcnemar_is_the_sign_test_by_enumeration() -> None:
    for first, second in product(range(5), repeat=2):
        total = first + second
        outcomes = [sum(flips) for flips in product((0, 1), repeat=total)]
        reach = abs(first - second)
        by_hand = sum(abs(2 * heads - total) >= reach for heads in outcomes) / len(outcomes)
        assert mcnemar_exact(first, second) == pytest.approx(by_hand)


def test_mcnemar_knows_its_limits() -> None:
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(5, 5) == 1.0
    assert 0 < mcnemar_exact(20, 400) < 1e-80
    assert mcnemar_exact(0, 5000) == 0.0  # below the smallest float, and no overflow on the way
    with pytest.raises(ValueError, match="negative"):
        mcnemar_exact(-1, 3)


def test_sign_flips_agree_with_the_exact_test() -> None:
    differences = [1.0] * 9 + [-1.0] * 2 + [0.0] * 30
    assert sign_flip_p(differences, seed=0) == pytest.approx(mcnemar_exact(2, 9), abs=0.01)


def test_sign_flips_of_no_difference_find_none() -> None:
    assert sign_flip_p([0.0, 0.0], seed=0) == 1.0
    assert sign_flip_p([], seed=0) == 1.0
    assert sign_flip_p([0.3, -0.3], seed=0) == 1.0


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one() -> None:
    for total, correct, k in [(5, 2, 1), (5, 2, 2), (5, 2, 4), (6, 1, 3), (4, 0, 2), (4, 4, 4)]:
        subsets = list(combinations([True] * correct + [False] * (total - correct), k))
        assert pass_at_k(total, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("total", "correct", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_is_refused_where_it_is_not_defined(total: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(total, correct, k)
