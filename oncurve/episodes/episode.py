"""One episode while it happens: its tokens, who wrote them, what was called, and why it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oncurve.core.errors import Failure
from oncurve.core.records import Completion, EpisodeEnd, FinishReason, Prompt, Reward, Segment, ToolCall
from oncurve.core.requests import RowState
from oncurve.episodes.environments import Environment, Kind
from oncurve.episodes.tools import CallRequest, Tool
from oncurve.sample.turns import Sampled
from oncurve.version_spans import VersionSpans


@dataclass(eq=False)
class Episode:
    """The state of one completion of a group."""

    position: int
    """Index of its prompt among those of the call."""
    index: int
    """In its group."""
    prompt: Prompt
    key: int
    """Its random stream."""
    tools: Mapping[str, Tool]
    kind: Kind | None
    """Kind of its environment; None without one."""
    prompt_ids: tuple[int, ...]
    own_prompt: str | None = None
    observation: str = ""
    environment: Environment | None = None
    cache: RowState = field(default_factory=RowState)
    """Its keys and values while it waits."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    pending: list[CallRequest] = field(default_factory=list)
    """Calls of the newest turn that have no answer yet."""
    answers: list[tuple[str, str]] = field(default_factory=list)
    """Names and answers of those that have one."""
    versions: VersionSpans = field(default_factory=VersionSpans)
    num_turns: int = 0
    num_written: int = 0
    num_malformed: int = 0
    started: float = 0.0
    waiting_seconds: float = 0.0
    ended: FinishReason | EpisodeEnd | None = None
    failure: Failure | None = None
    reward: Reward | None = None

    def add_turn(self, sampled: Sampled, text: str, spans: Sequence[tuple[int, int]] = ()) -> None:
        """Add a turn that the policy wrote; ``spans`` are the versions of its tokens."""
        ids, logprobs, _ = sampled
        self.versions.add(len(self.token_ids), spans)
        if ids:
            self.segments.append(Segment(True, len(self.token_ids), len(self.token_ids) + len(ids), text))
        self.token_ids += ids
        self.logprobs += logprobs
        self.num_turns += 1
        self.num_written += len(ids)

    def add_read(self, ids: list[int], text: str) -> None:
        """Add tokens that the policy was given."""
        if ids:
            self.segments.append(Segment(False, len(self.token_ids), len(self.token_ids) + len(ids), text))
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)

    def add_call(self, request: CallRequest, answer: str, error: str | None, seconds: float) -> None:
        """A call with its answer."""
        name = request.name or ""
        arguments = request.written if request.name is None else json.dumps(dict(request.arguments), ensure_ascii=False)
        self.calls.append(ToolCall(name, arguments, answer, error, self.num_turns - 1, seconds))
        self.answers.append((name, answer))

    @property
    def read_ids(self) -> tuple[int, ...]:
        """Everything that the next turn goes on from."""
        return (*self.prompt_ids, *self.token_ids)

    def completion(self, text: str, version: int) -> Completion:
        """The record of it; ``version`` where turns did not say which they were of."""
        return Completion(
            self.prompt_ids,
            tuple(self.token_ids),
            text,
            tuple(self.logprobs),
            self.ended or "abort",
            index=self.index,
            **self.versions.facts(version),
            segments=tuple(self.segments),
            calls=tuple(self.calls),
            own_prompt=self.own_prompt,
            observation=self.observation,
            failure=self.failure.error if self.failure is not None else None,
            failure_detail=self.failure.detail if self.failure is not None else "",
            environment_reward=self.reward,
            waiting_seconds=self.waiting_seconds,
            environment=self.environment.inner if self.environment is not None else None,
            may_call=self.environment is None or not self.environment.kind.has_steps,
        )
