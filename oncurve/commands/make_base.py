"""The base of a task: random weights, and the recipe that trains them."""

from __future__ import annotations

from pathlib import Path

from oncurve.coldstart.untrained import write_untrained
from oncurve.errors import ConfigError
from oncurve.observe.record import refuse_existing

BASES = {
    "word_problems": "word_problems/base",
    "programs": "programs/base",
    "calculator": "calculator/base",
    "calculator_chains": "calculator/chained_base",
    "guess_number": "guess_number/base",
    "maze": "maze/base",
}
"""The recipe of each task's base."""
UNTRAINED = "untrained"
"""Folder of the random weights, in that of the run."""


def prepare_base(output: Path, *, task: str, seed: int) -> tuple[str, list[str]]:
    """Write the random weights; the recipe that trains them, and what it is told.

    Raises ConfigError for a task without a recipe, and for a folder that holds a run already.
    """
    if task not in BASES:
        raise ConfigError(f"--task {task}: there is no such task. Use one of {', '.join(BASES)}")
    refuse_existing(output)
    start = write_untrained(output / UNTRAINED, task, seed=seed)
    return BASES[task], [f"model={start}", f"run.folder={output.parent}", f"run.name={output.name}", f"run.seed={seed}"]
