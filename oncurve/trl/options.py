"""TRL's GRPOConfig, option by option: a table read from ``trl.yaml`` beside this file."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

TABLE = Path(__file__).with_name("options.yaml")
Fate = Literal["direct", "computed", "nothing", "unsupported"]
Kind = Literal["unread", "unsupported", "differs", "nothing"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of GRPOConfig."""

    name: str
    default: Any
    fate: Fate
    """direct: the same value under another key. computed: converted. nothing: idle here. unsupported: reported."""
    to: str | None = None
    """Key of a recipe; None where there is none."""
    why: str = ""
    """The way in which it is converted, or the reason why it is not."""
    changes_learning: bool = True
    """Losing it changes the model that comes out, and not only where and how fast."""


@dataclass(frozen=True, slots=True)
class Older:
    """A name that GRPOConfig had before: ``now`` is its name today, ``to`` its key, else ``why`` it can go."""

    now: str | None = None
    to: str | None = None
    how: str = ""
    why: str = ""
    until: str | None = None
    """The last version of TRL that had it; None where that says nothing."""


@cache
def table() -> dict[str, Option]:
    """Every option of GRPOConfig, by name."""
    raw = raw_table()
    options = [
        Option(name, row["default"], fate, row["to"], row.get("how", ""))
        for fate in ("direct", "computed")
        for name, row in raw[fate].items()
    ]
    options += [
        Option(name, default, fate, None, group["why"], group.get("touches") != "surroundings")
        for fate in ("nothing", "unsupported")
        for group in raw[fate]
        for name, default in group["options"].items()
    ]
    return {option.name: option for option in options}


@cache
def older() -> dict[str, Older]:
    """Names that are gone from GRPOConfig and still stand in scripts."""
    return {name: Older(**row) for name, row in raw_table()["older"].items()}


def trl_version() -> str:
    """The version of TRL that the table describes."""
    return str(raw_table()["version"])


@cache
def raw_table() -> dict[str, Any]:
    """The file as it is."""
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the recipe does not say, and why."""

    kind: Kind
    """unread: to be filled in. unsupported: lost. differs: close, not equal. nothing: idle."""
    what: str
    why: str
    changes_learning: bool = True
    """Ignoring the option changes the trained model, and not only where and how fast it is trained."""

    @property
    def option(self) -> str:
        """The name of the option or argument alone."""
        return self.what.partition(" = ")[0]

    def describe(self) -> str:
        """One line for people."""
        return f"{self.what}: {self.why}"

    @property
    def is_loss(self) -> bool:
        """The recipe does not do all of what was asked for, and somebody has to look at it."""
        return self.kind in ("unread", "unsupported")


@dataclass
class OptionOutcome:
    """A script's options as keys of a recipe, without its rows and rewards."""

    source: str
    model: str
    """Its name, or its folder."""
    options: dict[str, Any] = field(default_factory=dict)
    num_rewards: int = 0
    lora: dict[str, Any] | None = None
    quantization: str | None = None
    """nf4 or int8."""
    notes: list[Note] = field(default_factory=list)
