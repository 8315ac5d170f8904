"""The generated tables of the page for people who come from TRL."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oncurve.convert.algorithms import SEQUENCE_LEVEL, TOKEN_LEVEL
from oncurve.convert.options import Fate, Option, older, raw_table, table, trl_version

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def options_markdown() -> str:
    """The tables of all options, by what becomes of them."""
    parts = [
        "### Taken over\n",
        *_taken(),
        "\n### Without meaning here\n",
        *_grouped("nothing"),
        "\n### Lost\n",
        "A script that sets one of these to anything but its default stops, with all of them in one message, unless "
        "each is accepted by name.\n",
        *_grouped("unsupported", changes_learning=True),
        "\n### Not done, and said in a line\n",
        "The model that comes out is the same.\n",
        *_grouped("unsupported", changes_learning=False),
        "\n### Names that TRL had before\n",
        *_older(),
        "\n### Defaults that changed\n",
        *_history(),
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


def _grouped(fate: Fate, *, changes_learning: bool | None = None) -> Iterator[str]:
    yield "| why | options |"
    yield "|---|---|"
    reasons: dict[str, list[str]] = {}
    for option in table().values():
        if option.fate == fate and changes_learning in (None, option.changes_learning):
            reasons.setdefault(option.why, []).append(option.name)
    for why, names in reasons.items():
        yield f"| {why} | {', '.join(f'`{name}`' for name in names)} |"


def _older() -> Iterator[str]:
    yield "| older name | now | last in TRL |"
    yield "|---|---|---|"
    for name, old in older().items():
        now = f"`{old.now}`" if old.now else f"`{old.to}`" if old.to else old.why
        yield f"| `{name}` | {now}{'; ' + old.how if old.how else ''} | {old.until or '-'} |"


def _history() -> Iterator[str]:
    yield "| option | its default, from which version of TRL |"
    yield "|---|---|"
    for name, history in raw_table()["history"].items():
        said = ", ".join(f"`{value}` from {since}" for since, value in history.items())
        yield f"| `{name}` | {said} |"


def _losses() -> Iterator[str]:
    yield "| loss_type | importance_sampling_level | algorithm.type | algorithm.loss | algorithm.normalize |"
    yield "|---|---|---|---|---|"
    for level, rows in (("token", TOKEN_LEVEL), ("sequence", SEQUENCE_LEVEL)):
        for kind, (row, chosen) in rows.items():
            yield f"| `{kind}` | {level} | `{row}` | `{chosen['loss']}` | `{chosen['normalize']}` |"


def beside_markdown() -> str:
    """What the same script gives under TRL and here, from the results of benchmarks/trl_beside.py."""
    found = json.loads((RESULTS / "trl_beside.json").read_text(encoding="utf-8"))
    lines = [
        f"The same script, model and rows, with the completions of every step forced to be the same "
        f"({found['steps']} steps of {found['completions_per_step']} completions, float32): the largest difference "
        f"between TRL {trl_version()} and `oncurve trl` in any step, beside the largest value. "
        f"`python benchmarks/trl_beside.py` makes it.\n",
        "| loss_type | beta | reward | loss | norm of the gradient | learning rate |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["losses"]:
        cells = [_difference(row[key]) for key in ("reward", "loss", "grad_norm", "learning_rate")]
        lines.append(f"| `{row['loss_type']}` | {row['beta']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _difference(quantity: dict[str, Any]) -> str:
    return f"{quantity['largest_difference']:.0e} of {max(abs(value) for value in quantity['trl']):.2g}"


PARTS = {"options": options_markdown, "beside": beside_markdown}
"""The generated parts of the page, by their markers."""


def filled(text: str) -> str:
    """The page with its generated parts as they are now."""
    for name, make in PARTS.items():
        before, rest = text.split(f"<!-- {name}:begin -->\n")
        _, after = rest.split(f"<!-- {name}:end -->")
        text = f"{before}<!-- {name}:begin -->\n{make()}\n<!-- {name}:end -->{after}"
    return text


def main() -> None:
    """Write the generated parts into the page that is named."""
    page = Path(sys.argv[1])
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
