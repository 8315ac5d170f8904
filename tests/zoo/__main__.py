"""The table of families in docs/models.md: `python -m tests.zoo --write` tries all of them and writes it.

All of them take about five minutes of one core.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- zoo -->", "<!-- end of zoo -->"
CELLS = ("trainer", "gradient", "sampler", "generate", "LoRA", "saved", "served", "LoRA served", "plan")


def grouped(rows: list[tuple[str, str, str, dict[str, str]]]) -> str:
    """The families of each pair of ways in one line, from name, ways and cells; what is not right is named behind."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, road, sampled, cells in rows:
        other = [f"{cell} {said.partition(':')[0]}" for cell, said in cells.items() if said != "right"]
        plain = name.replace(", ", " with ", 1)
        found.setdefault((road, sampled), []).append(f"{plain} ({'; '.join(other)})" if other else plain)
    lines = ["| trained with | sampled with | number | families |", "|---|---|---|---|"]
    for (road, sampled), names in sorted(found.items(), key=lambda one: -len(one[1])):
        lines.append(f"| {road or 'refused'} | {sampled or 'refused'} | {len(names)} | {', '.join(names)} |")
    return "\n".join(lines)


def main() -> None:
    """Try the families that are named, or all, and print the table; with --write it goes into the page."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from families import FAMILIES
    from tiny_models import make_tokenizer
    from transformers.utils import logging
    from trial import RIGHT, Trial, try_family

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    asked = [name for name in sys.argv[1:] if name != "--write"]
    lines = [f"| family | trained with | sampled with | {' | '.join(CELLS)} |", "|---" * (len(CELLS) + 3) + "|"]
    trials: list[Trial] = []
    for name in asked or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            trials.append(trial := try_family(name, Path(folder) / "trial", make_tokenizer, plans_here=True))
        said = [trial.cells.get(cell, "-") for cell in CELLS]
        cells = ["right" if one == RIGHT else one.partition(":")[0] for one in said]
        lines.append(f"| {name} | {trial.road} | {trial.sampled} | {' | '.join(cells)} |")
        print(lines[-1], *trial.faults, sep="\n", flush=True)
    if "--write" in sys.argv:
        rows = [(trial.name, trial.road, trial.sampled, trial.cells) for trial in trials]
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{grouped(rows)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    sys.exit(any(trial.faults for trial in trials))


if __name__ == "__main__":
    main()
