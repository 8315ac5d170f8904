"""`oncurve convert`: from options of another trainer to a recipe and a report of what it leaves out."""

from __future__ import annotations

from pathlib import Path

from oncurve.convert.options import OptionOutcome, trl_version
from oncurve.convert.options_file import read_options
from oncurve.convert.recipe_file import write_recipe
from oncurve.convert.trl import convert
from oncurve.errors import ConfigError

LARGEST = 10_000_000
"""Bytes of a script or a file of options."""


def convert_file(
    path: Path, output: Path | None, *, processes: int = 1, rows: int | None = None, overwrite: bool = False
) -> tuple[str, bool]:
    """Write the recipe of a file of options; the report for people, and whether everything was taken over.

    Without an output the report is the recipe itself. Raises ConfigError for a file that cannot be read and for an
    output that exists.
    """
    draft = convert(read_file(path), processes=processes, rows=rows)
    said = f"--processes {processes}" + ("" if rows is None else f" --rows {rows}")
    head = f"Converted from {path.name}, written for TRL {trl_version()}, {said}."
    return write_recipe(draft, head, output, overwrite=overwrite)


def read_file(path: Path) -> OptionOutcome:
    """What a file says, by its ending.

    Raises ConfigError for one that cannot be read.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"{path}: is larger than {LARGEST:,} bytes, which no script is")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Give a training script, or a YAML or JSON of options") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if path.suffix in (".yaml", ".yml", ".json"):
        return read_options(text, path.name)
    raise ConfigError(f"{path}: is neither .yaml, .yml nor .json, and no script. Rename it to what it is")
