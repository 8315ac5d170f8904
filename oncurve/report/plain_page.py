"""Pages of HTML without scripts: what a command found, laid out once, in the style of the reports."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from oncurve.core.records import html_table
from oncurve.report.page import fill, policy, read_part


def plain_page(title: str, lead: str, sections: Iterable[str]) -> str:
    """The page; ``sections`` are markup, what they say is escaped already."""
    css = read_part("style.css") + read_part("plain.css")
    filled = {
        "TITLE": html.escape(title),
        "POLICY": policy(css),
        "STYLE": css,
        "LEAD": html.escape(lead),
        "SECTIONS": "".join(sections),
    }
    return fill(read_part("head.html") + read_part("plain.html"), filled)


def section(title: str, inside: str) -> str:
    """Markup under a heading."""
    return f"<section><h2>{html.escape(title)}</h2>{inside or '<p>none</p>'}</section>"


def tiles(numbers: Iterable[tuple[str, str]]) -> str:
    """Names and values in a row of boxes."""
    inside = "".join(
        f'<div class="one"><b>{html.escape(value)}</b>{html.escape(name)}</div>' for name, value in numbers
    )
    return f'<div class="row">{inside}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; nothing without rows."""
    rows = list(rows)
    return f'<div class="wide">{html_table(heads, rows, is_styled=False)}</div>' if rows else ""
