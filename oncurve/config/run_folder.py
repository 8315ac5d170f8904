"""The path of a recipe's run folder."""

from __future__ import annotations

import re
import time
from pathlib import Path

from oncurve.config.schema import Config
from oncurve.errors import ConfigError


def run_folder_path(config: Config) -> Path:
    """The folder of the run: its name, or one made of the model, the data and the time."""
    name = config.run.name
    if name is None:
        model = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(config.model).name)
        name = f"{model}-{config.data.type}-{config.algorithm.type}-{time.strftime('%Y%m%d-%H%M%S')}"
    if Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"run.name is {name!r}, which is not the name of one folder; put parents into run.folder")
    return Path(config.run.folder) / name
