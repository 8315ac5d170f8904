"""The session of an agent: its conversations with the policy, as the tokens that were sampled.

A request whose messages go on from a stored conversation goes on from its tokens: what the policy wrote is never
tokenized again. A request that goes on from an earlier position, or from other words than the policy's, is a fork, and
one that has nothing to do with a stored conversation begins another; both are rows of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from oncurve.agents.chat_request import ChatCall, ChatError, ChatRequest, Message
from oncurve.agents.conversation_frames import Frames
from oncurve.chat_messages import text_before_calls
from oncurve.core.records import Completion, EpisodeEnd, FinishReason, Segment, ToolCall
from oncurve.episodes.dialects import EncodedText
from oncurve.episodes.tools import CallRequest
from oncurve.sample.turns import Sampled
from oncurve.version_spans import VersionSpans


@dataclass(frozen=True)
class SessionLimits:
    """Limits on the conversations of a session."""

    max_completion_tokens: int
    """Limit on the tokens of the policy in all turns of one conversation."""
    max_turns: int | None = None
    """Limit on the policy's turns in all conversations; None: no limit."""
    context_tokens: int | None = None
    """Limit on the tokens of a conversation, the agent's included; None: no limit."""
    may_fork: bool = True
    """Several conversations, and several ways on from one position, are rows; otherwise they are refused."""


@dataclass
class Conversation:
    """One row: what was read before the policy's first word in it, and everything since."""

    prompt_ids: tuple[int, ...]
    prompt_text: str
    tools: tuple[object, ...]
    """The tools in the policy's prompt."""
    began: int
    """Turns of the session before it."""
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    positions: list[tuple[int, int]] = field(default_factory=list)
    """Behind each turn: how many messages and how many tokens there are."""
    versions: VersionSpans = field(default_factory=VersionSpans)
    num_written: int = 0
    reason: FinishReason = "stop"
    """The reason why its last turn ended."""
    is_ended: bool = False
    """The last turn has its end token."""
    is_busy: bool = False
    """A turn of it is being sampled."""

    @property
    def read_ids(self) -> tuple[int, ...]:
        """Everything that the next turn goes on from."""
        return (*self.prompt_ids, *self.token_ids)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], text: str, *, is_policy: bool) -> None:
        """Tokens of one writer."""
        if ids:
            self.segments.append(Segment(is_policy, len(self.token_ids), len(self.token_ids) + len(ids), text))
        self.token_ids += ids
        self.logprobs += logprobs

    def follows(self, request: ChatRequest) -> tuple[int, int] | None:
        """The last of ``positions`` from which the request goes on; None if it does from nowhere."""
        for position in reversed(self.positions) if request.tools == self.tools else ():
            known = self.messages[: position[0]]
            if len(request.messages) > len(known) and all(map(Message.is_like, request.messages, known)):
                return position
        return None


@dataclass(eq=False)
class PendingTurn:
    """A turn on its way."""

    row: Conversation
    request: ChatRequest
    new: tuple[Message, ...]
    """Messages since the row's last turn."""
    encoded: EncodedText
    """The new messages as tokens; empty where they are the row's prompt."""
    read_ids: tuple[int, ...]
    key: int
    """Number of its random stream within the session: of what was read, and of how often that was."""
    room: int
    """Tokens that it may have."""
    digest: bytes

    @property
    def answer_id(self) -> str:
        """The name of its answer."""
        return f"chatcmpl-{self.key:016x}"


@dataclass(frozen=True)
class ChatAnswer:
    """The policy's turn, as the agent receives it."""

    message: Message
    finish_reason: str
    """stop, length or tool_calls."""
    answer_id: str
    num_read: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    row: int
    """Which conversation of the session."""


