"""Checks of the rollouts: rewards that differ within a group, lengths and truncation, tools and environments."""

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


def tools_unused(case: Case) -> Finding | None:
    """The policy has tools and hardly ever calls one, so that nothing can be learned about calling.

    Calls are not measured in environments with steps, which have nothing to call.
    """
    calls = case.curve("episode/calls")
    if not calls or not (case.setting("rollouts.tools") or case.setting("rollouts.environments")):
        return None
    if calls.mean >= 0.02 or not calls.window:
        return None
    return Finding(
        severity="severe",
        what="The tools are never called",
        evidence=(calls.at_start(), calls.at_end(), *case.configured("rollouts.tools")),
        do="Let the prompt say what may be called and how (data.chat=true tells it through the chat template), start "
        "from a model that was trained to call tools, or train it on a few demonstrations first.",
    )


def calls_malformed(case: Case) -> Finding | None:
    """A third of the calls at the end still cannot be read."""
    broken = case.curve("episode/malformed_calls")
    if not broken or broken.end < 1 / 3:
        return None
    return Finding(
        severity="severe" if broken.end >= 2 / 3 else "warning",
        what="Calls of tools cannot be read",
        evidence=broken.both_ends(),
        do="Look at calls in the report, with what they were answered: cut off by rollouts.max_completion_tokens, "
        "or written in a form that the model was not trained on. Use the model's own chat template (data.chat=true).",
    )


def tools_broken(case: Case) -> Finding | None:
    """Most calls are answered with an error, though they can be read."""
    errors, broken = case.curve("episode/tool_errors"), case.curve("episode/malformed_calls")
    if not errors or errors.end < 0.5 or errors.end - (broken.end if broken else 0.0) < 0.4:
        return None
    return Finding(
        severity="warning",
        what="Most calls of tools are answered with an error",
        evidence=errors.both_ends(),
        do="Read the answers in the report: a tool that is down or too slow (rollouts.episodes.tool_seconds), or "
        "arguments whose meaning its docstring does not say.",
    )


def turns_at_limit(case: Case) -> Finding | None:
    """A fifth of the completions are ended by the limit on turns."""
    cut = case.curve("episode/ended/turns")
    if not cut or cut.end < 0.2:
        return None
    return Finding(
        severity="warning",
        what="Episodes are ended by the limit on turns",
        evidence=(*cut.both_ends(), *case.configured("rollouts.episodes.max_turns")),
        do="Raise rollouts.episodes.max_turns if the task needs more; if the policy calls for calling's sake, let a "
        "reward pay only for an answer.",
    )


def environments_fail(case: Case) -> Finding | None:
    """Environments crash, hang or die: their completions have no reward."""
    failed = case.curve("episode/failed_fraction")
    if not failed or failed.mean <= 0.01:
        return None
    return Finding(
        severity="severe" if failed.mean >= 0.1 else "warning",
        what="Environments fail, and their completions are not graded",
        evidence=failed.both_ends(),
        do="Read the errors of completions in the report (environment_crashed, environment_timeout, "
        "environment_died); correct the environment, or give it more time (rollouts.episodes.environment_seconds).",
    )
