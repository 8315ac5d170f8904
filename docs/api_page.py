"""The page of the public interface, made from the names that `oncurve` exports."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from typing import Any

import oncurve
from oncurve.run.trainer import train

SECTIONS = {
    "Train": ("train", "Trainer", "sft", "Result", "Step", "Evaluation"),
    "Your own loop": ("load_policy", "Policy", "Engine", "score", "Scores", "advantages", "collate"),
    "Runs of the past": ("open_run", "PastRun", "PastStep", "replay", "Replay", "regrade", "Regrade"),
    "Records": ("Prompt", "Completion", "Group", "Reward", "Batch", "OncurveError"),
}
INSIDE = {
    "Trainer": {"hold_model"},
    "Evaluation": {"category_share", "share", "by_prompt", "rows"},
    "Prompt": {"source_row"},
    "Batch": {
        "row_lengths", "select", "to", "split", "with_signal", "split_tokens", "plan_microbatches", "measure", "measured",
    },
}  # fmt: skip
"""Members that the package itself needs, and no program that uses it."""
HEAD = """# Python API

Every public name of `oncurve`, from its docstring; everything else may change without notice. [From Python](python.md) shows
how to use them. Sections such as `algorithm` and `run` have the [keys of a recipe](keys.md).
"""


def api_markdown() -> str:
    """The whole page. Raises KeyError for a public name that has no section."""
    named = {name for names in SECTIONS.values() for name in names}
    if missing := set(oncurve.__all__) - named - {"__version__"}:
        raise KeyError(f"no section of the API page has {sorted(missing)}")
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [_entry(name, train if name == "train" else getattr(oncurve, name)) for name in names]
    return "\n".join(parts).rstrip("\n") + "\n"


def _entry(name: str, found: Any) -> str:
    lines = [f"### {name}\n"]
    if inspect.isclass(found) and not issubclass(found, Exception) and not dataclasses.is_dataclass(found):
        lines.append(_code(f"{name}{_signature(found.__init__)}"))
    elif inspect.isfunction(found):
        lines.append(_code(f"{name}{_signature(found)}"))
    lines.append(_prose(found.__doc__))
    if inspect.isclass(found):
        if "__init__" in vars(found) and found.__init__.__doc__ and not dataclasses.is_dataclass(found):
            lines.append(_prose(found.__init__.__doc__))
        if dataclasses.is_dataclass(found):
            lines.append(f"Fields: {', '.join(f'`{each.name}`' for each in dataclasses.fields(found))}.\n")
        shown = {key for key in vars(found) if not key.startswith("_")} - INSIDE.get(name, set())
        lines += [_member(key, value) for key, value in vars(found).items() if key in shown]
    return "\n".join(line for line in lines if line).rstrip("\n") + "\n"


def _member(name: str, found: Any) -> str:
    if isinstance(found, classmethod):
        found = found.__func__
    if isinstance(found, property):
        return f"- **{name}**: {_line(found.fget.__doc__)}"
    if not inspect.isfunction(found):
        return ""
    return f"- **{name}**`{_signature(found)}`: {_line(found.__doc__)}"


def _signature(function: Any) -> str:
    """Parameters without types: their names and defaults."""
    parameters = []
    has_star = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            parameters.append("*")
            has_star = True
        has_star = has_star or parameter.kind is parameter.VAR_POSITIONAL
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parameters.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(parameters)})"


def _code(text: str) -> str:
    text = "\n".join(textwrap.wrap(text, 76, subsequent_indent="    ", break_long_words=False))
    return f"<!-- not run: a signature -->\n```python\n{text}\n```\n"


def _line(text: str | None) -> str:
    """A docstring as one paragraph of a list."""
    return " ".join(_prose(text).split())


def _prose(text: str | None) -> str:
    """A docstring as Markdown: code in single backticks, examples as code."""
    cleaned = inspect.cleandoc(text or "")
    cleaned = re.sub(r"``([^`]+)``", r"`\1`", cleaned)
    prose, _, example = cleaned.partition("Example::\n")
    block = f"<!-- not run: an excerpt -->\n```python\n{inspect.cleandoc(example)}\n```\n" if example else ""
    return f"{prose.strip()}\n\n{block}" if prose.strip() else block
