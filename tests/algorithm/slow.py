"""Slow references: the formulas of the papers as loops over plain numbers, in float64, without a tensor operation."""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = Sequence[float]
Table = Sequence[Row]


def mean(values: Row) -> float:
    return sum(values) / len(values)


def deviation(values: Row, ddof: int) -> float:
    centre = mean(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - ddof))


def graded_only(row: Sequence[float | None]) -> list[float]:
    return [value for value in row if value is not None]


def flat(row: Sequence[float | None]) -> bool:
    """A group without signal: fewer than two rewards, or rewards that are all the same."""
    values = graded_only(row)
    return len(values) < 2 or max(values) - min(values) < 1e-6


def group_relative(
    table: Sequence[Sequence[float | None]], *, scale_by_std: bool, ddof: int, epsilon: float
) -> list[list[float]]:
    result = []
    for row in table:
        values = graded_only(row)
        if flat(row):
            result.append([0.0] * len(row))
            continue
        divisor = deviation(values, ddof) + epsilon if scale_by_std else 1.0
        result.append([0.0 if value is None else (value - mean(values)) / divisor for value in row])
    return result


def ratio(logprob: float, old: float) -> float:
    return math.exp(logprob - old)


def clipped(logprob: float, old: float, advantage: float, low: float, high: float) -> float:
    w = ratio(logprob, old)
    bounded = min(max(w, 1 - low), 1 + high)
    return -min(w * advantage, bounded * advantage)


def sequence_mean(loss: Table, mask: Sequence[Sequence[bool]], num_rows: int) -> float:
    total = 0.0
    for losses, kept in zip(loss, mask, strict=True):
        counted = [value for value, keep in zip(losses, kept, strict=True) if keep]
        total += mean(counted) if counted else 0.0
    return total / num_rows


def token_sum(loss: Table, mask: Sequence[Sequence[bool]]) -> float:
    return sum(
        value for losses, kept in zip(loss, mask, strict=True) for value, keep in zip(losses, kept, strict=True) if keep
    )


def by_batch(table: Sequence[Sequence[float | None]], *, of: str, ddof: int, epsilon: float) -> list[list[float]]:
    """Centered in the group, divided by the deviation over the batch of the rewards or of what is centered."""
    centered = group_relative(table, scale_by_std=False, ddof=1, epsilon=0.0)
    pool = [
        reward if of == "rewards" else moved
        for row, line in zip(table, centered, strict=True)
        for reward, moved in zip(row, line, strict=True)
        if reward is not None
    ]
    divisor = (deviation(pool, ddof) if len(pool) > ddof else 0.0) + epsilon
    return [[value / divisor if value else 0.0 for value in line] for line in centered]


def whitened(table: Sequence[Sequence[float | None]], *, ddof: int, epsilon: float) -> list[list[float]]:
    width = len(table[0])
    line = group_relative([[value for row in table for value in row]], scale_by_std=True, ddof=ddof, epsilon=epsilon)[0]
    return [line[start : start + width] for start in range(0, len(line), width)]


def leave_one_out(table: Sequence[Sequence[float | None]]) -> list[list[float]]:
    result = []
    for row in table:
        line = []
        for place, value in enumerate(row):
            others = graded_only([other for index, other in enumerate(row) if index != place])
            line.append(0.0 if value is None or flat(row) else value - mean(others))
        result.append(line)
    return result


def mean_normalized(table: Sequence[Sequence[float | None]]) -> list[list[float]]:
    return [
        [0.0 if value is None or flat(row) else value / mean(graded_only(row)) - 1 for value in row] for row in table
    ]


def length_weighted(table: Sequence[Sequence[float | None]], lengths: Sequence[Sequence[int]]) -> list[list[float]]:
    result = []
    for row, counts in zip(table, lengths, strict=True):
        pairs = [(value, count) for value, count in zip(row, counts, strict=True) if value is not None]
        total = sum(count for _, count in pairs)
        if flat(row):
            result.append([0.0] * len(row))
            continue
        baseline = sum(value * count for value, count in pairs) / total if total else mean([v for v, _ in pairs])
        result.append([0.0 if value is None else value - baseline for value in row])
    return result


def multi_objective(
    parts: Sequence[Sequence[Sequence[float | None]]], weights: Row, *, ddof: int, epsilon: float
) -> list[list[float]]:
    summed: list[list[float | None]] = [[None if value is None else 0.0 for value in row] for row in parts[0]]
    for table, weight in zip(parts, weights, strict=True):
        normal = group_relative(table, scale_by_std=True, ddof=ddof, epsilon=epsilon)
        summed = [
            [None if total is None else total + weight * value for total, value in zip(a, b, strict=True)]
            for a, b in zip(summed, normal, strict=True)
        ]
    return whitened(summed, ddof=ddof, epsilon=epsilon)