class AgentSession:
    """The messages between one agent and the policy. Used from one thread."""

    def __init__(
        self, frames: Frames, decode: Callable[[Sequence[int]], str], end_ids: Sequence[int], limits: SessionLimits
    ) -> None:
        self.frames, self.decode, self.end_ids, self.limits = frames, decode, frozenset(end_ids), limits
        self.rows: list[Conversation] = []
        self.num_turns = 0
        self.limit: EpisodeEnd | None = None
        """The limit that a request was refused for."""
        self._num_requests: Counter[bytes] = Counter()

    def ask(self, request: ChatRequest) -> PendingTurn:
        """The row that continues a conversation with a request, as tokens. Raises ChatError for one that is refused."""
        if self.limits.max_turns is not None and self.num_turns + self._num_busy >= self.limits.max_turns:
            self.limit = "turns"
            raise ChatError(
                f"the episode has had its {self.limits.max_turns} turns (rollouts.episodes.max_turns)", code="max_turns"
            )
        row, new, encoded = self._row_for(request)
        read_ids = (*row.read_ids, *encoded[0])
        context = self.limits.context_tokens
        if context is not None and len(read_ids) >= context:
            self.limit = "context"
            raise ChatError(
                f"this model's maximum context length is {context} tokens, and the messages have {len(read_ids)}",
                code="context_length_exceeded",
                param="messages",
            )
        room = self.limits.max_completion_tokens - row.num_written
        room = min(room, request.max_tokens or room, room if context is None else context - len(read_ids))
        digest = hashlib.blake2b(np.array(read_ids, dtype=np.int64).tobytes(), digest_size=8).digest()
        key = 1 + (int.from_bytes(digest) + 0x9E3779B97F4A7C15 * self._num_requests[digest]) % 2**60
        self._num_requests[digest] += 1
        row.is_busy = True
        if row not in self.rows:
            self.rows.append(row)
        return PendingTurn(row, request, new, encoded, read_ids, key, max(room, 0), digest)

    def forget(self, pending: PendingTurn) -> None:
        """Undo a request whose client is gone, as if it had never been made."""
        pending.row.is_busy = False
        self._num_requests[pending.digest] -= 1
        if not pending.row.positions:
            self.rows.remove(pending.row)

    def took(self, pending: PendingTurn, sampled: Sampled, spans: Sequence[tuple[int, int]] = ()) -> ChatAnswer:
        """The policy wrote a turn; ``spans`` are the first tokens and numbers of the versions that sampled it."""
        row, (ids, logprobs, reason) = pending.row, sampled
        row.is_busy = False
        is_ended = bool(ids) and ids[-1] in self.end_ids
        text = self.decode(ids[:-1] if is_ended else ids)
        self._note_answers(row, pending.new)
        row.add(pending.encoded[0], [0.0] * len(pending.encoded[0]), pending.encoded[1], is_policy=False)
        row.versions.add(len(row.token_ids), spans)
        row.add(ids, logprobs, text, is_policy=True)
        message, calls = self._message(pending, text) if reason == "stop" else (Message("assistant", text), [])
        row.calls += [
            ToolCall("", call.written, f"error: {call.problem}", "malformed", len(row.positions))
            for call in calls
            if call.name is None
        ]
        row.messages += [*pending.new, message]
        row.positions.append((len(row.messages), len(row.token_ids)))
        row.num_written += len(ids)
        row.reason, row.is_ended = reason, is_ended
        self.num_turns += 1
        finish = "tool_calls" if message.calls else "stop" if reason == "stop" else "length"
        return ChatAnswer(
            message,
            finish,
            pending.answer_id,
            len(pending.read_ids),
            tuple(ids),
            tuple(logprobs),
            self.rows.index(row),
        )

    def ordered(self) -> list[Conversation]:
        """The rows that the policy wrote in, in an order that does not depend on which of two requests came first."""
        written = [row for row in self.rows if row.num_written]
        return sorted(written, key=lambda row: (row.began, row.prompt_ids, tuple(row.token_ids)))

    @property
    def _num_busy(self) -> int:
        return sum(row.is_busy for row in self.rows)

    def _row_for(self, request: ChatRequest) -> tuple[Conversation, tuple[Message, ...], EncodedText]:
        """The row that a request goes on with, what is new in it, and that as tokens."""
        known = [(position, row) for row in self.rows if (position := row.follows(request)) is not None]
        if not known:
            self._may_fork("another conversation")
            ids, text = self.frames.opened(request.messages, request.tools)
            row = Conversation(tuple(ids), text, request.tools, self.num_turns)
            return row, request.messages, ([], "")
        (num_messages, num_tokens), row = max(
            known, key=lambda candidate: (candidate[0][0], -self.rows.index(candidate[1]))
        )
        new = request.messages[num_messages:]
        at_end = num_tokens == len(row.token_ids)
        ended = row.is_ended if at_end else row.token_ids[num_tokens - 1] in self.end_ids
        encoded = self.frames.followed(new, request.tools, ended=ended)
        if at_end and not row.is_busy:
            return row, new, encoded
        self._may_fork("a fork of the conversation")
        ids = (*row.prompt_ids, *row.token_ids[:num_tokens], *encoded[0])
        fork = Conversation(ids, self.decode(ids), request.tools, self.num_turns, list(row.messages[:num_messages]))
        return fork, new, ([], "")

    def _may_fork(self, what: str) -> None:
        """Raises ChatError if there is a conversation already and only one is taken."""
        if self.rows and not self.limits.may_fork:
            raise ChatError(
                f"this is {what}, and the recipe takes one conversation for each episode, which only grows "
                f"(rollouts.episodes.forks: refuse). Send back the messages that you got as they are",
                code="fork_refused",
                param="messages",
            )

    def _message(self, pending: PendingTurn, text: str) -> tuple[Message, list[CallRequest]]:
        """A turn as a message: its words, and its calls where the agent has tools."""
        if not pending.request.may_call:
            return Message("assistant", text), []
        requests = self.frames.read(text, pending.request.known_tools)
        calls = tuple(
            ChatCall(f"call_{pending.key:x}_{index}", str(call.name), _as_json(call))
            for index, call in enumerate(requests)
            if call.name is not None
        )
        if not calls:
            return Message("assistant", text), requests
        return Message("assistant", text_before_calls(text, num_calls=len(calls)), calls), requests

    def _note_answers(self, row: Conversation, new: Sequence[Message]) -> None:
        """Add the answers of the agent's tools to the row's record of calls."""
        made = {call.call_id: call for message in row.messages[-1:] for call in message.calls}
        turn = len(row.positions) - 1
        for message in new:
            if message.role == "tool" and (call := made.get(message.answers)) is not None:
                row.calls.append(ToolCall(call.name, call.arguments, message.content, None, turn))


def _as_json(call: CallRequest) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def completion_of(row: Conversation, *, version: int, index: int, text: str) -> Completion:
    """The record of one row."""
    return Completion(
        row.prompt_ids,
        tuple(row.token_ids),
        text,
        tuple(row.logprobs),
        row.reason,
        index=index,
        segments=tuple(row.segments),
        calls=tuple(row.calls),
        own_prompt=row.prompt_text,
        **row.versions.facts(version),
    )
