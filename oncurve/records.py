"""The nouns of a rollout: what travels together from the data set to the loss. No torch in here."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: it said so (end token or stop string), it hit the token limit, or it was cut off."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One input of the policy, with the row of the data set that it came from.

    Example: ``Prompt(text="User: 2+3?\\nAssistant: <think>", prompt_ids=(1, 17, 4), index=12,
    row={"question": "2+3?", "answer": "5"})``
    """

    text: str
    """What the model reads, after the template."""
    prompt_ids: tuple[int, ...]
    """The tokens of ``text``. They are made once and never again."""
    index: int
    """Row of the data set, counted from 0 in the order of the file."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Every column of that row; reward functions see all of them. ``answer`` holds the reference answer."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The chat messages behind ``text``; None when the prompt did not go through a chat template."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled output, together with everything that must never be paired with another one."""

    prompt_ids: tuple[int, ...]
    """The tokens that were fed to the model: equal to those of the prompt, checked when a group is made."""
    token_ids: tuple[int, ...]
    """The sampled tokens, the end token and the tokens of a stop string included."""
    text: str
    """The decoded tokens without the end token; a stop string stays in the text."""
    sampler_logprobs: tuple[float, ...]
    """Natural logarithm of each sampled token's probability at the sampling temperature, as the sampler saw it."""
    finish_reason: FinishReason
    """"stop" if the completion ended by itself; "length" if the token limit ended it; "abort" if it was cut off."""
    policy_version: int
    """Number of the step whose weights sampled this completion."""
    index: int
    """Place in the group, 0 to G - 1."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.sampler_logprobs):
            raise ValueError(
                f"a completion has {len(self.token_ids)} tokens but {len(self.sampler_logprobs)} log-probabilities"
            )

    @property
    def is_truncated(self) -> bool:
        """The completion never ended by itself."""
        return self.finish_reason != "stop"


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt; they are graded against each other."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    def __post_init__(self) -> None:
        for place, completion in enumerate(self.completions):
            if completion.prompt_ids != self.prompt.prompt_ids:
                raise ValueError(
                    f"completion {place} of prompt {self.prompt.index} was sampled from another prompt: "
                    f"its prompt tokens differ"
                )

    def _repr_html_(self) -> str:
        """The prompt and its completions as a table, for a notebook."""
        rows = [
            (place, completion.text, len(completion.token_ids)) for place, completion in enumerate(self.completions)
        ]
        return html_text(self.prompt.text) + html_table(("", "completion", "tokens"), rows)


@dataclass(frozen=True, slots=True)
class Reward:
    """What a reward function says of one completion: a value, or the reason why there is none."""

    value: float | None
    """The number that enters the advantage; None when the grader failed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components before weighting, logged as ``reward/<part>``. "correct" and "format" have fixed meaning."""
    error: str | None = None
    """Why there is no value: "crashed", "timeout", "unparsable_reference", "not_applicable", ...; None if graded."""
    detail: str = ""
    """One line for a person: the exception, the extracted answer."""

    def __post_init__(self) -> None:
        if (self.value is None) == (self.error is None):
            raise ValueError(f"a reward has either a value or an error, got value={self.value}, error={self.error!r}")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a reward must be finite, got {self.value}; return an error instead")


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can still be added to others: nothing is averaged twice.

    >>> (Mean(3.0, 2) + Mean(1.0, 2)).value
    1.0
    """

    total: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN over nothing."""
        return self.total / self.count if self.count else math.nan


def html_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for a notebook; text keeps its lines and is shown as it is, whatever it holds."""
    style = 'style="text-align: left; vertical-align: top; white-space: pre-wrap"'
    cells = "".join(f"<tr>{''.join(f'<td {style}>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{html.escape(head)}</th>' for head in heads)}</tr>{cells}</table>"


def html_text(text: str) -> str:
    """Text for a notebook, as it is."""
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of some numbers, as a pair that can be added to others."""
    return Mean(float(sum(values)), len(values))
