"""A recipe in the making: each key with its value and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import BaseModel

from oncurve.recipe.messages import known_keys
from oncurve.recipe.schema import Config
from oncurve.trl.options import Note, OptionOutcome, table

SECTIONS = ("model", "data", "rewards", "algorithm", "rollouts", "policy", "optimizer", "evaluation", "run", "sft")


@dataclass
class Draft:
    """The keys of a recipe so far, with a comment each, and what could not be taken over."""

    outcome: OptionOutcome
    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Options from which a key comes."""

    def ask(self, name: str) -> Any:
        """The value of an option of GRPOConfig: as given, or TRL's default."""
        return self.outcome.options.get(name, table()[name].default)

    def is_set(self, name: str) -> bool:
        """Somebody wrote it."""
        return name in self.outcome.options

    def origin(self, *names: str) -> str:
        """The comment on a key that comes from these options."""
        return "; ".join(name for name in names if self.is_set(name)) or f"TRL's default {names[0]}"

    def put(self, key: str, value: Any, *names: str, comment: str | None = None) -> None:
        """Set a key from some options, or with a comment of its own."""
        self.values[key] = value
        self.used |= {*names}
        self.comments[key] = self.origin(*names) if comment is None else comment

    def note(self, kind: Any, name: str, why: str, *, changes_learning: bool = True) -> None:
        """Something about an option that the recipe does not say."""
        text = "..." if name.endswith("_token") else f"{self.ask(name)!r:.60}"
        self.notes.append(Note(kind, f"{name} = {text}", why, changes_learning))


def own_default(key: str) -> Any:
    """The default of a key of the recipe.

    >>> own_default("optimizer.beta2")
    0.99
    """
    section: type[BaseModel] = Config
    *parents, last = key.split(".")
    for parent in parents:
        section = type(section.model_fields[parent].get_default(call_default_factory=True))
    return section.model_fields[last].get_default(call_default_factory=True)


def tree_of(draft: Draft) -> dict[str, Any]:
    """The draft as nested dictionaries, in the order of a recipe."""
    order = {key: rank for rank, key in reversed(list(enumerate(known_keys())))}

    def sort_key(key: str) -> tuple[int, bool, int]:
        return SECTIONS.index(key.split(".")[0]), not key.endswith(".type"), order.get(key, -1)

    tree: dict[str, Any] = {}
    for key in sorted(draft.values, key=sort_key):
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = draft.values[key]
    return tree


def recipe_text(draft: Draft, head: str) -> str:
    """The recipe as YAML, a comment behind every key, and above it what it leaves out."""
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    losses = [note for note in draft.notes if note.is_loss]
    if losses:
        lines += ["#", "# Not taken over:"]
        lines += [f"# - {note.describe()}" for note in losses]
    lines += _section(tree_of(draft), draft.comments, prefix="", indent=0)
    return "\n".join(lines) + "\n"


def _section(tree: dict[str, Any], comments: dict[str, str], *, prefix: str, indent: int) -> Iterator[str]:
    space = "  " * indent
    for key, value in tree.items():
        whole = f"{prefix}{key}"
        comment = f"  # {comments[whole]}" if comments.get(whole) else ""
        if whole in comments and isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{space}{key}:{comment}"
            yield from (f"{space}  - {_flow(item)}" for item in value)
        elif isinstance(value, dict) and whole not in comments:
            yield f"{space}{key}:"
            yield from _section(value, comments, prefix=f"{whole}.", indent=indent + 1)
        else:
            yield f"{space}{key}: {_flow(value)}{comment}"


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").removesuffix("...").strip()
