"""Checks of completion lengths and of truncation."""

from __future__ import annotations

from oncurve.doctor.case import Case, Finding

LENGTH, CUT = "completion/mean_tokens", "completion/truncated_fraction"
OTHER_ENDS = ("failed", "turns", "seconds")
"""Reasons that end an unfinished episode before the token limit does."""


def minimum_length(case: Case) -> Finding | None:
    """The least length that is allowed is above what completions need: all reach it, and end there or never."""
    least, limit = case.number("rollouts.min_completion_tokens"), case.number("rollouts.max_completion_tokens")
    shortest, cut, length = case.curve("completion/min_tokens"), case.curve(CUT), case.curve(LENGTH)
    if not least >= 0.5 * limit or not shortest or not cut or not length or abs(shortest.median - least) > 1:
        return None
    if cut.values[0] < 0.1 and length.median > 1.1 * least:
        return None
    return Finding(
        severity="severe",
        what="Completions may not end where they would, so they ramble",
        evidence=(
            *case.configured("rollouts.min_completion_tokens"),
            *case.configured("rollouts.max_completion_tokens"),
            shortest.over_all(),
            cut.over_all(),
        ),
        do="Lower rollouts.min_completion_tokens to a few tokens, which is enough against empty completions.",
    )


def truncation(case: Case) -> Finding | None:
    """More than a tenth of the completions were cut off before the first update; severe from three tenths."""
    cut = case.curve(CUT)
    if not cut or cut.values[0] <= 0.1:
        return None
    ended = [sum(curve.values) for curve in case.curves("episode/ended/") if curve.key.rpartition("/")[2] in OTHER_ENDS]
    share = cut.mean - sum(ended) / len(cut)
    if share <= 0.1:
        return None
    return Finding(
        severity="severe" if share >= 0.3 else "warning",
        what="Completions are cut off at the token limit before they reach an answer",
        evidence=(cut.on(0), cut.at_end(), *case.configured("rollouts.max_completion_tokens")),
        do="Raise rollouts.max_completion_tokens (twice the mean length of finished completions is a start), and check "
        "that the model knows how to end: chat template, stop strings.",
    )


def length_explosion(case: Case) -> Finding | None:
    """The mean length has doubled and completions are cut off, which was not so at the start."""
    length, cut = case.curve(LENGTH), case.curve(CUT)
    if not length.has_two_ends or not cut or length.end < 2 * length.values[0] or cut.end <= 0.1:
        return None
    return Finding(
        severity="severe" if cut.end >= 0.3 else "warning",
        what="Completions grow until they hit the token limit",
        evidence=(length.on(0), length.at_end(), cut.at_end()),
        do="Penalize overlong completions (reward type overlong), or use a loss without length bias "
        "(algorithm.type dr_grpo or dapo); make sure that longer answers do not earn more.",
    )


def length_collapse(case: Case) -> Finding | None:
    """The mean length fell to less than half while the fraction of right answers did not rise."""
    length, correct = case.curve(LENGTH), case.curve("reward/correct")
    if not length.has_two_ends or length.end >= 0.5 * length.start:
        return None
    if correct.has_two_ends and correct.end > correct.start + 0.05:
        return None
    return Finding(
        severity="severe" if length.end < 0.25 * length.start else "warning",
        what="Completions shrink to almost nothing, without better answers",
        evidence=length.both_ends(),
        do="Look for a reward that favors short completions; reward length only when the answer is right "
        "(only_if_correct), and lower the learning rate.",
    )
