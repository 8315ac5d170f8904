"""Checks for learning signal: rewards must differ between the completions of one prompt."""

from __future__ import annotations

from oncurve.doctor.case import Case, Curve, Evidence, Finding
from oncurve.stats import share_interval

DEAD = "group/zero_signal_fraction"
MANY = 0.6
"""Share of groups without a signal from which most of the sampling is wasted."""
NEARLY_ALL = 0.8


def sampling_narrow(case: Case) -> Finding | None:
    """Temperature, top-p, top-k or min-p leave so little choice that most groups hold equal completions."""
    dead = case.curve(DEAD)
    narrow = _narrow_settings(case)
    if not narrow or not dead or dead.mean < 0.4:
        return None
    return Finding(
        severity="severe" if dead.mean >= MANY else "warning",
        what="Sampling is too narrow: the completions of a group are identical and carry no signal",
        evidence=(*narrow, dead.over_all(), *_evidence(case.curve("group/std_mean"))),
        do="Sample with rollouts.temperature 1.0, top_p 1.0, top_k 0 and min_p 0, as the losses assume.",
    )


def most(case: Case, curve: Curve) -> bool:
    """At the end of the curve more than ``MANY`` of the groups are so, and more than half of them beyond chance."""
    prompts = case.number("run.prompts_per_step")
    groups = curve.window * (prompts if prompts == prompts else 8.0)
    return curve.end >= MANY and share_interval(min(curve.end, 1.0), groups)[0] > 0.5


def too_easy(case: Case) -> Finding | None:
    """Most groups are solved by every completion; severe if that was so from the first steps."""
    solved = case.curve("group/solved_fraction")
    if not solved or not most(case, solved):
        return None
    was_always = solved.start >= MANY
    is_severe = was_always and (solved.mean >= NEARLY_ALL or case.number("algorithm.group_size") <= 2)
    return Finding(
        severity="severe" if is_severe else "warning" if was_always else "note",
        what="Most prompts are too easy: every completion of their groups is right, so nothing is learned from them"
        if was_always
        else "Most prompts are solved by now: every completion of their groups is right",
        evidence=(solved.at_end(), *_evidence(case.curve(DEAD)), *case.configured("algorithm.group_size")),
        do="Use harder prompts, leave solved ones out (data.retire_above), refill dead groups (run.refill_rounds), "
        "or use larger groups (algorithm.group_size). If that cannot be, test the reward with `oncurve check`."
        if was_always
        else "Stop here, or continue with harder prompts (data.retire_above leaves solved ones out).",
    )


def too_hard(case: Case) -> Finding | None:
    """Most groups have no right completion and no signal either, at the end."""
    unsolved, dead = case.curve("group/unsolved_fraction"), case.curve(DEAD)
    if not unsolved or not most(case, unsolved) or (dead and dead.end < MANY):
        return None
    return Finding(
        severity="severe" if unsolved.end >= NEARLY_ALL else "warning",
        what="Most prompts are too hard: no completion of their groups is right, so nothing is learned from them",
        evidence=(*unsolved.both_ends(), *_evidence(case.curve(DEAD))),
        do="Start with easier prompts or a better model (`oncurve coldstart` or fine-tuning), use larger groups "
        "(algorithm.group_size), or choose half-solved prompts first (data.prefer_half_solved).",
    )


def dead_groups(case: Case) -> Finding | None:
    """Most groups have equal rewards; batch spread (reward/std) says nothing about that."""
    dead = case.curve(DEAD)
    if not dead or not most(case, dead) or _is_mostly_solved(case, dead):
        return None
    spread = case.curve("reward/std")
    return Finding(
        severity="severe" if dead.end >= 0.9 else "warning",
        what="Most groups carry no signal: all completions of a group earn the same reward",
        evidence=(dead.at_end(), *_evidence(case.curve("group/std_mean")), *_evidence(spread)),
        do="Use larger groups (algorithm.group_size), sample at temperature 1, refill dead groups "
        "(run.refill_rounds), or choose prompts that are sometimes solved (data.prefer_half_solved).",
    )


def _is_mostly_solved(case: Case, dead: Curve) -> bool:
    """Most of the silent groups are silent because every completion is right: a task that is solved, not a sick run."""
    solved = case.curve("group/solved_fraction")
    return bool(solved) and solved.end > 0.5 * dead.end


def skipped_updates(case: Case) -> Finding | None:
    """Updates were left out because none of their groups had a signal: more than a tenth of them."""
    skipped = case.curve("policy/skipped_updates")
    if not skipped or skipped.mean <= 0.1:
        return None
    return Finding(
        severity="severe" if skipped.mean > 0.5 else "warning",
        what="Updates are skipped because none of their groups carries a signal",
        evidence=(skipped.over_all(), *_evidence(case.curve(DEAD))),
        do="Give the groups a signal first (see the other findings), or put more groups into one update "
        "(run.completions_per_update).",
    )


def _narrow_settings(case: Case) -> tuple[Evidence, ...]:
    evidence: list[Evidence] = []
    if case.number("rollouts.temperature") < 0.5:
        evidence += case.configured("rollouts.temperature")
    if case.number("rollouts.top_p") < 0.7:
        evidence += case.configured("rollouts.top_p")
    if 0 < case.number("rollouts.top_k") <= 5:
        evidence += case.configured("rollouts.top_k")
    if case.number("rollouts.min_p") > 0.3:
        evidence += case.configured("rollouts.min_p")
    return tuple(evidence)


def _evidence(curve: Curve) -> tuple[Evidence, ...]:
    return (curve.at_end(),) if curve else ()
