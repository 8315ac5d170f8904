"""Checks of completions with tools and environments."""

from __future__ import annotations

from oncurve.doctor.case import Case, Finding


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
