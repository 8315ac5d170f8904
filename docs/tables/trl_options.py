"""The generated tables of the page for people who come from TRL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from oncurve.convert.algorithms import SEQUENCE_LEVEL, TOKEN_LEVEL
from oncurve.convert.options import Fate, Option, older, table


def options_markdown() -> str:
    """The tables of all options, by what becomes of them."""
    parts = [
        "### Taken over\n",
        *_taken(),
        "\n### Without meaning here\n",
        *_grouped("nothing"),
        "\n### Reported when it is set\n",
        *_grouped("unsupported"),
        "\n### Names that TRL had before\n",
        *_older(),
        "\n### Losses\n",
        *_losses(),
    ]
    return "\n".join(parts)


def _taken() -> Iterator[str]:
    yield "| GRPOConfig | its default | recipe | how |"
    yield "|---|---|---|---|"
    taken = sorted((o for o in table().values() if o.fate in ("direct", "computed")), key=lambda option: option.name)
    for option in taken:
        key = f"`{option.to}`" if option.to else "-"
        yield f"| `{option.name}` | {_shown(option)} | {key} | {option.why} |"


def _shown(option: Option) -> str:
    return "-" if option.default is None else f"`{option.default}`"


def _grouped(fate: Fate) -> Iterator[str]:
    yield "| why | options |"
    yield "|---|---|"
    reasons: dict[str, list[str]] = {}
    for option in table().values():
        if option.fate == fate:
            reasons.setdefault(option.why, []).append(option.name)
    for why, names in reasons.items():
        yield f"| {why} | {', '.join(f'`{name}`' for name in names)} |"


def _older() -> Iterator[str]:
    yield "| older name | now |"
    yield "|---|---|"
    for name, old in older().items():
        now = f"`{old.now}`" if old.now else f"`{old.to}`" if old.to else old.why
        yield f"| `{name}` | {now}{'; ' + old.how if old.how else ''} |"


def _losses() -> Iterator[str]:
    yield "| loss_type | importance_sampling_level | algorithm.type | algorithm.loss | algorithm.normalize |"
    yield "|---|---|---|---|---|"
    for level, rows in (("token", TOKEN_LEVEL), ("sequence", SEQUENCE_LEVEL)):
        for kind, (row, chosen) in rows.items():
            yield f"| `{kind}` | {level} | `{row}` | `{chosen['loss']}` | `{chosen['normalize']}` |"


def main() -> None:
    """Write the tables into the page that is named, between its markers."""
    page = Path(sys.argv[1])
    before, rest = page.read_text(encoding="utf-8").split("<!-- options:begin -->\n")
    _, after = rest.split("<!-- options:end -->")
    filled = f"{before}<!-- options:begin -->\n{options_markdown()}\n<!-- options:end -->{after}"
    page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
