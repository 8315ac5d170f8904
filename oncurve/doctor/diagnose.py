"""The list of checks, in the order in which findings are reported: causes before consequences; at the end of a run, and
while it continues, after every step, each finding reported once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oncurve.core.records import Group, Reward
from oncurve.doctor import grading, hacking, policy_health, rollouts, throughput
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
    Check(rollouts.environments_fail),
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
    Check(rollouts.minimum_length),
    Check(rollouts.truncation, ("environments_fail", "minimum_length")),
    Check(rollouts.tools_unused),
    Check(rollouts.calls_malformed, ("truncation",)),
    Check(rollouts.tools_broken),
    Check(rollouts.turns_at_limit, ("tools_broken", "calls_malformed")),
    Check(rollouts.sampling_narrow),
    Check(policy_health.kl_too_strong),
    Check(policy_health.lost_to_rounding),
    Check(policy_health.learning_rate_low, ("clipping", "kl_too_strong", "lost_to_rounding")),
    Check(rollouts.too_easy, (*_GRADER, "reward_exploited", "sampling_narrow")),
    Check(rollouts.too_hard, (*_GRADER, "reward_exploited", *_SAMPLING, *_COLLAPSE)),
    Check(grading.reward_hacking, ("grader_inverted", "reward_blind", "reward_exploited", *_COLLAPSE)),
    Check(grading.overfitting, ("grader_inverted", "reward_blind", *_COLLAPSE)),
    Check(policy_health.entropy_collapse, (*_GRADER, *_HACKED, *_SAMPLING, *_COLLAPSE, "too_easy", "too_hard")),
    Check(
        rollouts.dead_groups, (*_GRADER, *_HACKED, *_SAMPLING, *_COLLAPSE, "too_easy", "too_hard", "entropy_collapse")
    ),
    Check(policy_health.kl_growth, (*_GRADER, *_COLLAPSE)),
    Check(grading.format_only, ("reward_blind", "reward_exploited", "reward_hacking")),
    Check(rollouts.length_explosion, (*_GRADER, *_COLLAPSE, *_HACKED)),
    Check(rollouts.length_collapse, (*_GRADER, *_COLLAPSE, *_HACKED)),
    Check(policy_health.entropy_explosion, (*_GRADER, *_COLLAPSE, "reward_hacking")),
    Check(policy_health.oscillation, (*_GRADER, *_COLLAPSE)),
    Check(policy_health.gradient_spikes, (*_GRADER, *_COLLAPSE)),
    Check(
        policy_health.not_learning,
        (*_GRADER, *_SAMPLING, *_COLLAPSE, *_DEAD, "learning_rate_low", "kl_too_strong", "reward_exploited"),
    ),
    Check(rollouts.skipped_updates, (*_GRADER, *_HACKED, *_SAMPLING, *_COLLAPSE, *_DEAD)),
    Check(grading.validation_higher),
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


MIN_STEPS = 4
"""Alarms are silent before so many steps: the first batches are small and the learning rate warms up."""
FIRST_ROWS, LAST_ROWS = 20, 300
"""Numbers of first and last rows of a long run that are looked at."""
NUM_EXAMPLES = 512
"""The grader is judged by so many of the last completions that were handed in."""
QUIET_STEPS = 5
"""After so many steps without a finding its excursion is over, and the next one is reported again."""


class Alarms:
    """Findings of a run as it goes, each told once per excursion.

    Only what is on its own is reported, and nothing that is a mere note. A check that stays silent for
    ``QUIET_STEPS`` steps, or whose finding gets worse, may speak again.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """``config`` is the resolved recipe as plain data; without it, checks that need a setting stay silent."""
        self._config = config or {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._first: list[Mapping[str, Any]] = []
        self._examples: deque[Mapping[str, Any]] = deque(maxlen=NUM_EXAMPLES)
        self._reported: dict[str, tuple[int, int]] = {}  # check -> (last step seen, how bad)

    def observe(
        self, step: int, metrics: Mapping[str, float], *, examples: Iterable[Mapping[str, Any]] = ()
    ) -> list[Finding]:
        """The findings that are new with this step; ``step`` counts steps done, 0 being the model before training.

        With ``examples`` (see ``examples_of``) the grader is judged as well.
        """
        dated: list[Mapping[str, Any]] = [{**example, "step": step} for example in examples]
        if self._first:
            self._examples.extend(dated)
        else:
            self._first = dated[:NUM_EXAMPLES]
        self._rows.setdefault(step, {"step": step}).update({**metrics, "step": step})
        if step < MIN_STEPS:
            return []
        self._forget_the_middle()
        new: list[Finding] = []
        rows = [self._rows[known] for known in sorted(self._rows)]
        for finding in diagnose(Case(rows, config=self._config, examples=(*self._first, *self._examples))):
            if finding.severity == "note" or finding.follows is not None:
                continue
            worse = SEVERITIES.index(finding.severity)
            last, before = self._reported.get(finding.check, (step - QUIET_STEPS - 1, len(SEVERITIES)))
            if step - last > QUIET_STEPS or worse < before:
                new.append(finding)
                before = worse
            self._reported[finding.check] = step, min(worse, before)
        return new

    def _forget_the_middle(self) -> None:
        steps = sorted(self._rows)
        for step in steps[FIRST_ROWS:-LAST_ROWS]:
            del self._rows[step]


class Watch:
    """The alarms of a run, fed by its loop."""

    def __init__(self, config: Mapping[str, Any], rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """``rows`` are the metrics of steps that were done before; what they say has been told."""
        self._alarms = Alarms(config)
        self._examples: list[dict[str, Any]] = []
        for row in rows:
            self._alarms.observe(int(row["step"]), row)

    def see(self, groups: Sequence[Group], graded: Sequence[Sequence[Reward]]) -> None:
        """Take in the completions and rewards of a step."""
        self._examples = examples_of(groups, graded)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """The warnings that a finished step gives rise to."""
        return [alarm_text(finding) for finding in self._alarms.observe(step, metrics, examples=self._examples)]


def examples_of(groups: Sequence[Group], rewards: Sequence[Sequence[Reward]]) -> list[dict[str, Any]]:
    """The graded completions of a step as the doctor reads them."""
    return [
        {
            "completion": completion.text,
            "prompt": group.prompt.text,
            "answer": group.prompt.row.get("answer"),
            "reward": reward.value,
        }
        for group, row in zip(groups, rewards, strict=True)
        for completion, reward in zip(group.completions, row, strict=True)
    ]


def alarm_text(finding: Finding) -> str:
    """One finding as a line or two for the terminal and the log."""
    evidence = "; ".join(str(item) for item in finding.evidence[:2])
    return f"{finding.severity.upper()}: {finding.what} [{evidence}]. {finding.do}"
