"""Words of messages: numbers with their nouns, lists of names, and the nearest of some names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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
