"""Confidence intervals, paired tests and pass@k for counted results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

MOST_RESAMPLED = 5000
"""Values of which means are drawn again; of more, the bootstrap and its limit differ by less than its own noise."""


def wilson_interval(successes: int, total: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share: honest near 0 and 1, where the usual p +- 1.96 s is not.

        z = normal quantile of (1 + confidence) / 2,   p = successes / total
        (p + z^2/2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2/n)       Wilson 1927

    Over nothing the share can be anything: (0, 1).

    >>> [round(end, 3) for end in wilson_interval(20, 30)]
    [0.488, 0.808]

    Raises ValueError if the counts are impossible.
    """
    if not 0 <= successes <= total:
        raise ValueError(f"{successes} successes out of {total} cannot be")
    if total == 0:
        return 0.0, 1.0
    centre, reach = _wilson(successes / total, total, NormalDist().inv_cdf((1 + confidence) / 2))
    low = 0.0 if successes == 0 else centre - reach  # exact at the ends, not 1e-18 beside them
    high = 1.0 if successes == total else centre + reach
    return low, high


def share_interval(share: float, total: float, *, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share that is known only as a number, over ``total`` examples; (0, 1) without any.

    >>> tuple(round(end, 3) for end in share_interval(0.5, 100))
    (0.404, 0.596)
    """
    if total <= 0:
        return 0.0, 1.0
    centre, reach = _wilson(share, total, z)
    return centre - reach, centre + reach


def _wilson(share: float, total: float, z: float) -> tuple[float, float]:
    """The middle of Wilson's interval, and the distance of its ends from there."""
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    return centre, z * math.sqrt(max(share * (1 - share), 0.0) / total + z * z / (4 * total * total)) / scale


def kendall_trend(values: Sequence[float], *, most_blocks: int = 100) -> float:
    """Trend of a series in standard deviations of chance; above 2 it rises, whatever the values' distribution.

        S = sum over i < k of sign(x_k - x_i)
        z = S / sqrt(n (n - 1) (2n + 5) / 18)                 Mann 1945, Kendall 1975; without their correction for ties

    Long series are first averaged over equal blocks, at most ``most_blocks`` of them. 0 for less than two values.

    >>> round(kendall_trend([1, 2, 3, 4, 5, 6, 7, 8]), 2)
    3.46
    """
    width = max(-(-len(values) // most_blocks), 1)
    means = [sum(values[k : k + width]) / width for k in range(0, len(values) - width + 1, width)]
    n = len(means)
    rises = sum((after > before) - (after < before) for k, before in enumerate(means) for after in means[k + 1 :])
    return rises / math.sqrt(n * (n - 1) * (2 * n + 5) / 18) if n > 1 else 0.0


def bootstrap_interval(
    values: Sequence[float], *, seed: int, confidence: float = 0.95, num_resamples: int = 4000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of values that are independent of each other, one per prompt.

    For more than ``MOST_RESAMPLED`` values its limit, which takes no draws:

        mean -+ z s / sqrt(n),   z = normal quantile of (1 + confidence) / 2,   s^2 = mean of (v - mean)^2

    Completions of one prompt are not independent: hand over their mean, so that prompts are what is drawn again.
    The generator is made from ``seed`` and nothing else. NaN over nothing.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
    """
    import numpy as np  # what only counts starts without it

    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        return math.nan, math.nan
    if data.size > MOST_RESAMPLED:
        reach = NormalDist().inv_cdf((1 + confidence) / 2) * float(data.std()) / math.sqrt(data.size)
        return float(data.mean()) - reach, float(data.mean()) + reach
    generator = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    for rows in _blocks(num_resamples, data.size):
        means[rows] = data[generator.integers(0, data.size, size=(rows.stop - rows.start, data.size))].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of a few independent values, such as one per seed (Student's t).

        mean -+ t s / sqrt(n),   t the 97.5 % quantile with n - 1 degrees of freedom

    The quantile is exact for 1 and 2 degrees of freedom, and right to 0.2 % above (Cornish and Fisher's expansion).
    NaN for fewer than two values, and for equal ones, whose spread nobody knows.

    >>> [round(end, 2) for end in t_interval([1.0, 2.0, 3.0])]
    [-0.48, 4.48]
    """
    count = len(values)
    if count < 2 or max(values) - min(values) < 1e-12:
        return math.nan, math.nan
    mean = sum(values) / count
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    reach = _t_quantile(count - 1) * deviation / math.sqrt(count)
    return mean - reach, mean + reach


def _t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def paired_difference_interval(
    both: int, only_first: int, only_second: int, neither: int, *, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of the share of the second model minus that of the first, when both answered the same examples.

    With p1, p2 the shares, (l1, u1), (l2, u2) their Wilson intervals and phi the correlation of the two outcomes:

        p2 - p1 - sqrt((p2 - l2)^2 - 2 phi (p2 - l2)(u1 - p1) + (u1 - p1)^2)
        p2 - p1 + sqrt((u2 - p2)^2 - 2 phi (u2 - p2)(p1 - l1) + (p1 - l1)^2)

    phi = (ad - bc - n/2) / sqrt(product of the four margins), its numerator not taken below 0 by the correction n/2,
    and 0 when a margin is 0. Unlike a bootstrap it keeps a width where nothing was seen to change.

    Source: Newcombe 1998, Statistics in Medicine 17, 2635, method 10.

    Raises ValueError for negative counts or no example.
    """
    total = both + only_first + only_second + neither
    if min(both, only_first, only_second, neither) < 0 or total == 0:
        raise ValueError(f"{both}, {only_first}, {only_second} and {neither} are no counts of paired examples")
    first, second = (both + only_first) / total, (both + only_second) / total
    first_low, first_high = wilson_interval(both + only_first, total, confidence=confidence)
    second_low, second_high = wilson_interval(both + only_second, total, confidence=confidence)
    phi = _phi(both, only_first, only_second, neither)
    below, above = second - second_low, first_high - first
    low = math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))
    above, below = second_high - second, first - first_low
    high = math.sqrt(max(0.0, above**2 - 2 * phi * above * below + below**2))
    change = second - first
    return max(-1.0, change - low), min(1.0, change + high)


def _phi(both: int, only_first: int, only_second: int, neither: int) -> float:
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    if margins == 0:
        return 0.0
    agreement = both * neither - only_first * only_second
    half = (both + only_first + only_second + neither) / 2
    return (max(agreement - half, 0.0) if agreement >= 0 else agreement) / math.sqrt(margins)


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided p-value that two models are equally often right, from the examples on which they disagree.

        n = only_first + only_second;  p = min(1, 2 P(X <= min(only_first, only_second))),  X ~ Binomial(n, 1/2)

    ``only_first`` examples were right only for the first model, ``only_second`` only for the second; those on which
    both agree say nothing. 1.0 without disagreement. Source: McNemar 1947, exact binomial form.

    >>> mcnemar_exact(1, 7)  # 2 (1 + 8) / 2^8
    0.0703125

    Raises ValueError for negative counts.
    """
    if only_first < 0 or only_second < 0:
        raise ValueError(f"counts of disagreement cannot be negative, got {only_first} and {only_second}")
    total = only_first + only_second
    count = sum(math.comb(total, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, float(2 * count / 2**total))  # integers: exact, and no overflow before the division


def sign_flip_p(differences: Sequence[float], *, seed: int, num_resamples: int = 10_000) -> float:
    """Two-sided p-value that paired differences have mean 0, by flipping their signs at random.

        p = (1 + number of flips with |mean| >= |observed mean|) / (1 + num_resamples)

    For pairs whose outcome is more than right or wrong, such as the share of correct completions of a prompt; with
    one completion each, ``mcnemar_exact`` is the same test without chance. 1.0 without any difference.

    Source: Fisher's randomization test; the 1 + ... is Phipson and Smyth 2010.
    """
    import numpy as np

    data = np.asarray([value for value in differences if value != 0], dtype=np.float64)
    if data.size == 0:
        return 1.0
    generator = np.random.default_rng(seed)
    observed = abs(data.sum()) - 1e-12 * np.abs(data).sum()  # equal sums in another order of adding count as equal
    hits = 0
    for rows in _blocks(num_resamples, data.size):
        signs = generator.integers(0, 2, size=(rows.stop - rows.start, data.size)) * 2 - 1
        hits += int((np.abs(signs @ data) >= observed).sum())
    return (1 + hits) / (1 + num_resamples)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k completions is correct, from more than k of them.

        pass@k = 1 - C(n - c, k) / C(n, k)              Codex, arXiv:2107.03374, equation 1

    >>> pass_at_k(4, 1, 2)
    0.5

    Raises ValueError if k is not in 1 to n or c not in 0 to n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} completions is not defined")
    sets = math.comb(num_samples, k)  # whole numbers until the division: exact also where pass@k is tiny
    return (sets - math.comb(num_samples - num_correct, k)) / sets


def _blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Rows in blocks of about half a million numbers, so that memory does not grow with the number of resamples."""
    height = max(1, 500_000 // num_columns)
    return (slice(first, min(first + height, num_rows)) for first in range(0, num_rows, height))
