"""`oncurve convert`: from a script or options of another trainer to a recipe and a report of what it leaves out."""

from __future__ import annotations

from pathlib import Path

from oncurve.config.load import parse_config
from oncurve.convert.draft import Draft, recipe_text
from oncurve.convert.options import OptionOutcome, trl_version
from oncurve.convert.options_file import read_options
from oncurve.convert.script import read_script
from oncurve.convert.trl import convert, relative
from oncurve.errors import ConfigError

LARGEST = 10_000_000
"""Bytes of a script or a file of options."""
TITLES = (
    ("unknown", "No such option"),
    ("unread", "Not known without running the script; write it into the recipe"),
    ("unsupported", "Lost: there is nothing like it"),
    ("differs", "Close, not equal"),
    ("nothing", "Means nothing here"),
)


def convert_file(
    path: Path, output: Path | None, *, processes: int = 1, rows: int | None = None, overwrite: bool = False
) -> tuple[str, bool]:
    """Write the recipe of a file; the report for people, and whether everything was taken over.

    Without an output the report is the recipe itself. Raises ConfigError for a file that cannot be read and for an
    output that exists.
    """
    found = read_file(path)
    folder = Path.cwd() if output is None else output.parent
    functions = relative(path, folder)
    beside = folder / f"{(output or path).stem}_rewards.py"
    if found.extracted is not None:
        functions = beside.name
    draft = convert(found, processes=processes, rows=rows, functions=functions)
    said = f"--processes {processes}" + ("" if rows is None else f" --rows {rows}")
    text = recipe_text(draft, f"Converted from {path.name}, written for TRL {trl_version()}, {said}.")
    is_whole = not any(note.is_loss for note in draft.notes)
    if output is None:
        return text, is_whole
    written = [(output, text)] + ([(beside, found.extracted)] if found.extracted is not None else [])
    for place, _ in written:
        if place.exists() and not overwrite:
            raise ConfigError(f"{place}: exists already. Choose another --output, or say --overwrite")
    for place, content in written:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content, encoding="utf-8")
    return report(draft, [str(place) for place, _ in written], text), is_whole


def read_file(path: Path) -> OptionOutcome:
    """What a file says, by its ending.

    Raises ConfigError for one that cannot be read.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"{path}: is larger than {LARGEST:,} bytes, which no script is")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Give a training script, or a YAML or JSON of its options") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if path.suffix == ".py":
        return read_script(text, path.name)
    if path.suffix in (".yaml", ".yml", ".json"):
        return read_options(text, path.name)
    raise ConfigError(f"{path}: is neither .py nor .yaml, .yml or .json. Rename it to what it is")


def report(draft: Draft, written: list[str], text: str) -> str:
    """What was written and what was not taken over, for people."""
    lines = [f"written: {place}" for place in written]
    for kind, title in TITLES:
        notes = [note for note in draft.notes if note.kind == kind]
        if notes:
            lines += ["", f"{title}:", *(f"  {note.describe(draft.found.source)}" for note in notes)]
    problems = refused(text)
    if problems:
        lines += ["", "The recipe does not load yet:", *(f"  {line}" for line in problems)]
    else:
        first = "When what is not known stands in it, `" if any(note.kind == "unread" for note in draft.notes) else "`"
        lines += ["", f"{first}oncurve check {written[0]}` tries its data and rewards, `oncurve plan` its memory."]
    return "\n".join(lines)


def refused(text: str) -> list[str]:
    """Why the recipe does not load; nothing if it does."""
    try:
        parse_config(text)
    except ConfigError as error:
        return str(error).splitlines()
    return []
