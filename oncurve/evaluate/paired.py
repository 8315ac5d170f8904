"""Differences between two models that answered the same problems, with intervals and tests that know of the pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from oncurve.evaluate.evaluation import Example, MeanReward, Share
from oncurve.stats import bootstrap_interval, mcnemar_exact, paired_difference_interval, sign_flip_p

Pair = tuple[Example, Example]


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One line of the comparison: a share of the examples before and after, and the difference."""

    name: str
    before: Share
    after: Share
    change: float
    """Difference of the shares."""
    low: float
    """Lower end of the 95 % interval of the difference, which knows that both models had the same examples."""
    high: float
    p_value: float
    """Chance of a difference this large between equal models, from the same examples."""

    @property
    def factor(self) -> float:
        """After over before; infinite from nothing, NaN for nothing from nothing."""
        if self.before.fraction:
            return self.after.fraction / self.before.fraction
        return math.inf if self.after.fraction else math.nan


@dataclass(frozen=True, slots=True)
class RewardChange:
    """The mean reward before and after, and the paired difference."""

    before: MeanReward
    after: MeanReward
    change: float
    """Difference of the means, over the examples that were graded both times."""
    low: float
    """Lower end of the 95 % interval of the difference, by a bootstrap over prompts."""
    high: float
    p_value: float
    """By sign flips over prompts."""
    total: int
    """Examples that were graded both times."""


def share_change(
    name: str, pairs: Sequence[Pair], holds: Callable[[Example], bool], shares: tuple[Share, Share], *, seed: int
) -> ComparisonRow:
    """The change in the share of examples for which something holds; ``shares`` are those before and after.

    With one completion per prompt the interval is Newcombe's and the test McNemar's; with more, both are over prompts:
    a bootstrap and sign flips.
    """
    before, after = shares
    rows = _by_prompt(pairs)
    differences = [fmean(float(holds(a)) - float(holds(b)) for b, a in row) for row in rows]
    if all(len(row) == 1 for row in rows):
        lost, won = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
        both = before.successes - lost
        low, high = paired_difference_interval(both, lost, won, before.total - both - lost - won)
        p_value = mcnemar_exact(lost, won)
    else:
        low, high = bootstrap_interval(differences, seed=seed)
        p_value = sign_flip_p(differences, seed=seed)
    return ComparisonRow(name, before, after, after.fraction - before.fraction, low, high, p_value)


def reward_change(pairs: Sequence[Pair], means: tuple[MeanReward, MeanReward], *, seed: int) -> RewardChange:
    """The change in the mean reward of the pairs; ``means`` are those before and after."""
    differences = [fmean(_gain(pair) for pair in row) for row in _by_prompt(pairs)]
    low, high = bootstrap_interval(differences, seed=seed)
    change = fmean(map(_gain, pairs)) if pairs else math.nan
    return RewardChange(*means, change, low, high, sign_flip_p(differences, seed=seed), len(pairs))


def _gain(pair: Pair) -> float:
    return (pair[1].reward or 0.0) - (pair[0].reward or 0.0)


def _by_prompt(pairs: Sequence[Pair]) -> list[list[Pair]]:
    return [list(rows) for _, rows in groupby(pairs, key=lambda pair: pair[0].index)]