def token_loss(
    name: str, logprobs: Row, old: Row, advantage: float, kept: Sequence[bool], **constants: float
) -> list[float]:
    """The loss of each token of one completion."""
    gaps = [a - b for a, b, keep in zip(logprobs, old, kept, strict=True) if keep]
    s = math.exp(sum(gaps) / max(len(gaps), 1))
    low, high = constants.get("clip_low", 0.2), constants.get("clip_high", 0.2)
    cap = constants.get("ratio_max", math.inf)

    def clip(w: float) -> float:
        return -min(min(w, cap) * advantage, min(max(w, 1 - low), 1 + high) * advantage)

    k = 1.0 if advantage > 0 else 1.05
    power, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    log_w = min(max(sum(min(max(gap, -20.0), 20.0) for gap in gaps), math.log(1e-8)), 20.0)
    phi = math.exp(decay + power * log_w - decay * math.exp(log_w))
    result = []
    for a, b in zip(logprobs, old, strict=True):
        w = math.exp(a - b)
        result.append(
            {
                "policy_gradient": -advantage * a,
                "importance_weighted": -w * advantage,
                "clipped": clip(w),
                "sequence_clipped": clip(s),
                "sequence_clipped_token": clip(s),
                "truncated_importance": -min(w, cap) * advantage * a,
                "sequence_truncated_importance": -min(s, cap) * advantage * a,
                "soft_gated": -4 / k / (1 + math.exp(-k * (w - 1))) * advantage,
                "sequence_soft_gated": -4 / k / (1 + math.exp(-k * (s - 1))) * advantage,
                "sequence_gated": -phi * advantage * a,
            }[name]
        )
    return result


def sequence_slope(
    name: str, logprobs: Row, old: Row, advantage: float, kept: Sequence[bool], *, ratio_max: float
) -> float:
    """The derivative of the sum of a completion's losses by the log-probability of any of its n tokens.

    s changes by s / n, and each of the n losses with it; a weight that is a constant has no derivative.
    """
    gaps = [a - b for a, b, keep in zip(logprobs, old, kept, strict=True) if keep]
    s = math.exp(sum(gaps) / max(len(gaps), 1))
    if name == "sequence_truncated_importance":
        return -min(s, ratio_max) * advantage
    k = 1.0 if advantage > 0 else 1.05
    sigmoid = 1 / (1 + math.exp(-k * (s - 1)))
    return -4 * sigmoid * (1 - sigmoid) * advantage * s


def normalized(
    name: str, loss: Table, mask: Sequence[Sequence[bool]], groups: Sequence[int], *, limit: int = 1
) -> float:
    """The loss of a whole update."""
    rows = len(loss)
    if name == "sequence_mean":
        return sequence_mean(loss, mask, rows)
    total = token_sum(loss, mask)
    if name == "token_mean":
        return total / max(sum(sum(kept) for kept in mask), 1)
    if name == "prompt_mean":
        means = []
        for group in sorted(set(groups)):
            members = [place for place, other in enumerate(groups) if other == group]
            tokens = sum(sum(mask[place]) for place in members)
            part = token_sum([loss[place] for place in members], [mask[place] for place in members])
            means.append(part / max(tokens, 1))
        return mean(means)
    return total / (rows * (limit if name == "constant" else 1))


def kl(name: str, logprob: float, ref: float) -> float:
    d = logprob - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1, "absolute": abs(d), "k1_reversed": -d}[name]


def off_policy(now: Row, sampler: Row, advantage: float, kept: Sequence[bool], threshold: float) -> float:
    """The weight of one completion."""
    gaps = [b - a for a, b, keep in zip(now, sampler, kept, strict=True) if keep]
    return 0.0 if advantage < 0 and sum(gaps) / max(len(gaps), 1) > threshold else 1.0


def correction(
    kind: str, level: str, trainer: Row, sampler: Row, kept: Sequence[bool], low: float, high: float
) -> list[float]:
    """The weight of each token of one completion; 1 or 0 where there is no token does not matter."""
    gaps = [a - b if keep else 0.0 for a, b, keep in zip(trainer, sampler, kept, strict=True)]
    tokens = max(sum(kept), 1)
    ratios = {
        "token": [math.exp(gap) for gap in gaps],
        "sequence": [math.exp(sum(gaps))] * len(gaps),
        "geometric": [math.exp(sum(gaps) / tokens)] * len(gaps),
    }[level]
    if kind == "truncate":
        return [min(max(ratio, low), high) for ratio in ratios]
    return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
