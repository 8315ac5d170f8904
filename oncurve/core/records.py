"""The nouns of a rollout: what travels together from the data set to the loss. No torch in here."""

from __future__ import annotations

import html
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, overload

FinishReason = Literal["stop", "length", "abort"]
"""Reason for a completion's end: an end token or stop string, the token limit, or it was cut off."""

EpisodeEnd = Literal["done", "turns", "context", "seconds", "malformed", "failed"]
"""Further reasons for an episode's end: its environment said so ("done") or failed ("failed"); or it hit the limit on
turns, on seconds, on calls that cannot be read ("malformed"), or on all its tokens together ("context")."""

ENDED_BY_ITSELF = ("stop", "done", "malformed")
"""Reasons after which nothing was left to say; with the others a completion is truncated."""

SOURCE_ROW = "source_row"
"""Column with the row that a prompt was made from, where its own columns are to be passed on untouched."""


RAW_ANSWER = "answer_as_given"
"""Column with an answer that is a list, an object, a bool or None; the column "answer" holds it as text."""


N = TypeVar("N", int, float)


class Numbers(Sequence[N]):
    """A tuple of numbers in 4 bytes each instead of some 40: tokens, or log-probabilities as a model computes them.

    Equal to the tuple of the same numbers. Floats that a float32 would round are kept in 8 bytes.
    """

    __slots__ = ("packed",)

    def __init__(self, numbers: Iterable[N], kind: Literal["i", "f"]) -> None:
        """``kind``: "i" for whole numbers, "f" for floats. Raises TypeError for others, OverflowError from 2**31 on."""
        packed = array(kind, numbers := list(numbers))
        self.packed: array[Any] = packed if kind == "i" or packed.tolist() == numbers else array("d", numbers)

    def __len__(self) -> int:
        return len(self.packed)

    def __iter__(self) -> Iterator[N]:
        return iter(self.packed)

    @overload
    def __getitem__(self, index: int) -> N: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[N, ...]: ...
    def __getitem__(self, index: int | slice) -> N | tuple[N, ...]:
        return tuple(self.packed[index]) if isinstance(index, slice) else self.packed[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbers):
            return self.packed == other.packed
        return tuple(self.packed) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.packed))

    def __repr__(self) -> str:
        return repr(tuple(self.packed))


def packed(numbers: Sequence[Any]) -> array[Any]:
    """The memory of the numbers of a completion, which other libraries read without a copy."""
    return numbers.packed if isinstance(numbers, Numbers) else Numbers(numbers, "f").packed


