"""The path of a recipe's run folder."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from oncurve.config.load import parse_tree, validate_tree
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


def read_run_config(text: str, overrides: Sequence[str] = (), *, source: str) -> Config:
    """The recipe that a run's ``config.yaml`` holds, as this version reads it. Raises ConfigError."""
    return validate_tree(of_this_version(parse_tree(text, overrides, source=source)), source=source)


GONE: Mapping[str, Mapping[str, Any]] = {
    "policy": {"liger": "auto", "train_only": []},
    "rollouts": {"kv_dtype": "auto"},
    "run": {"profile": False},
}
"""Keys of earlier versions, by section, with the values that changed nothing."""


def of_this_version(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded recipe without keys that are gone and that nobody had set.

    In one from before ``evaluation.split_seed``, the run's seed chose the held-out rows.
    """
    tree = {
        name: {key: value for key, value in section.items() if key not in idle or idle[key] != value}
        if (idle := GONE.get(name)) and isinstance(section, Mapping)
        else section
        for name, section in tree.items()
    }
    evaluation: Any = tree.get("evaluation")
    run: Any = tree.get("run")
    if not isinstance(evaluation, Mapping) or not isinstance(run, Mapping) or "split_seed" in evaluation:
        return dict(tree)
    return {**tree, "evaluation": {**evaluation, "split_seed": cast("Mapping[str, Any]", run).get("seed", 0)}}
