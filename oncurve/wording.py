"""Words of messages: numbers as people read them, with their nouns, lists of names, and the nearest of some names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches

ROUNDING = 1e-12
"""Smaller values are rounding errors and shown as 0."""


def number(value: float) -> str:
    """A number in about three digits, thousands separated.

    >>> number(0.12345), number(1234.5), number(1e-17)
    ('0.123', '1,234', '0')
    """
    if abs(value) < ROUNDING:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def whole(value: float) -> str:
    """A number without decimals, thousands separated."""
    return f"{value:,.0f}"


def percent(value: float) -> str:
    """A share.

    >>> percent(0.1234)
    '12.3%'
    """
    return f"{value:.1%}"


def points(value: float) -> str:
    """A share in hundredths, without their name.

    >>> points(0.1234)
    '12.3'
    """
    return f"{100 * value:.1f}"


def decimals(value: float) -> str:
    """A mean reward or a correlation; a dash for NaN.

    >>> decimals(0.5), decimals(float("nan"))
    ('0.500', '-')
    """
    return "-" if math.isnan(value) else f"{value:.3f}"


def signed_points(value: float) -> str:
    """A difference of shares in points.

    >>> signed_points(0.05)
    '+5.0'
    """
    return f"{100 * value:+.1f}"


def signed_decimals(value: float) -> str:
    """A difference of mean rewards; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:+.3f}"


def interval(low: float, high: float, form: Callable[[float], str]) -> str:
    """Both ends of an interval in brackets.

    >>> interval(0.1, 0.25, points)
    '[10.0, 25.0]'
    """
    return f"[{form(low)}, {form(high)}]"


def p_text(value: float, *, before: str = "") -> str:
    """The chance of a test; with what stands ``before``, such as "p".

    >>> p_text(0.25), p_text(0.25, before="p"), p_text(0.0, before="p")
    ('0.2500', 'p = 0.2500', 'p < 0.0001')
    """
    is_small = value < 1e-4
    text = "0.0001" if is_small else f"{value:.4f}"
    sign = "<" if is_small else "="
    return f"{before} {sign} {text}" if before else f"{'<' * is_small}{text}"


def duration(seconds: float) -> str:
    """A time as a person writes it.

    >>> duration(7.2), duration(75.0), duration(10860.0)
    ('7s', '1:15', '3:01:00')
    """
    whole_seconds = round(seconds)
    hours, minutes, rest = whole_seconds // 3600, whole_seconds // 60 % 60, whole_seconds % 60
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest}s"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "step"), counted(2000, "row")
    ('1 step', '2,000 rows')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The nearest of some names as a sentence with a space behind it; empty if none is near.

    >>> did_you_mean("tran", ["train", "test"])
    "Did you mean 'train'? "
    """
    known = list(names)
    near = get_close_matches(name, known, n=1) or [
        candidate for candidate in known if len(name) > 2 and candidate.startswith(name)
    ]
    return f"Did you mean {near[0]!r}? " if near else ""


def listed(names: Iterable[str]) -> str:
    """Names in quotes with commas between them; "nothing" if there are none."""
    return ", ".join(repr(name) for name in names) or "nothing"


def shortened(text: str, characters: int = 120) -> str:
    """A text on one line, cut where it is longer than so many characters.

    >>> shortened("two\\nlines of text", 12)
    'two lines...'
    """
    flat = " ".join(text.split())
    return flat if len(flat) <= characters else f"{flat[: characters - 3]}..."
