"""A finding about the data of a run, with the rows that it concerns and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NUM_ROWS_LISTED = 8
"""Row numbers printed per finding; the record holds all of them."""


@dataclass(frozen=True, slots=True)
class DataFinding:
    """One thing that is not as it should be.

    Example: ``DataFinding(severity="error", what="the prompt contains its own solution", rows=(4, 9),
    example="row 4: so 3 + 4 = 7", remedy="Correct data.columns.")``
    """

    severity: Literal["error", "warning"]
    """"error": a run on these data would not measure or teach what it claims."""
    what: str
    rows: tuple[int, ...]
    """Places of the rows concerned, counted from 0 in the order in which they were given."""
    example: str
    remedy: str
    takes_other_form: bool = False
    """The reward wants another form of answer than the template's."""

    def describe(self) -> str:
        """The finding in a few lines for the console."""
        rows = ", ".join(str(row) for row in self.rows[:NUM_ROWS_LISTED])
        more = ", ..." if len(self.rows) > NUM_ROWS_LISTED else ""
        count = f"{len(self.rows)} row{'' if len(self.rows) == 1 else 's'}"
        return f"{self.severity}: {self.what}: {count} ({rows}{more})\n  {self.example}\n  {self.remedy}"
