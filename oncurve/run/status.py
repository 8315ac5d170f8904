"""The state of a run in its folder: absent, begun or finished."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml

from oncurve.observe.record import METRICS
from oncurve.run.checkpoint_manifest import checkpoints_in

Progress = Literal["absent", "unbegun", "begun", "finished"]
_BEFORE_ITS_FIRST_ROW = ("recipe.yaml", "config.yaml", "manifest.json", "log.txt", "status.json", METRICS)


def progress_of(path: Path) -> Progress:
    """``unbegun`` is a folder whose run died before it had a record or a checkpoint: there is nothing to lose."""
    if not (path / METRICS).is_file():
        return "absent"
    found = checkpoints_in(path / "checkpoints")
    if not found:
        return "begun" if (path / METRICS).stat().st_size or (path / "evaluations").exists() else "unbegun"
    is_measured = (path / "evaluations" / "trained.json").is_file() and (path / "model").is_dir()
    return "finished" if is_measured and found[-1][0] >= _asked_steps(path) else "begun"


def _asked_steps(path: Path) -> float:
    """The steps that the run's recipe asks for; without end if it cannot be read, for `resume` to say what is wrong."""
    try:
        return int(yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))["run"]["steps"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return float("inf")


def clear_unbegun(path: Path) -> None:
    """Remove what such a run left, for it to be begun again."""
    for name in _BEFORE_ITS_FIRST_ROW:
        (path / name).unlink(missing_ok=True)
