"""Checks of speed and of resources that run out."""

from __future__ import annotations

from itertools import pairwise

from oncurve.doctor.case import Case, Finding, Severity

STEP = "time/step_seconds"


def grading_bound(case: Case) -> Finding | None:
    """Grading takes more than three tenths of the step."""
    return _phase(
        case,
        "grade",
        limit=0.3,
        severity="warning",
        what="Grading takes a large part of every step",
        do="Make the grader faster, give it more processes, or lower its time limit; it should cost next to nothing.",
    )


def rollout_bound(case: Case) -> Finding | None:
    """Sampling takes more than 85 % of the step."""
    return _phase(
        case,
        "sample",
        limit=0.85,
        severity="note",
        what="Steps wait for sampling: the trainer is idle most of the time",
        do="Add rollout servers or a faster engine (rollouts.type), sample more rows at once (rollouts.max_rows), "
        "shorten completions, or sample the next step while this one trains.",
    )


def not_ahead_enough(case: Case) -> Finding | None:
    """The trainer waits for completions in more than a third of the time, while servers have nothing to sample."""
    step, sample, idle = (case.curve(key) for key in (STEP, "time/sample_seconds", "speed/server_idle_fraction"))
    if min(len(step), len(sample), len(idle)) < 3 or sample.median <= step.median / 3 or idle.median < 0.2:
        return None
    if case.number("rollouts.staleness") >= 8:
        return None
    return Finding(
        severity="note",
        what="Trainer and rollout servers wait for each other: sampling is not far enough ahead",
        evidence=(sample.over_all(), step.over_all(), idle.over_all()),
        do="Raise rollouts.staleness, with algorithm.correction=truncate; rollouts.in_flight lets nobody wait for "
        "stragglers.",
    )


def trainer_bound(case: Case) -> Finding | None:
    """Training takes more than 85 % of the step."""
    return _phase(
        case,
        "train",
        limit=0.85,
        severity="note",
        what="Steps wait for the trainer: the sampler is idle most of the time",
        do="Use larger microbatches (policy.tokens_per_microbatch), leave out gradient checkpointing if memory allows, "
        "use bfloat16, or train on more devices.",
    )


def slow_link(case: Case) -> Finding | None:
    """New weights take more than three tenths of the step to reach the servers, or some server is late every time."""
    step, sync, late = (case.curve(key) for key in (STEP, "weights/sync_seconds", "weights/late_servers"))
    is_slow = len(sync) >= 3 and len(step) >= 3 and sync.median > 0.3 * step.median
    is_late = len(late) >= 3 and late.median >= 1
    if not is_slow and not is_late:
        return None
    return Finding(
        severity="warning",
        what="Rollout servers wait for weights: a link cannot keep up",
        evidence=tuple(curve.over_all() for curve in (sync, late if is_late else step) if curve),
        do="Sample the next step while this one trains (rollouts.staleness: 1), so that weights travel meanwhile; let "
        "servers fetch from an object store (rollouts.weights_address); lower the learning rate, with which less "
        "changes; train an adapter (policy.lora.rank), or leave out the server behind that link.",
    )


def slowing(case: Case) -> Finding | None:
    """Steps take twice as long as at the start, and completions have not grown as much."""
    step, length = case.curve(STEP), case.curve("completion/mean_tokens")
    if len(step) < 20 or step.end <= 2 * step.start:
        return None
    if length.has_two_ends and length.end > 1.7 * length.start:
        return None
    return Finding(
        severity="warning",
        what="Steps take longer and longer, although completions do not",
        evidence=step.both_ends(),
        do="Look at memory, at the disk, and at what else runs on the machine.",
    )


def memory_growth(case: Case) -> Finding | None:
    """The process has grown by half over at least 50 steps, and is larger in every fifth of them."""
    memory = case.curve("memory/process_gib")
    if len(memory) < 50 or memory.end <= 1.5 * memory.start:
        return None
    fifths = [memory.values[len(memory) * part // 5] for part in range(5)]
    if any(after <= 1.02 * before for before, after in pairwise(fifths)):
        return None
    return Finding(
        severity="warning",
        what="The memory of the process grows steadily: something leaks",
        evidence=memory.both_ends(),
        do="Look for a reward function that keeps its inputs; save checkpoints often until you find it.",
    )


def _phase(case: Case, phase: str, *, limit: float, severity: Severity, what: str, do: str) -> Finding | None:
    part, whole = case.curve(f"time/{phase}_seconds"), case.curve(STEP)
    if len(part) < 3 or len(whole) < 3 or part.median <= limit * whole.median:
        return None
    return Finding(
        severity=severity,
        what=what,
        evidence=(part.over_all(), whole.over_all()),
        do=do,
    )
