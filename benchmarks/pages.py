"""How does what a record says come into a page? Between the markers of its name, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """The text of a page with each part between the markers of its name.

    Raises ValueError for markers that are not there once.
    """
    text = page.read_text(encoding="utf-8")
    for name, content in parts.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, content=content: match[1] + content + match[2], text)
        if count != 1:
            raise ValueError(f"{page.name} needs the markers of {name!r} once and has them {count} times")
    return text
