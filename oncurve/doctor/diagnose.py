"""The list of checks, in the order in which findings are reported: causes before consequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oncurve.doctor import grading, groups, hacking, lengths, policy_health, throughput, tool_use
from oncurve.doctor.case import SEVERITIES, Case, Finding


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table of checks."""

    function: Callable[[Case], Finding | None]
    follows: tuple[str, ...] = ()
    """Names of the checks whose findings would explain this one: it is reported after them, as their consequence."""

    @property
    def name(self) -> str:
        """The function's name, by which findings, documents and benchmarks know the check."""
        return self.function.__name__

    @property
    def symptom(self) -> str:
        """The symptom that the check looks for, in one line."""
        return (self.function.__doc__ or "").strip().splitlines()[0]


_GRADER = ("grader_errors", "grader_inverted", "reward_blind", "reward_constant")
_SAMPLING = ("no_format", "minimum_length", "truncation", "sampling_narrow")
_COLLAPSE = ("not_finite", "learning_rate_high", "entropy_bonus", "clipping", "stale_weights", "mismatch")
_HACKED = ("reward_exploited", "reward_hacking")
_DEAD = ("too_easy", "too_hard", "dead_groups")

CHECKS: tuple[Check, ...] = (
    Check(tool_use.environments_fail),
    Check(grading.grader_errors, ("environments_fail",)),
    Check(grading.reward_constant),
    Check(grading.grader_inverted),
    Check(grading.reward_blind),
    Check(hacking.reward_exploited, ("grader_inverted", "reward_blind")),
    Check(policy_health.entropy_bonus),
    Check(policy_health.stale_weights),
    Check(policy_health.too_far_ahead, ("stale_weights",)),
    Check(policy_health.mismatch, ("stale_weights", "too_far_ahead")),
    Check(policy_health.clipping),
    Check(policy_health.learning_rate_high, (*_GRADER, "entropy_bonus", "stale_weights", "mismatch")),
    Check(policy_health.not_finite, ("learning_rate_high",)),
    Check(grading.no_format, ("learning_rate_high", "reward_exploited")),
    Check(lengths.minimum_length),
    Check(lengths.truncation, ("environments_fail", "minimum_length")),
    Check(tool_use.tools_unused),
    Check(tool_use.calls_malformed, ("truncation",)),
    Check(tool_use.tools_broken),
    Check(tool_use.turns_at_limit, ("tools_broken", "calls_malformed")),
    Check(groups.sampling_narrow),
    Check(policy_health.kl_too_strong),
    Check(policy_health.lost_to_rounding),
    Check(policy_health.learning_rate_low, ("clipping", "kl_too_strong", "lost_to_rounding")),
    Check(groups.too_easy, (*_GRADER, "reward_exploited", "sampling_narrow")),
    Check(groups.too_hard, (*_GRADER, "reward_exploited", *_SAMPLING, *_COLLAPSE)),
    Check(grading.reward_hacking, ("grader_inverted", "reward_blind", "reward_exploited", *_COLLAPSE)),
    Check(grading.overfitting, ("grader_inverted", "reward_blind", *_COLLAPSE)),
    Check(policy_health.entropy_collapse, (*_GRADER, *_HACKED, *_SAMPLING, *_COLLAPSE, "too_easy", "too_hard")),
    Check(groups.dead_groups, (*_GRADER, *_HACKED, *_SAMPLING, *_COLLAPSE, "too_easy", "too_hard", "entropy_collapse")),
    Check(policy_health.kl_growth, (*_GRADER, *_COLLAPSE)),
    Check(grading.format_only, ("reward_blind", "reward_exploited", "reward_hacking")),
    Check(lengths.length_explosion, (*_GRADER, *_COLLAPSE, *_HACKED)),
    Check(lengths.length_collapse, (*_GRADER, *_COLLAPSE, *_HACKED)),
    Check(policy_health.entropy_explosion, (*_GRADER, *_COLLAPSE, "reward_hacking")),
    Check(policy_health.oscillation, (*_GRADER, *_COLLAPSE)),
    Check(policy_health.gradient_spikes, (*_GRADER, *_COLLAPSE)),
    Check(
        policy_health.not_learning,
        (*_GRADER, *_SAMPLING, *_COLLAPSE, *_DEAD, "learning_rate_low", "kl_too_strong", "reward_exploited"),
    ),
    Check(groups.skipped_updates, (*_GRADER, *_HACKED, *_SAMPLING, *_COLLAPSE, *_DEAD)),
    Check(grading.held_out_higher),
    Check(throughput.grading_bound),
    Check(throughput.slow_link),
    Check(throughput.slowing),
    Check(throughput.memory_growth),
    Check(throughput.not_ahead_enough),
    Check(throughput.rollout_bound),
    Check(throughput.trainer_bound),
    Check(grading.evaluation_small),
)
"""Every check, in the order in which their findings are told if they are equally severe."""


_SUPERVISED = ("not_finite", "overfitting", "oscillation", "gradient_spikes", "slowing", "memory_growth")
"""Checks of a supervised stage, which has no rewards and samples nothing."""


def diagnose(case: Case) -> list[Finding]:
    """The findings on a run: first those that are on their own, the worst first; then what follows from others.

    A finding follows from the first of its possible causes that was found at least as a warning. Consequences keep
    their severity, and are behind their cause and everything severe or worth a warning that has no cause here.
    """
    findings_by_name = {
        check.name: replace(finding, check=check.name)
        for check in CHECKS
        if case.setting("sft") is None or check.name in _SUPERVISED
        if (finding := check.function(case)) is not None
    }
    causes = {name for name, finding in findings_by_name.items() if finding.severity != "note"}
    findings = [
        replace(findings_by_name[check.name], follows=next((name for name in check.follows if name in causes), None))
        for check in CHECKS
        if check.name in findings_by_name
    ]
    generation: dict[str, int] = {}
    for finding in findings:  # a cause is above its consequences in the table
        generation[finding.check] = 0 if finding.follows is None else generation[finding.follows] + 1
    is_note = {finding.check: finding.severity == "note" for finding in findings}
    return sorted(
        findings,
        key=lambda finding: (is_note[finding.check], generation[finding.check], SEVERITIES.index(finding.severity)),
    )


def check_names() -> Sequence[str]:
    """Names of all checks, in their order."""
    return [check.name for check in CHECKS]
