"""Findings while a run continues: the same checks after every step, each finding reported once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oncurve.core.records import Group, Reward
from oncurve.doctor.case import SEVERITIES, Case, Finding
from oncurve.doctor.diagnose import diagnose

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
