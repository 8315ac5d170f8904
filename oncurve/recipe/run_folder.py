"""The folder of a run, and the recipe that it recorded."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from oncurve.core.errors import ConfigError
from oncurve.recipe.load import apply_overrides, parse_tree, validate_tree
from oncurve.recipe.schema import UNREAD_IN_EVALUATION, Config


def run_folder_path(config: Config) -> Path:
    """The folder of the run: its name, or one made of the model, the data and the time."""
    name = config.run.name
    if name is None:
        model = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(config.model).name)
        first = name = f"{model}-{config.data.type}-{config.algorithm.type}-{time.strftime('%Y%m%d-%H%M%S')}"
        others = itertools.count(2)
        while (Path(config.run.folder) / name).exists():  # begun in the same second
            name = f"{first}-{next(others)}"
    if Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"run.name is {name!r}, which is not the name of one folder; put parents into run.folder")
    return Path(config.run.folder) / name


def read_run_config(text: str, overrides: Sequence[str] = (), *, source: str) -> Config:
    """The recipe that a run's ``config.yaml`` holds, as this version reads it. Raises ConfigError."""
    recorded = as_of_today(parse_tree(text, source=source))
    return validate_tree(apply_overrides(recorded, overrides), source=source)


GONE = {
    "policy": ("liger", "train_only"),
    "rollouts": ("kv_dtype",),
    "rollouts.deltas": ("relay",),
    "run": ("profile", "track_aliases"),
}
"""Keys that recorded recipes have and recipes have no more."""
CHANGES: Mapping[str, Any] = {"train_only": [], "kv_dtype": "auto"}
"""Removed keys that changed what a run learns, with the value that changed nothing: a run with another is refused."""


def as_of_today(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded recipe in today's keys.

    Before ``evaluation.split_seed`` the run's seed chose the held-out rows; before ``data.chat`` could be auto, prompts
    were plain text unless it was set; keys of ``evaluation.data`` that nothing read could have any value.
    """
    recorded: dict[str, Any] = dict(tree)
    for place, gone in GONE.items():
        *outer, name = place.split(".")
        holder: Any = recorded
        for part in outer:
            holder = holder.get(part) if isinstance(holder, dict) else None
        section = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(section, Mapping):
            known = cast("Mapping[str, Any]", section)
            holder[name] = {
                key: value for key, value in known.items() if key not in gone or CHANGES.get(key, value) != value
            }
    if isinstance(recorded.get("data"), Mapping):
        recorded["data"] = {"chat": False, **recorded["data"]}
    evaluation, run = recorded.get("evaluation"), recorded.get("run")
    if isinstance(evaluation, Mapping) and isinstance(evaluation.get("data"), Mapping):
        trained = recorded["data"] if isinstance(recorded.get("data"), Mapping) else {}
        read = {
            key: value
            for key, value in evaluation["data"].items()
            if key not in UNREAD_IN_EVALUATION or value == trained.get(key)
        }
        evaluation = {**evaluation, "data": {"chat": False, **read}}
        recorded["evaluation"] = evaluation
    if isinstance(evaluation, Mapping) and isinstance(run, Mapping):
        seed = cast("Mapping[str, Any]", run).get("seed", 0)
        recorded["evaluation"] = {"split_seed": seed, **cast("Mapping[str, Any]", evaluation)}
    return recorded


def flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of a recipe with dots in their keys; sections in a list by their place.

    >>> flat({"run": {"steps": 3}, "rewards": [{"type": "format"}]})
    [('run.steps', 3), ('rewards.0.type', 'format')]
    """
    if isinstance(tree, list) and any(isinstance(item, (Mapping, list)) for item in cast("list[Any]", tree)):
        tree = dict(enumerate(cast("list[Any]", tree)))
    if isinstance(tree, Mapping) and tree:
        sections = cast("Mapping[Any, Any]", tree)
        return [pair for key, value in sections.items() for pair in flat(value, f"{prefix}{key}.")]
    return [(prefix.rstrip("."), tree)]
