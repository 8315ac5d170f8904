"""Tables: of text, of Markdown and for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def aligned(rows: Iterable[Sequence[str]], *widths: int, indent: str = "") -> list[str]:
    """Lines of text with cells below each other: those of the first column at its left, others at their right.

    ``widths`` are the least ones, the last of them for all columns after it; a longer cell makes its column wider.

    >>> aligned([("", "loss"), ("first step", "2.5")], 6, 8)
    ['              loss', 'first step     2.5']
    """
    rows = list(rows)
    columns = enumerate(zip(*rows, strict=True))
    sizes = [max(widths[min(n, len(widths) - 1)], max(map(len, cells)) + 2 * (n > 0)) for n, cells in columns]
    right = [[cell.rjust(size) for cell, size in zip(row[1:], sizes[1:], strict=True)] for row in rows]
    return ["".join([indent, row[0].ljust(sizes[0]), *cells]) for row, cells in zip(rows, right, strict=True)]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; columns after the first stand at their right."""
    head, *rest = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return [head, "|---|" + "---:|" * (len(heads) - 1), *rest]


def terminal(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: bool = True,
    widths: Mapping[int, int] | None = None,
    **options: Any,
) -> Table:
    """A table as commands print it; columns after the first stand at their right unless ``right`` is false.

    Strings are shown as they are, brackets included. ``widths`` are those of columns by their index, ``options`` those
    of rich's table.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    name = Text(title, style="bold")
    made = Table(title=name, box=box.SIMPLE_HEAD, show_edge=False, title_justify="left", **options)
    for column, head in enumerate(heads):
        side, width = "right" if column and right else "left", (widths or {}).get(column)
        made.add_column(Text(head), justify=side, overflow="fold", width=width)
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


_BETWEEN = 3
"""Characters between two columns of a table in a terminal."""


def in_parts(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    width: int,
    *,
    num_fixed: int,
    right: bool = True,
) -> Iterator[Table]:
    """A table in parts, each with the ``num_fixed`` first columns, that a terminal shows without breaking a word."""
    rows = list(rows)
    texts = [[str(row[column]) for row in (heads, *rows)] for column in range(len(heads))]
    word_widths = [max((len(word) for text in column for word in text.split()), default=0) for column in texts]
    lines = [max((len(line) for text in column for line in text.split("\n")), default=0) for column in texts]
    left = list(range(num_fixed, len(heads)))
    while left:
        columns = [*range(num_fixed), left.pop(0)]
        while left and sum(word_widths[column] + _BETWEEN for column in (*columns, left[0])) <= width + 1:
            columns.append(left.pop(0))
        sizes = {column: word_widths[column] for column in columns}
        for _ in range(width + 1 - sum(sizes[column] + _BETWEEN for column in columns)):
            longest = max(columns, key=lambda column: lines[column] - sizes[column])
            sizes[longest] += lines[longest] > sizes[longest]
        widths = {at: sizes[column] for at, column in enumerate(columns)}
        parts = ([row[column] for column in columns] for row in rows)
        yield terminal(title, [heads[column] for column in columns], parts, right=right, widths=widths)
