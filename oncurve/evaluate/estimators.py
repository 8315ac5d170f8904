"""Majority vote among k completions, and the spread of results over runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np


def majority_at_k(votes: Sequence[tuple[Hashable | None, bool]], k: int) -> float:
    """Chance that the most frequent answer among k of n completions is right, exact over all choices of k.

        maj@k = sum over sets of k, of  [right answer among the t most frequent ones] / t,   over C(n, k)

    ``votes`` holds (answer, is right) for each completion. All right answers count as one answer, however they are
    written; an answer of None abstains; answers that tie for the first place share it; a set in which nobody votes is
    wrong. Sets are not listed but counted, in whole numbers, answer by answer.

    >>> majority_at_k([("4", True), ("4", True), ("5", False)], 1)
    0.6666666666666666
    >>> majority_at_k([("4", True), ("4", True), ("5", False)], 3)
    1.0

    Source: self-consistency, arXiv:2203.11171; the count without replacement is that of pass@k, arXiv:2107.03374.

    Raises ValueError if k is not in 1 to n.
    """
    if not 1 <= k <= len(votes):
        raise ValueError(f"maj@{k} of {len(votes)} completions is not defined")
    right = sum(is_right for _, is_right in votes)
    sizes = Counter(answer for answer, is_right in votes if not is_right and answer is not None).values()
    wins = 0.0
    for drawn in range(1, min(right, k) + 1):
        rivals = [size for size in sizes if size >= drawn]  # the others cannot come level: like those that abstain
        ways = _ways(rivals, len(votes) - right - sum(rivals), left=k - drawn, most=drawn)
        wins += math.comb(right, drawn) * sum(count / (1 + ties) for ties, count in ways.items())
    return wins / math.comb(len(votes), k)


def _ways(rivals: Sequence[int], silent: int, *, left: int, most: int) -> dict[int, int]:
    """In how many ways ``left`` completions can be drawn with no rival more than ``most`` times, by the number of
    rivals that are drawn exactly so often.
    """
    states: Counter[tuple[int, int]] = Counter({(0, 0): 1})
    for size in rivals:
        grown: Counter[tuple[int, int]] = Counter()
        for (drawn, ties), count in states.items():
            for more in range(min(size, most, left - drawn) + 1):
                grown[drawn + more, ties + (more == most)] += count * math.comb(size, more)
        states = grown
    found: Counter[int] = Counter()
    for (drawn, ties), count in states.items():
        found[ties] += count * math.comb(silent, left - drawn)
    return found


def runs_interval(values: Sequence[Sequence[float]], *, seed: int, num_resamples: int = 4000) -> tuple[float, float]:
    """95 % interval of the mean over runs and prompts, if both the training seeds and the prompts were others.

        values[s][p]: mean over the completions of prompt p by the model of training seed s
        each resample draws S runs and P prompts, and takes the mean over the chosen rows and columns

    Every run answers the same prompts, so the two are crossed, and a drawn prompt is drawn for all runs. With one run
    this is the bootstrap over prompts. With few runs it is too narrow, since S runs show (S - 1) / S of their variance.

    Source: Davison and Hinkley, Bootstrap Methods and their Application, section 3.8.

    Raises ValueError if the runs did not answer the same number of prompts, at least one.
    """
    if len({len(row) for row in values}) != 1 or not values[0]:
        raise ValueError(f"runs of {[len(row) for row in values]} prompts cannot be put together")
    data = np.asarray(values, dtype=np.float64)
    num_runs, num_prompts = data.shape
    generator = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    for place in range(num_resamples):
        rows = data[generator.integers(0, num_runs, num_runs)].mean(axis=0)
        means[place] = rows[generator.integers(0, num_prompts, num_prompts)].mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
