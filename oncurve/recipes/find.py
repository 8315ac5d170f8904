"""Where is the recipe that a command line names?"""

from __future__ import annotations

import difflib
from pathlib import Path

from oncurve.errors import ConfigError

SHIPPED = Path(__file__).resolve().parent


def shipped_recipes() -> dict[str, Path]:
    """Names and files of the recipes in this package."""
    return {path.parent.name: path for path in sorted(SHIPPED.glob("*/recipe.yaml"))}


def find_recipe(name: str) -> Path:
    """A file, a folder with a ``recipe.yaml``, or the name of a recipe in the package, in this order.

    Raises ConfigError with the nearest name if there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
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
