"""The folder of a run, and the recipe that it recorded."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from oncurve import __version__
from oncurve.core.errors import ConfigError, DataError
from oncurve.observe.record import read_manifest
from oncurve.recipe.load import parse_tree, validate_tree
from oncurve.recipe.schema import Config


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
    """The recipe that a run's ``config.yaml`` holds; ``source`` is the path of that file.

    Raises ConfigError: for overrides as for those of a recipe, and for a recipe that this version does not read with
    the version that wrote it.
    """
    try:
        return validate_tree(parse_tree(text, overrides, source=source), source=source)
    except ConfigError:
        try:
            validate_tree(parse_tree(text, source=source), source=source)
        except ConfigError as error:
            raise ConfigError(
                f"{error}\nThe run was made by {_writer(Path(source).parent)}, and this is oncurve {__version__}. Read "
                f"the run with the version that made it, or train again"
            ) from None
        raise


def _writer(run: Path) -> str:
    """The version of oncurve that made a run, and its commit, as far as the run's manifest says."""
    try:
        manifest = read_manifest(run)
    except DataError:
        return "an unknown version of oncurve"
    code = manifest.get("code")
    commit = code.get("commit") if isinstance(code, Mapping) else None
    return f"oncurve {manifest.get('oncurve')}" + (f", commit {str(commit)[:12]}" if commit else "")


def flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of a recipe with dots in their keys; sections in a list by their index.

    >>> flat({"run": {"steps": 3}, "rewards": [{"type": "format"}]})
    [('run.steps', 3), ('rewards.0.type', 'format')]
    """
    if isinstance(tree, list) and any(isinstance(item, (Mapping, list)) for item in cast("list[Any]", tree)):
        tree = dict(enumerate(cast("list[Any]", tree)))
    if isinstance(tree, Mapping) and tree:
        sections = cast("Mapping[Any, Any]", tree)
        return [pair for key, value in sections.items() for pair in flat(value, f"{prefix}{key}.")]
    return [(prefix.rstrip("."), tree)]
