"""Conversations as tokens: the marks of a dialect around words that somebody else wrote.

The first request of a conversation is tokenized whole. After that only new messages are, by themselves, between the
marks that the dialect puts behind the policy's turn. Words of an agent never become marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from oncurve.agents.chat_request import ChatCall, ChatError, Message, as_dicts
from oncurve.core.errors import ConfigError
from oncurve.data.chat_template import TemplateRefusal, write_conversations
from oncurve.episodes.chat_dialect import ChatDialect
from oncurve.episodes.dialects import EncodedText, TagDialect
from oncurve.episodes.tools import CallRequest, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Parts = list[tuple[str, bool]]
"""Text in pieces; True for what somebody else wrote."""
_SLOT = "oncurve-slot-{}-here"
_SLOTS = re.compile(r"oncurve-slot-(\d+)-here")
_SPOKEN = "oncurve-spoken"


class Frames(Protocol):
    """The tokens around the turns of a conversation with one kind of model."""

    stop: tuple[str, ...]
    """Strings that end a turn, besides the end token."""
    end_ids: Sequence[int]
    """Tokens that end a turn; whoever samples says which."""

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
        """The calls in a turn."""
        ...

    def opened(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> EncodedText:
        """A conversation up to where the policy begins to write. Raises ChatError for one that cannot be."""
        ...

    def followed(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, ended: bool) -> EncodedText:
        """The tokens between a turn and the next one; ``ended``: the turn has its end token already."""
        ...


class ChatFrames(ChatDialect):
    """Conversations in the model's own chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, arguments: Mapping[str, Any] | None = None) -> None:
        """Raises ConfigError for a tokenizer without a chat template."""
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{tokenizer.name_or_path or 'the model'}: its tokenizer has no chat template, so data.chat cannot be "
                f"true. Set data.chat=false, or take the instruct version of the model"
            )
        super().__init__(tokenizer, has_tools=False, arguments=arguments)
        self._checked: set[str] = set()

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
        """The calls in a turn."""
        self._check("tools")
        return super().read(text, tools)

    def opened(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> EncodedText:
        """The conversation as the template writes it, with the tools that it tells of."""
        if tools or any(message.role == "tool" for message in messages):
            self._check("tools")
        if self.foreign.holds_mark(json.dumps([list(tools), as_dicts(_calling(messages))], ensure_ascii=False)):
            raise ChatError("a tool's schema or the arguments of a call hold a mark of the model's chat template")
        return self._encoded(self._rendered(messages, tools), messages)

    def followed(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, ended: bool) -> EncodedText:
        """The new messages behind a turn, as the template writes them there."""
        for message in messages:
            self._check("tools" if message.role == "tool" else "user")
        question, turn = Message("user", _SPOKEN), Message("assistant", _SPOKEN)
        answered = [message for message in messages if message.role == "tool"]
        if answered and self._shows_calls:
            calls = [
                ChatCall(tool_message.answers or "oncurve00", tool_message.name or "tool", "{}")
                for tool_message in answered
            ]
            turn = Message("assistant", "", tuple(calls))
        whole = self._rendered([question, turn, *messages], tools, num_verbatim=2)
        rest = whole.rpartition(_SPOKEN)[2]
        if turn.calls:
            alone = self.without_end(self._rendered([question, turn], tools, num_verbatim=2, goes_on=False))
            if not whole.startswith(alone):
                raise ChatError("the model's chat template writes a call anew when it is answered", param="messages")
            rest = whole[len(alone) :]
        return self._encoded(self.behind_end(rest, ended=ended), messages)

    def _check(self, role: str) -> None:
        """Find out, once, whether the template can be gone on with. Raises ConfigError if it cannot."""
        if role not in self._checked:
            self.learn_tools() if role == "tools" else self.check_prefix(role)
            self._checked.add(role)

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        num_verbatim: int = 0,
        *,
        goes_on: bool = True,
    ) -> str:
        """The template's text with slots in place of contents, but for those of the first ``num_verbatim`` messages."""
        slotted = [
            message
            if index < num_verbatim or not message.content
            else replace(message, content=_SLOT.format(index - num_verbatim))
            for index, message in enumerate(messages)
        ]
        try:
            [text] = write_conversations(
                [as_dicts(slotted)], self.tokenizer, tools=tools, arguments=self._arguments, opens_answer=goes_on
            )
        except TemplateRefusal as refusal:
            raise ChatError(
                f"the model's chat template refuses these messages: {refusal.reason}", param="messages"
            ) from None
        return text

    def _encoded(self, text: str, messages: Sequence[Message]) -> EncodedText:
        parts: Parts = []
        end = 0
        for slot in _SLOTS.finditer(text):
            message = messages[int(slot.group(1))]
            escapes = self._escapes and message.role == "tool"
            content = json.dumps(message.content, ensure_ascii=False)[1:-1] if escapes else message.content
            parts += [(text[end : slot.start()], False), (content, True)]
            end = slot.end()
        parts.append((text[end:], False))
        return self.foreign.framed(parts), "".join(part for part, _ in parts)


def _calling(messages: Sequence[Message]) -> list[Message]:
    """Messages with calls, without their contents."""
    return [replace(message, content="") for message in messages if message.calls]


class TagFrames(TagDialect):
    """Conversations in plain text, for models without a chat template.

    A user's message is laid out as a question of the prompt's template is; ``<tool>`` calls, and ``<result>`` answers.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, system: str = "", turn: str = "{user}", opening: str = ""
    ) -> None:
        """``system`` opens conversations that have no such message; ``turn`` and ``opening`` are the template's."""
        super().__init__(tokenizer, turn=f"\n{turn}{opening}")
        self._system, self._opening = system, opening
        self._before, _, self._after = turn.partition("{user}")

    def opened(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> EncodedText:
        """The conversation from its system message on."""
        parts: Parts = [(self._system, False)] if self._system else []
        if messages[0].role == "system":
            parts, messages = [(messages[0].content, True)], messages[1:]
        if not messages:
            raise ChatError("there is a system message alone; end with a user's message", param="messages")
        written = self._parts(messages, is_first=not parts)
        ids, text = self._encoded([*parts, *written])
        return [*self._first_ids, *ids], text

    def followed(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, ended: bool) -> EncodedText:
        """The new messages behind a turn."""
        return self._encoded(self._parts(messages, is_first=False))

    def _parts(self, messages: Sequence[Message], *, is_first: bool) -> Parts:
        parts: Parts = []
        for index, message in enumerate(messages):
            match message.role:
                case "tool":
                    parts += [("<result>", False), (message.content, True), ("</result>", False)]
                case "assistant":
                    calls = "".join(f"<tool>{call.arguments}</tool>" for call in message.calls)
                    space = "" if message.content[:1].isspace() else " "
                    parts.append((f"{space}{message.content}{calls}", True))
                case _:
                    is_answered = index + 1 < len(messages) and messages[index + 1].role == "assistant"
                    line = "" if is_first and not parts else "\n"
                    behind = self._after if is_answered else self._after + self._opening
                    parts += [(line + self._before, False), (message.content, True), (behind, False)]
        return parts

    def _encoded(self, parts: Parts) -> EncodedText:
        return self.foreign.framed(parts), "".join(part for part, _ in parts)

    @cached_property
    def _first_ids(self) -> list[int]:
        """The tokens that the tokenizer puts in front of a text."""
        whole, alone = self.tokenizer.encode("x"), self.tokenizer.encode("x", add_special_tokens=False)
        for start in range(len(whole)):
            if whole[start : start + len(alone)] == alone:
                return whole[:start]
        return []
