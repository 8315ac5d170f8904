"""Times of day in answers: 3:00 PM is 15:00, and is not 3:00 AM."""

from __future__ import annotations

import re

_HALF = re.compile(
    r"(?<=\d)\s*(?:\\text\s*\{)?\s*(?:(?P<letter>[ap])\.?\s?m(?![a-zA-Z])"
    r"|(?:in the|at)\s+(?P<word>morning|afternoon|evening|night)|(?P<twelve>noon|midnight))",
    re.IGNORECASE,
)
_TIME = re.compile(r"(?:at\s+)?(?P<hour>\d{1,2})(?:\s*:\s*(?P<minute>\d{2})(?:\s*:\s*(?P<second>\d{2}))?)?")


def same_time(candidate: str, gold: str) -> bool | None:
    """Whether two tidied answers are the same time of day; None where that is not what they are about.

    A time that does not say its half of the day may mean either, as a number without a unit may.

    >>> [same_time(answer, "3:00 PM") for answer in ("3 p.m.", "15:00", "3:00 AM", "3:00", "three")]
    [True, True, False, True, None]
    """
    halves = [_half(text) for text in (candidate, gold)]
    if not any(halves):
        return None
    times = [_seconds(text, half) for text, half in zip((candidate, gold), halves, strict=True)]
    if None in halves:
        bare = times[halves.index(None)]
        other = times[1 - halves.index(None)]
        if bare is None or other is None:
            return None
        return bare == other or (bare < 43_200 and bare % 43_200 == other % 43_200)
    if halves[0] != halves[1] and None not in times:
        return False
    if None in times:  # a time inside of something else: the other rules compare that
        return False if halves[0] != halves[1] else None
    return times[0] == times[1]


def _half(text: str) -> str | None:
    """Which half of the day a text names: "a" or "p"."""
    found = _HALF.search(text)
    if found is None:
        return None
    word = (found["letter"] or found["word"] or found["twelve"]).lower()
    return "a" if word in ("a", "morning", "midnight") else "p"


def _seconds(text: str, half: str | None) -> int | None:
    """The seconds since midnight of a text that is a time and nothing else."""
    bare = _HALF.sub("", text).strip(" .}")
    found = _TIME.fullmatch(bare)
    if found is None or (half is None and found["minute"] is None):
        return None
    hour, minute, second = int(found["hour"]), int(found["minute"] or 0), int(found["second"] or 0)
    if hour > (12 if half else 23) or (half and hour == 0) or minute > 59 or second > 59:
        return None
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return hour * 3600 + minute * 60 + second
