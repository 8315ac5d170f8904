"""The completions of a prompt that are still missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oncurve.core.records import SamplingParams
from oncurve.fleet.servers.protocol import GeneratedCompletion


@dataclass(eq=False)
class PendingGroup:
    """A prompt and its group: it is done when every index is filled, by whichever servers.

    A completion belongs to its index in the group, so that none is lost or counted twice however often it is asked for.
    """

    label: str
    """The weights that all its completions must come from, unless they may change under its rows."""
    prompt_ids: tuple[int, ...]
    keys: list[int]
    """The random stream of each index."""
    params: SamplingParams
    end_ids: tuple[int, ...]
    order: int = 0
    """Groups with a smaller number go first."""
    labels: Mapping[str, int] | None = None
    """The number of each version of the run, where weights may change under rows that run."""
    oldest: int = 0
    """The version before which none may have sampled a token, then."""
    sampled: list[GeneratedCompletion | None] = field(default_factory=list)
    num_failures: int = 0
    """Attempts in a row at which a server failed."""

    def __post_init__(self) -> None:
        self.sampled = [None] * len(self.keys)

    @property
    def missing(self) -> list[int]:
        """Places without a completion."""
        return [index for index, completion in enumerate(self.sampled) if completion is None]

    @property
    def cost_tokens(self) -> int:
        """Tokens that are left to do, at most."""
        return len(self.prompt_ids) + len(self.missing) * self.params.room(0)

    def fill(self, indices: list[int], answers: list[GeneratedCompletion]) -> tuple[int, int]:
        """Take the answers that are whole and of the right weights; how many were cut off, how many were of others."""
        aborted = foreign = 0
        for index, answer in zip(indices, answers, strict=True):
            if answer.finish_reason == "abort":
                aborted += 1
            elif not self.allows(answer.versions):
                foreign += 1
            elif self.sampled[index] is None:
                self.sampled[index], self.num_failures = answer, 0
        return aborted, foreign

    def allows(self, versions: tuple[str, ...]) -> bool:
        """A completion of these weights may be taken."""
        if self.labels is None:
            return versions == (self.label,)
        return bool(versions) and all(self.labels.get(label, -1) >= self.oldest for label in versions)

    @property
    def completions(self) -> list[GeneratedCompletion]:
        """All of them, once none is missing."""
        return [completion for completion in self.sampled if completion is not None]