USUAL_ROWS = 256
"""Completions that a CPU computes at one time where nothing says how many."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One input of the policy, with the row of the data set that it came from.

    Example: ``Prompt(text="User: 2+3?\\nAssistant: <think>", prompt_ids=(1, 17, 4), index=12,
    row={"question": "2+3?", "answer": "5"})``
    """

    text: str
    """The text that the model reads, after the template."""
    prompt_ids: tuple[int, ...]
    """The tokens of ``text``. They are made once and never again."""
    index: int
    """Row of the data set, counted from 0 in the order of the file."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Every column of that row; reward functions see all of them. ``answer`` holds the reference answer."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The chat messages behind ``text``; None when the prompt did not go through a chat template."""

    @property
    def source_row(self) -> Mapping[str, Any]:
        """The row with its own columns: the one that a script passed, or ``row`` with its answer as it was given."""
        if RAW_ANSWER in self.row:
            return {**self.row, "answer": self.row[RAW_ANSWER]}
        return self.row.get(SOURCE_ROW) or self.row


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of an episode from one writer: the policy, or what answers it.

    Example: ``Segment(is_policy=False, start=14, end=20, text="<result>27218</result>")``
    """

    is_policy: bool
    start: int
    """First of its tokens among those of the completion."""
    end: int
    """The index behind the last."""
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool in an episode.

    Example: ``ToolCall("calculator", '{"expression": "2+3"}', "5")``
    """

    name: str
    arguments: str
    """As JSON; of a call that cannot be read, what was written."""
    answer: str
    """The answer to the policy, before it was cut to the limit."""
    error: str | None = None
    """"malformed", "unknown_tool", "bad_arguments", "raised", "timeout"; None if the tool gave a value."""
    turn: int = 0
    """The policy's turn in which it called, counted from 0."""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled output, together with everything that must never be paired with another one.

    An episode with tools or an environment is one completion too: ``segments`` say who wrote which of its tokens.
    """

    prompt_ids: tuple[int, ...]
    """The tokens that were fed to the model: equal to those of the prompt, checked when a group is made."""
    token_ids: Sequence[int]
    """The sampled tokens, the end token and the tokens of a stop string included; in an episode, those of answers too,
    which nothing is learned from. Kept as ``Numbers``, which is equal to the tuple."""
    text: str
    """The decoded tokens without the end token; a stop string stays in the text."""
    sampler_logprobs: Sequence[float]
    """Natural logarithm of each sampled token's probability at the sampling temperature, as the sampler saw it; 0 for
    tokens that the policy did not write."""
    finish_reason: FinishReason | EpisodeEnd
    """"stop" if the completion ended by itself; "length" if the limit on the policy's tokens ended it; "abort" if it
    was cut off; the others are those of episodes."""
    policy_version: int
    """Number of the step whose weights sampled this completion; of several, the oldest."""
    index: int
    """Place in the group, 0 to G - 1."""
    segments: tuple[Segment, ...] = ()
    """The tokens of each writer, in order and without gaps; empty if the policy wrote all of them."""
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools, in order."""
    own_prompt: str | None = None
    """The prompt's text where an environment wrote a part of it, which may differ within a group; None elsewhere."""
    observation: str = ""
    """Text of the environment behind the question, from the beginning of the episode."""
    failure: str | None = None
    """Failure of the environment, such as "crashed" or "timeout": the completion cannot be graded. None: no failure."""
    failure_detail: str = ""
    """One line about that for a person."""
    environment_reward: Reward | None = None
    """The environment's own reward for the episode; None if it gives none."""
    waiting_seconds: float = field(default=0.0, compare=False)
    """Time that the episode waited for tools and its environment."""
    environment: Any = field(default=None, compare=False, repr=False)
    """The environment itself, where a reward function asks for ``environments``."""
    may_call: bool = field(default=True, compare=False, repr=False)
    """False in an environment with steps, where the whole turn is the action and there is nothing to call."""
    branches: tuple[Completion, ...] = ()
    """Further rows of the same episode: other conversations of an agent, and forks, each with what it has read for its
    prompt. They have the reward and the advantage of this one."""
    versions: tuple[tuple[int, int], ...] = ()
    """If weights changed in the middle: the first token of each version, and its number. Within a turn, keys and
    values of the tokens before stay those of older versions. Empty where one version sampled all."""

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, Numbers):
            object.__setattr__(self, "token_ids", Numbers(self.token_ids, "i"))
        if not isinstance(self.sampler_logprobs, Numbers):
            object.__setattr__(self, "sampler_logprobs", Numbers(self.sampler_logprobs, "f"))
        if len(self.token_ids) != len(self.sampler_logprobs):
            raise ValueError(
                f"a completion has {len(self.token_ids)} tokens but {len(self.sampler_logprobs)} log-probabilities"
            )
        if self.segments:
            starts, ends = [part.start for part in self.segments], [part.end for part in self.segments]
            if starts != [0, *ends[:-1]] or ends[-1] != len(self.token_ids):
                raise ValueError(f"the segments of a completion do not cover its {len(self.token_ids)} tokens in order")

    @property
    def is_truncated(self) -> bool:
        """The completion never ended by itself."""
        return self.finish_reason not in ENDED_BY_ITSELF

    @property
    def written(self) -> tuple[bool, ...]:
        """For each token, whether the policy wrote it."""
        if not self.segments:
            return (True,) * len(self.token_ids)
        return tuple(part.is_policy for part in self.segments for _ in range(part.start, part.end))

    @property
    def written_ids(self) -> Sequence[int]:
        """The tokens that the policy wrote."""
        if not self.segments:
            return self.token_ids
        return tuple(
            token for part in self.segments if part.is_policy for token in self.token_ids[part.start : part.end]
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy wrote, in branches too: the length that rewards and statistics mean."""
        return len(self.written_ids) + sum(branch.num_tokens for branch in self.branches)

    @property
    def num_turns(self) -> int:
        """Number of turns that the policy wrote, in branches too."""
        own = sum(part.is_policy for part in self.segments) if self.segments else 1
        return own + sum(branch.num_turns for branch in self.branches)

    def as_graded(self) -> Completion:
        """The policy's answer as a reward function may read it: its own words, turn by turn, and nobody else's."""
        if not self.segments:
            return self
        return replace(self, text="\n".join(part.text for part in self.segments if part.is_policy))


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt; they are graded against each other."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    def __post_init__(self) -> None:
        for index, completion in enumerate(self.completions):
            if completion.prompt_ids != self.prompt.prompt_ids and completion.own_prompt is None:
                raise ValueError(
                    f"completion {index} of prompt {self.prompt.index} was sampled from another prompt: "
                    f"its prompt tokens differ"
                )

    def _repr_html_(self) -> str:
        """The prompt and its completions as a table, for a notebook."""
        rows = [(index, made.text, len(made.token_ids)) for index, made in enumerate(self.completions)]
        text = f'<pre style="white-space: pre-wrap">{html.escape(self.prompt.text)}</pre>'
        return text + html_table(("", "completion", "tokens"), rows)


CUT: Mapping[str, bool] = {"is_cut": True}
"""Marks a parameter that leaves tokens out of the distribution unless it has its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling. The neutral setting samples from the policy itself, which GRPO's gradient assumes."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token (greedy)."""
    max_completion_tokens: int = 256
    min_completion_tokens: int = 0
    """The end token and stop strings cannot end a completion before it has this many tokens."""
    top_p: float = field(default=1.0, metadata=CUT)
    """Smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: int = field(default=0, metadata=CUT)
    """Number of most likely tokens to keep; 0 keeps all."""
    min_p: float = field(default=0.0, metadata=CUT)
    """Drop tokens less likely than this share of the most likely one; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay in its text and tokens."""
    seed: int = 0

    @property
    def active_cuts(self) -> tuple[str, ...]:
        """Names of the parameters that leave tokens out."""
        return tuple(name for name, neutral in CUTS.items() if getattr(self, name) != neutral)

    @property
    def cuts(self) -> bool:
        """Some tokens may not be drawn, however the uniform numbers fall."""
        return bool(self.active_cuts)

    def room(self, written: int) -> int:
        """Tokens that a completion may still get after so many."""
        return self.max_completion_tokens - written

    def limited_to(self, tokens: int) -> SamplingParams:
        """The same parameters for completions of at most so many tokens."""
        least = min(self.min_completion_tokens, tokens)
        return replace(self, max_completion_tokens=tokens, min_completion_tokens=least)


CUTS: Mapping[str, Any] = {field.name: field.default for field in fields(SamplingParams) if "is_cut" in field.metadata}
"""Every parameter that can leave tokens out, with the default at which it keeps all."""


EQUAL_WITHIN = 1e-6
"""Rewards of a group that differ by less than this count as equal."""
NOT_APPLICABLE = "not_applicable"
"""``Reward.error`` of a completion that the function has no opinion on: it returned None or NaN."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function's verdict on one completion: a value, or the reason why there is none."""

    value: float | None
    """The number that enters the advantage; None when the grader failed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components before weighting, logged as ``reward/<part>``. "correct" and "format" have fixed meaning."""
    error: str | None = None
    """Cause of a missing value: "crashed", "timeout", "unparsable_reference", "not_applicable", ...; None if graded."""
    detail: str = ""
    """One line for a person: the exception, the extracted answer."""
    trace: str = ""
    """The traceback of a failure in the user's code."""

    def __post_init__(self) -> None:
        if (self.value is None) == (self.error is None):
            raise ValueError(f"a reward has either a value or an error, got value={self.value}, error={self.error!r}")
        if self.value is not None and not abs(self.value) < 1e15:  # nor NaN; squares of larger ones leave float32
            raise ValueError(f"a reward must be finite and within +-1e15, got {self.value}; return an error instead")

    @property
    def is_failure(self) -> bool:
        """Grading failed: there is an error, and it is not that the function has no opinion on the completion.

        This is the one definition of a reward error: of the fraction that stops a run, of ``reward/error_fraction``
        and of what the doctor reports. What does not apply is ``reward/not_applicable_fraction`` and stops nothing.
        """
        return self.error is not None and self.error != NOT_APPLICABLE


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


def html_table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, is_styled: bool = True) -> str:
    """A table for a notebook, or for a page with a style of its own; text is shown as it is, whatever it holds."""
    cell = ' style="text-align: left; vertical-align: top; white-space: pre-wrap"' if is_styled else ""
    cells = "".join(f"<tr>{''.join(f'<td{cell}>{html.escape(str(value))}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{html.escape(head)}</th>' for head in heads)}</tr>{cells}</table>"


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of some numbers, as a pair that can be added to others."""
    return Mean(float(sum(values)), len(values))


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """The rows and lengths that a decoder is made for."""

    num_prompts: int
    group_size: int
    prompt_tokens: int
    """Tokens of the longest prompt."""
    completion_tokens: int
    """The limit."""
    cuts: bool = False
    """With top-k, top-p or min-p."""
    is_open: bool = False
    """Requests come as they like, each with a slot for its prompt: as many slots as rows."""

    @property
    def rows(self) -> int:
        """Completions."""
        return self.num_prompts * self.group_size

    def groups(self, rows: int) -> int:
        """Groups that so many completions belong to."""
        return -(-rows // self.group_size)

    def prompts(self, rows: int) -> int:
        """Prompts that are held while so many completions run: groups that end keep theirs to their last row."""
        return rows if self.is_open else min(self.num_prompts, 2 * self.groups(rows) + 1)
