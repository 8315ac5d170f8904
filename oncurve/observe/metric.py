"""One number of a run, with its unit and meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from oncurve.wording import number, percent


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the glossary.

    Example: ``Metric("reward/mean", "reward", "mean over the graded completions of the step", "rises, noisily")``
    """

    key: str
    """``group/name_unit`` in lower case; ``<name>`` stands for any one name, as in ``reward/<part>``."""
    unit: str
    """Unit; "fraction" is a share in [0, 1]."""
    meaning: str
    """The measured quantity, and over what."""
    healthy: str
    """Values in a run that learns, or what to suspect otherwise; "-" where no value is better."""
    label: str = ""
    """Its name in tables for people; empty for one that stands in none."""

    @property
    def is_pattern(self) -> bool:
        """The entry stands for a family of keys."""
        return "<" in self.key

    def text(self, value: float) -> str:
        """A value as tables show it."""
        return percent(value) if self.unit == "fraction" else number(value)

    def matches(self, key: str) -> bool:
        """Whether this entry explains the key."""
        return _pattern(self.key).fullmatch(key) is not None


@cache
def _pattern(key: str) -> re.Pattern[str]:
    pieces = re.split(r"<[^>]+>", key)
    return re.compile("[^/\\s]+".join(re.escape(piece) for piece in pieces))
