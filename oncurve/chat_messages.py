"""Completions as chat messages: the words of a turn, its calls and their answers."""

from __future__ import annotations

import json
from typing import Any

from oncurve.core.records import Completion


def _parsed(arguments: str) -> Any:
    """The arguments of a call; those that an agent wrote itself may be no JSON, and stay as they are."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


CALL_MARKS = ("<tool_call>", "<function=", "<tool>", "<|python_tag|>")
"""Beginnings of a call in a turn; a message's content ends before it."""


def text_before_calls(text: str, *, num_calls: int) -> str:
    """The words of a turn before its calls. A single call is the last one that is written: others were thoughts."""
    find = text.rfind if num_calls == 1 else text.find
    starts = [start for mark in CALL_MARKS if (start := find(mark)) >= 0]
    return text[: min(starts, default=_bare_call(text) or 0)].rstrip()


def text_before_any_call(text: str) -> str:
    """The words at the beginning of a turn that stay words, however it goes on.

    >>> text_before_any_call("I add. <to"), text_before_any_call("1 < 2 and"), text_before_any_call(' {"name": ')
    ('I add.', '1 < 2 and', '')
    """
    starts = [start for mark in CALL_MARKS if (start := text.find(mark)) >= 0]
    starts += [len(text) - size for mark in CALL_MARKS for size in range(1, len(mark)) if text.endswith(mark[:size])]
    starts += [start for start in (_bare_call(text), _bare_call(text.partition("</think>")[0])) if start is not None]
    return text[: min(starts, default=len(text))].rstrip()


def _bare_call(text: str) -> int | None:
    """The place where a turn, or what follows its thoughts, is an object: the form of a call without a mark."""
    before = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
    start = len(text) - len(text[before:].lstrip())
    return start if text.startswith("{", start) else None


def messages_of(completion: Completion) -> list[dict[str, Any]]:
    """A completion as chat messages; an episode with its calls, their answers, and the words of its environment.

    As TRL has them: a call is not among the words of its message, and its arguments are a dictionary. A call that
    could not be read stays among the words.
    """
    if not completion.segments:
        return [{"role": "assistant", "content": completion.text}]
    messages: list[dict[str, Any]] = []
    turn = 0
    for part in completion.segments:
        if part.is_policy:
            calls = [call for call in completion.calls if call.turn == turn]
            read = [call for call in calls if call.error != "malformed"]
            turn += 1
            content = text_before_calls(part.text, num_calls=len(read)) if read else part.text
            messages.append({"role": "assistant", "content": content})
            if read:
                made = [{"name": call.name, "arguments": _parsed(call.arguments)} for call in read]
                messages[-1]["tool_calls"] = [{"type": "function", "function": function} for function in made]
            messages += [{"role": "tool", "name": call.name, "content": call.answer} for call in calls]
        elif messages[-1]["role"] != "tool":
            messages.append({"role": "user", "content": part.text})
    return messages
