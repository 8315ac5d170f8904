"""Files of recipes: the one that a command line names, its copy, and those that a recipe names beside it."""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path
from typing import Any, cast

from oncurve.core.errors import ConfigError
from oncurve.episodes.settings import SANDBOX

SHIPPED = Path(__file__).resolve().parents[1] / "recipes"
MAIN = "recipe.yaml"


def shipped_recipes() -> dict[str, Path]:
    """Names and files of the recipes in this package: ``name``, and ``name/variant`` for the others of its folder."""
    recipes: dict[str, Path] = {}
    for path in sorted(SHIPPED.glob(f"*/{MAIN}")):
        name = path.parent.name
        recipes[name] = path
        recipes |= {f"{name}/{other.stem}": other for other in sorted(path.parent.glob("*.yaml")) if other != path}
    return recipes


def find_recipe(name: str) -> Path:
    """A file, a folder with a ``recipe.yaml``, a variant in such a folder, or the same of the package, in this order.

    ``math_r1_zero`` is a folder's ``recipe.yaml`` and ``math_r1_zero/tiny`` its ``tiny.yaml``.

    Raises ConfigError with the nearest name if there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (path / MAIN).is_file():
        if (path / "config.yaml").is_file():
            raise ConfigError(
                f"{name}: is a run, and {path / MAIN} has none of the settings that were typed for it. Continue it "
                f"with `oncurve resume {name}`, or name its whole recipe, {path / 'config.yaml'}"
            )
        return path / MAIN
    variant = path.parent / f"{path.name}.yaml"
    if (path.parent / MAIN).is_file() and variant.is_file():
        return variant
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    if "=" in name:
        raise ConfigError(f"{name}: is a setting, and stands where the recipe belongs. Name the recipe first")
    close = difflib.get_close_matches(name, shipped, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"{name}: no such recipe, neither a file nor one of the package's.{hint} `oncurve recipe list` shows those"
    )


def described_recipes() -> list[tuple[str, str]]:
    """Name and first comment line of every recipe in the package."""
    described: list[tuple[str, str]] = []
    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        described.append((name, first.removeprefix("#").strip()))
    return described


def copy_recipe(name: str, folder: Path | None = None) -> Path:
    """Put a recipe of the package with all files beside it into a folder of your own; that folder.

    Without ``folder`` it is one of the recipe's name in the current folder. A variant brings its whole recipe along.

    Raises ConfigError if there is no such recipe, or if the folder exists already.
    """
    shipped = shipped_recipes()
    if name not in shipped:
        close = difflib.get_close_matches(name, shipped, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"{name}: no recipe of the package. {hint}`oncurve recipe list` shows those")
    source = shipped[name].parent
    target = folder or Path(source.name)
    if target.exists():
        raise ConfigError(f"{target} exists already, and nothing in it is overwritten. Name another folder")
    try:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error}") from None
    return target


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
