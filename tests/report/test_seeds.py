"""Runs that differ in their seed alone are one recipe, and recipes are compared seed by seed."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oncurve.observe.columns import Columns
from oncurve.report.comparing import RunComparison, Side
from oncurve.report.seeds import _texts, compare_seeds
from oncurve.stats import t_interval

GRPO, OTHER = [0.935, 0.925, 0.925], [0.95, 0.955, 0.89]


def side(name: str, rate: float, seed: int, score: float, *, is_binary: bool = True) -> Side:
    config = {"optimizer.learning_rate": str(rate), "run.seed": str(seed), "run.name": name, "run.folder": "runs"}
    measured: Any = SimpleNamespace(
        is_binary=is_binary,
        correct=SimpleNamespace(fraction=score),
        mean_reward=SimpleNamespace(value=score),
        examples=[SimpleNamespace(question="1 + 1?")],
    )
    return Side(name, Path(name), Columns(), {}, config, {"trained": measured})


def compared(*scores: tuple[str, float, list[float]], is_binary: bool = True) -> RunComparison:
    sides = [
        side(f"{name}-seed{seed}", rate, seed, score, is_binary=is_binary)
        for name, rate, values in scores
        for seed, score in enumerate(values)
    ]
    return RunComparison(sides, [], [])


def test_means_differences_and_intervals_are_those_of_numpy() -> None:
    found = compare_seeds(compared(("grpo", 1e-4, GRPO), ("mine", 2e-4, OTHER)))
    assert found is not None
    assert [recipe.name for recipe in found.recipes] == ["grpo", "mine"]
    assert found.recipes[0].mean == pytest.approx(np.mean(GRPO))
    difference = found.differences[0]
    pairs = np.array(OTHER) - np.array(GRPO)
    assert difference.mean == pytest.approx(pairs.mean())
    reach = 4.302652729911275 * pairs.std(ddof=1) / math.sqrt(3)  # Student's t with two degrees of freedom
    assert difference.interval == pytest.approx((pairs.mean() - reach, pairs.mean() + reach))
    assert found.sentences() == [
        "3 seeds cannot tell mine from grpo: +0.3 points [-8.1, +8.8] over 3 seeds; not even 200 would, "
        "if this is the difference."
    ]


def test_a_difference_beyond_its_interval_has_a_direction() -> None:
    better = compare_seeds(compared(("a", 1.0, [0.5, 0.52, 0.51]), ("b", 2.0, [0.7, 0.73, 0.70])))
    assert better is not None
    assert better.sentences()[0].startswith("b is better than a: +20.0 points")
    worse = compare_seeds(compared(("a", 1.0, [3.0, 4.0]), ("b", 2.0, [1.0, 2.001]), is_binary=False))
    assert worse is not None
    assert worse.sentences()[0].startswith("b is worse than a: -2.000")


def test_a_recipe_with_several_seeds_is_the_one_to_compare_with_and_others_only_on_its_problems() -> None:
    runs = compared(("one", 3.0, [0.4]), ("a", 1.0, [0.5, 0.52]), ("b", 2.0, [0.7, 0.73]), ("c", 4.0, [0.7, 0.73]))
    for each in runs.sides[-2:]:
        each.evaluations["trained"].examples[0].question = "2 + 2?"
    found = compare_seeds(runs)
    assert found is not None
    assert [recipe.name for recipe in found.recipes] == ["a", "b", "c", "one-seed0"]
    assert [difference.name for difference in found.differences] == ["b", "one-seed0"]
    assert found.sentences()[-1] == "c: other test problems or rewards than a, not compared."


def test_runs_without_a_second_seed_are_compared_as_runs() -> None:
    assert compare_seeds(compared(("a", 1.0, [0.5]), ("b", 2.0, [0.7]))) is None
    one_more = compare_seeds(compared(("a", 1.0, [0.5, 0.6]), ("b", 2.0, [0.7])))
    assert one_more is not None
    assert one_more.sentences() == ["b-seed0 and a have 1 seed in common; two or more tell something."]


def test_seeds_that_all_give_the_same_say_nothing_of_others() -> None:
    found = compare_seeds(compared(("a", 1.0, [0.5, 0.5]), ("b", 2.0, [0.6, 0.6])))
    assert found is not None
    said = "b against a: +10.0 points over 2 seeds, the same on each, which says nothing of other seeds."
    assert found.sentences() == [said]
    [_, rows] = _texts(found)
    assert [row[2] for row in rows] == ["50.0%", "60.0%"]  # and no interval of width 0
    assert rows[1][4] == "+10.0 points"


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.706205), (3, 4.302653), (4, 3.182446), (6, 2.570582), (31, 2.042272)]
)
def test_the_interval_of_a_mean_is_students(count: int, quantile: float) -> None:
    values = [float(place**2) for place in range(count)]
    low, high = t_interval(values)
    reach = quantile * float(np.std(values, ddof=1)) / math.sqrt(count)
    assert (high - low) / 2 == pytest.approx(reach, rel=2e-3)
