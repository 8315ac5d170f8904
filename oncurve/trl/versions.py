"""Versions of TRL: which of them a script was written for, and the defaults that it then had."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.trl.options import older, raw_table, table, trl_version

FIRST = "0.15"
"""The first version whose batches are counted as today's, in completions."""
Version = tuple[int, ...]


@dataclass(frozen=True)
class Dated:
    """The versions that know all names of a script, and what they mean for options that it does not set."""

    earliest: str
    latest: str
    """The version whose defaults are taken."""
    defaults: dict[str, Any]
    """Defaults that have changed since."""
    unsure: dict[str, list[Any]]
    """Defaults that changed between the two versions, with every value that they had."""
    because: tuple[str, ...]
    """The names that today's TRL does not know."""

    def describe(self) -> str:
        """One line for people."""
        names = ", ".join(self.because) or "The version that was named"
        span = self.latest if self.earliest == self.latest else f"{self.earliest} to {self.latest}"
        text = f"{names}: of TRL {span}, whose defaults are taken"
        if self.defaults:
            text += ": " + ", ".join(f"{name} {value}" for name, value in self.defaults.items())
        if self.unsure:
            changed = ", ".join(f"{name} ({' or '.join(map(str, old))})" for name, old in self.unsure.items())
            text += f". Earlier in that span other defaults held: {changed}. trl_version says which version it is"
        return text


def number(version: str) -> Version:
    """A version as numbers that can be compared.

    >>> number("0.9") < number("0.10")
    True
    """
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        raise ConfigError(f"trl_version is {version!r}; write a version of TRL such as 0.16") from None


def date(names: Iterable[str], version: str | None = None) -> Dated | None:
    """The time of a script by the names of options that it sets; None if they are today's.

    Raises ConfigError for a ``version`` that is too old to be followed or unknown.
    """
    options = set(names)
    gone = {name: old.until for name, old in older().items() if name in options and old.until is not None}
    if version is not None:
        if not number(FIRST) <= number(version) <= number(trl_version()):
            raise ConfigError(f"trl_version is {version}; versions {FIRST} to {trl_version()} can be followed")
        earliest = latest = version
    elif gone:
        latest = min((until for until in gone.values() if until is not None), key=number)
        earliest = max(
            (since for since, brought in raw_table()["since"].items() if options & set(brought)),
            key=number,
            default=FIRST,
        )
        if number(earliest) > number(latest):  # names that no version had together: the newest of the old ones counts
            earliest = latest
    else:
        return None
    known = {**table(), "max_prompt_length": None}
    free = [name for name in raw_table()["history"] if name not in options and name in known]
    defaults = {name: default_at(name, latest) for name in free}
    unsure = {name: _between(name, earliest, latest) for name in free}
    today = {name: None if option is None else option.default for name, option in known.items()}
    return Dated(
        earliest,
        latest,
        {name: value for name, value in defaults.items() if value != today[name]},
        {name: values for name, values in unsure.items() if len(values) > 1},
        tuple(sorted(gone)),
    )


def default_at(name: str, version: str) -> Any:
    """The default of an option in a version, for those whose default changed."""
    return _between(name, version, version)[-1]


def _between(name: str, earliest: str, latest: str) -> list[Any]:
    """Every default that an option had in some versions, in their order."""
    values: list[Any] = []
    for since, value in raw_table()["history"][name].items():
        if number(since) > number(latest):
            break
        if number(since) <= number(earliest):
            values = []
        values.append(value)
    return values or [next(iter(raw_table()["history"][name].values()))]
