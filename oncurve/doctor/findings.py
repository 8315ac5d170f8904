"""A finding: its severity, what it is, the numbers and steps that show it, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["severe", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("severe", "warning", "note")
"""Worst first: severe spoils the run, a warning costs something, a note is worth knowing."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that a finding rests on.

    Example: ``Evidence("group/zero_signal_fraction", 0.94, (10, 12))``
    """

    key: str
    """A metric of the glossary, or a key of the recipe."""
    value: float | str
    """The mean of the metric over the steps, or the key's value."""
    steps: tuple[int, int] | None = None
    """First and last step, counted as steps done; None for what does not belong to steps."""

    def __str__(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else self.value
        if self.steps is None:
            return f"{self.key} = {value}"
        first, last = self.steps
        return f"{self.key} = {value} ({f'step {last}' if first == last else f'steps {first} to {last}'})"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a person should know about a run.

    Example: ``Finding(severity="severe", what="Every completion earns the same reward, so nothing can be learned",
    evidence=(Evidence("reward/std", 0.0, (1, 12)),), do="Look at the reward function.", check="reward_constant")``
    """

    severity: Severity
    what: str
    """The state of affairs, in one sentence without its full stop."""
    evidence: tuple[Evidence, ...]
    do: str
    """The remedy."""
    check: str = ""
    """Name of the check, filled in by the diagnosis."""
    follows: str | None = None
    """Name of the finding that probably causes this one; None if it is on its own."""

    def as_json(self) -> dict[str, Any]:
        """The finding as one JSON object."""
        evidence = [
            {"key": item.key, "value": item.value, "steps": None if item.steps is None else list(item.steps)}
            for item in self.evidence
        ]
        plain = {"check": self.check, "severity": self.severity, "what": self.what, "evidence": evidence}
        return {**plain, "do": self.do, "follows": self.follows}
