"""The time that a run would take with sampling ahead of training, from the seconds of its own steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TIP_STALENESS = 2
WAITED = 1 / 3
"""Share of the time that a trainer waits for completions above which a run is told what steps ahead would save."""


def block_steps(staleness: int) -> int:
    """Steps that are sampled together, from the same weights, where weights do not change under rows that run.

    Rows of one block fill the places that the stragglers of its first step leave free.
    """
    return max(1, (staleness + 1) // 2)


def seconds_ahead(sampling: Sequence[float], training: Sequence[float], staleness: int) -> float:
    """Seconds of some steps, if each is sampled once the one before is, from weights at most so many steps old.

        sampled_j = max(sampled_(j-1), trained_(j-1-staleness)) + sampling_j
        trained_j = max(trained_(j-1), sampled_j) + training_j

    >>> [seconds_ahead([3.0] * 10, [2.0] * 10, staleness) for staleness in (0, 1)]
    [50.0, 32.0]
    """
    sampled, trained = 0.0, [0.0] * (staleness + 1)
    for sample, train in zip(sampling, training, strict=True):
        sampled = max(sampled, trained[-1 - staleness]) + sample
        trained.append(max(trained[-1], sampled) + train)
    return trained[-1]


def tip_of_waiting(rows: Sequence[Mapping[str, float]]) -> str | None:
    """The advice for a run on servers without look-ahead whose trainer waited long; None where it did not.

    ``rows`` are its metrics, step by step.
    """
    known = [row for row in rows if "time/sample_seconds" in row and "time/step_seconds" in row]
    sampling = [row["time/sample_seconds"] for row in known]
    whole = sum(row["time/step_seconds"] for row in known)
    if not known or sum(sampling) <= WAITED * whole:
        return None
    training = [max(0.0, row["time/step_seconds"] - row["time/sample_seconds"]) for row in known]
    ahead = seconds_ahead(sampling, training, TIP_STALENESS)
    return (
        f"Tip: the trainer waited for completions in {sum(sampling) / whole:.0%} of the time of its steps. With "
        f"rollouts.staleness={TIP_STALENESS} (and algorithm.correction=truncate) they would have taken about "
        f"{ahead:,.3g} s instead of {whole:,.3g} s, by their own record"
    )
