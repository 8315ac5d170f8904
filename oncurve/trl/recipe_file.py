"""The file that a draft of a recipe is written to, and the report of what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oncurve.core.errors import ConfigError
from oncurve.recipe.load import parse_config
from oncurve.trl.draft import Draft, recipe_text

TITLES = (
    ("unread", "Not known here; write it into the recipe"),
    ("unsupported", "Lost: there is nothing like it"),
    ("differs", "Close, not equal"),
    ("nothing", "Means nothing here"),
)


def write_recipe(
    draft: Draft, head: str, output: Path | None, *, overwrite: bool = False, beside: Mapping[Path, str] | None = None
) -> str:
    """Write a recipe and the files ``beside`` it; the report for people.

    Without an output the report is the recipe itself. Raises ConfigError for a file that exists.
    """
    text = recipe_text(draft, head)
    if output is None:
        return text
    written = {output: text, **(beside or {})}
    for path in written:
        if path.exists() and not overwrite:
            raise ConfigError(f"{path}: exists already. Choose another file, or say --overwrite")
    for path, content in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return report(draft, [str(path) for path in written], text)


def report(draft: Draft, written: list[str], text: str) -> str:
    """A report for people: what was written and what was not taken over."""
    lines = [f"written: {path}" for path in written]
    for kind, title in TITLES:
        notes = [note for note in draft.notes if note.kind == kind]
        if notes:
            lines += ["", f"{title}:", *(f"  {note.describe()}" for note in notes)]
    problems = refused(text)
    if problems:
        lines += ["", "The recipe does not load yet:", *(f"  {line}" for line in problems)]
    else:
        first = "When what is not known stands in it, `" if any(note.kind == "unread" for note in draft.notes) else "`"
        lines += ["", f"{first}oncurve check {written[0]}` tries its data and rewards, `oncurve plan` its memory."]
    return "\n".join(lines)


def refused(text: str) -> list[str]:
    """The reason why the recipe does not load; empty if it does."""
    try:
        parse_config(text)
    except ConfigError as error:
        return str(error).splitlines()
    return []
