"""The setup of episodes: tools, environments, the dialect of the model, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oncurve.core.errors import ConfigError
from oncurve.core.records import Prompt
from oncurve.episodes.dialects import MakeDialect
from oncurve.episodes.environments import Kind
from oncurve.episodes.settings import EpisodeSection
from oncurve.episodes.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rerender = Callable[["PreTrainedTokenizerBase", Prompt, str], tuple[str, tuple[int, ...]]]
"""The text and tokens of a prompt to whose question an environment adds words of its own."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSetup:
    """Tools, environments, dialect and limits of episodes."""

    tools: Mapping[str, Tool]
    """Tools of every episode."""
    kinds: Mapping[str, Kind]
    """Environments by name; rows name theirs in the column ``environment`` where there are several."""
    make_dialect: MakeDialect
    rerender: Rerender
    limits: EpisodeSection
    context_tokens: int | None = None
    """Prompt, turns and answers together; None where nothing limits them."""

    @property
    def is_deterministic(self) -> bool:
        """Everything that answers says of itself that it always answers alike."""
        tools = all(tool.is_deterministic for tool in self.tools.values())
        return tools and all(kind.is_deterministic for kind in self.kinds.values())

    def kind_of(self, row: Mapping[str, Any]) -> Kind | None:
        """The environment of a row. Raises ConfigError for a name that is not known."""
        if not self.kinds:
            return None
        named = row.get("environment")
        if named is None and len(self.kinds) == 1:
            return next(iter(self.kinds.values()))
        if named not in self.kinds:
            raise ConfigError(
                f"environment: a row names {named!r} in its column environment; there are {', '.join(self.kinds)}. "
                f"Correct the row, or add the environment"
            )
        return self.kinds[str(named)]

    def tools_of(self, row: Mapping[str, Any]) -> dict[str, Tool]:
        """The tools that the policy may call in the episodes of a row."""
        kind = self.kind_of(row)
        return {**self.tools, **(kind.tools if kind is not None else {})}
