"""Files that a recipe names by a path beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from oncurve.episodes.settings import SANDBOX

INPUTS = (
    "model",
    "data.path",
    "data.template",
    "data.function",
    "data.task",
    "evaluation.data.path",
    "evaluation.data.template",
    "evaluation.data.function",
    "algorithm.function",
    "algorithm.advantage_function",
    "policy.deepspeed",
)
"""Keys whose value may be the path of something that is read. Rewards have one more, ``function``."""


def find_beside(tree: dict[str, Any], folder: Path) -> None:
    """Replace relative paths in the tree of a recipe by whole ones, where such a file lies in the recipe's folder.

    Other paths are left as they are: they are seen from the folder in which the command is run. So are all paths of a
    recipe that lies there itself.
    """
    if folder.resolve() == Path.cwd():
        return
    for key in INPUTS:
        *parents, last = key.split(".")
        section: Any = tree
        for parent in parents:
            section = cast("dict[str, Any]", section).get(parent) if isinstance(section, dict) else None
        _replace(section, last, folder)
    if isinstance(tree.get("rollouts"), dict):
        rollouts: dict[str, Any] = tree["rollouts"]
        _replace_all(rollouts, "tools", folder)
        _replace_all(rollouts, "environments", folder)
        _replace(rollouts, "agent", folder)
        if isinstance(rollouts.get("agent"), dict):
            _replace_all(rollouts["agent"], "command", folder)
    rewards = tree.get("rewards")
    for reward in cast("list[Any]", rewards) if isinstance(rewards, list) else ():
        _replace(reward, "function", folder)


def _replace_all(section: dict[str, Any], key: str, folder: Path) -> None:
    """Every value of a list or a mapping in a section."""
    value = section.get(key)
    if isinstance(value, dict):
        for name in cast("dict[str, Any]", value):
            _replace(value, name, folder)
    elif isinstance(value, (list, tuple)):
        values = dict(enumerate(cast("list[Any]", value)))
        for index in values:
            _replace(values, index, folder)
        section[key] = list(values.values())


def _replace(section: Any, key: str | int, folder: Path) -> None:
    """One value of a section, if it is a path or the ``file.py:name`` of a function."""
    if not isinstance(section, dict):
        return
    values = cast("dict[str | int, Any]", section)
    value = values.get(key)
    if not isinstance(value, str) or not value or value.startswith("~"):
        return
    before = SANDBOX if value.startswith(SANDBOX) else ""
    value = value.removeprefix(SANDBOX)
    location, colon, name = value.rpartition(":")
    if location.endswith(".py"):
        file, rest = location, colon + name
    else:
        file, rest = value, ""
    try:
        path = folder / file
        if not Path(file).is_absolute() and path.exists():
            values[key] = f"{before}{path.resolve()}{rest}"
    except (OSError, ValueError):  # too long or not a path at all, such as a whole prompt
        return
