"""Are times of day compared as times, with their half of the day?"""

from __future__ import annotations

import pytest

from oncurve.rewards.symbolic import grade


@pytest.mark.parametrize(
    ("answer", "reference", "is_right"),
    [
        ("3:00 PM", "3:00 AM", False),
        ("3 PM", "3 AM", False),
        ("3 p.m.", "3:00 PM", True),
        (r"3\text{ p.m.}", "3:00 PM", True),
        ("3:00 pm", "3:00 PM", True),
        ("15:00", "3:00 PM", True),
        ("3:00 PM", "15:00", True),
        ("15:00", "3:00 AM", False),
        ("3:00", "3:00 PM", True),  # the half may be missing, as a unit may
        ("3:30", "3:00 PM", False),
        ("12:00 AM", "12:00 PM", False),
        ("12 noon", "12:00 PM", True),
        ("12 midnight", "12:00 PM", False),
        ("7:30 in the evening", "7:30 PM", True),
        ("7:30 in the morning", "7:30 PM", False),
        ("7:30 PM on Monday", "7:30 AM on Monday", False),
        ("10:30", "10:30", True),
        ("10:30", "10:31", False),
        ("3 am", "3", True),
        ("25:00 PM", "1:00 PM", False),
    ],
)
def test_times(answer: str, reference: str, is_right: bool) -> None:
    assert (grade({"candidate": answer, "gold": reference}) == "right") is is_right
