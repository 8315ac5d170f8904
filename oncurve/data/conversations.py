"""Questions that are lists of chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oncurve.core.errors import DataError

MESSAGES = "question_messages"
"""Column with the messages of a question that is a list of them; its column "question" holds their text."""


def read_messages(source: str, value: Sequence[Any], *, column: str) -> list[dict[str, Any]]:
    """The messages of a question, each content as one text; other keys, such as tool_calls, are kept.

    Raises DataError for what is no message, for a picture, and for a conversation in which the assistant speaks last.
    """
    messages = [
        _message(f"{source}, message {number} of {column!r}", message) for number, message in enumerate(value, 1)
    ]
    if not messages:
        raise DataError(f"{source}: {column!r} is an empty list. Give at least one message, or drop the row.")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{source}: the assistant has the last word in {column!r}. Keep the messages up to the one to answer."
        )
    return messages


def text_of_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """The messages as one text, by which rows are compared and shown: the content of a single one, else all by role."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _message(source: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise DataError(f"{source} is {value!r:.60}. Write {{role: user, content: text}}.")
    content = value.get("content")
    if content is None and value.get("tool_calls"):
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_part(source, part) for part in content)
    if not isinstance(content, str) or not (content.strip() or value.get("tool_calls")):
        raise DataError(f"{source} has no text: its content is {content!r:.60}. Fill it in, or drop the message.")
    return {**{key: item for key, item in value.items() if item is not None}, "content": content}


def _part(source: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise DataError(
            f"{source} has a part of type {kind!r}, and models are trained on text only. Give text, or drop it."
        )
    return text
