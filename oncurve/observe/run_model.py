"""The model that a run's folder stands for, wherever a command takes a model."""

from __future__ import annotations

import os
from pathlib import Path

from oncurve.errors import CheckpointError
from oncurve.observe.record import METRICS

MODEL = "model"
"""Folder of a run's final model, in the run's folder."""


def is_run(path: str | Path) -> bool:
    """Whether a folder is that of a run, finished or not."""
    folder = Path(path).expanduser()
    # not Path.is_file, which raises where a folder may not be read
    measured, told, configured = (os.path.isfile(folder / name) for name in (METRICS, "status.json", "config.yaml"))
    return measured or (told and configured)


def resolve_model(name: str) -> str:
    """The final model of a run's folder; any other name as it is.

    Raises CheckpointError for a run that has no final model yet.
    """
    if not is_run(name):
        return name
    run = Path(name).expanduser()
    if not (run / MODEL).is_dir():
        raise CheckpointError(
            f"{name} is a run without a final model: it has not finished. `oncurve resume {name}` finishes it; until "
            f"then, name one of its checkpoints in {run / 'checkpoints'}"
        )
    return str(run / MODEL)
