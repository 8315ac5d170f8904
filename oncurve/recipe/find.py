"""Finding the recipe that a command line names, and copying it."""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path

from oncurve.core.errors import ConfigError

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
        return path / MAIN
    variant = path.parent / f"{path.name}.yaml"
    if (path.parent / MAIN).is_file() and variant.is_file():
        return variant
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
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
