"""Answers to requests for a chat completion, in OpenAI's form: whole, or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oncurve.agents.agent_session import ChatAnswer
from oncurve.agents.chat_request import ChatError, ChatRequest

MODEL = "policy"
"""The name of the model, whatever a request calls it."""
CHUNK = "chat.completion.chunk"
PIECE = 16
"""Characters of one event of a stream."""
IGNORED_HEADER = "x-oncurve-ignored"
"""Header with the parameters of a request that changed nothing."""
Decode = Callable[[Sequence[int]], str]


def models() -> dict[str, Any]:
    """The list of models, which has one."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "oncurve"}]}


def whole_answer(request: ChatRequest, answer: ChatAnswer, decode: Decode) -> dict[str, Any]:
    """One answer."""
    message = {"role": "assistant", "content": answer.message.content or None, "refusal": None}
    if not answer.message.calls:
        message["content"] = answer.message.content
    else:
        message["tool_calls"] = _calls(answer)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer, decode) if request.wants_logprobs else None,
    }
    return {**_head(request, answer.answer_id, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(request: ChatRequest, answer: ChatAnswer, decode: Decode) -> Iterator[bytes]:
    """The same as server-sent events, the last of which says that it is done."""
    yield first_event(request, answer.answer_id)
    yield from last_events(request, answer, decode)


def first_event(request: ChatRequest, answer_id: str) -> bytes:
    """The first event of a stream."""
    return _delta(request, answer_id, {"role": "assistant", "content": ""})


def text_event(request: ChatRequest, answer_id: str, text: str) -> bytes:
    """Words of a turn, while it is written or afterwards."""
    return _delta(request, answer_id, {"content": text})


def last_events(request: ChatRequest, answer: ChatAnswer, decode: Decode, *, num_sent: int = 0) -> Iterator[bytes]:
    """The last events of a stream, behind so many characters of the content."""
    content = answer.message.content
    for start in range(num_sent, len(content), PIECE):
        yield text_event(request, answer.answer_id, content[start : start + PIECE])
    for index, call in enumerate(_calls(answer)):
        yield _delta(request, answer.answer_id, {"tool_calls": [{"index": index, **call}]})
    head = _head(request, answer.answer_id, CHUNK)
    logprobs = _logprobs(answer, decode) if request.wants_logprobs else None
    last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": logprobs}
    yield _event({**head, "choices": [last]})
    if request.wants_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def failed_event(error: ChatError) -> bytes:
    """The last event of a stream that has begun and cannot go on."""
    return _event(error.body())


def headers(request: ChatRequest) -> dict[str, str]:
    """The headers of an answer."""
    return {IGNORED_HEADER: ", ".join(request.ignored)} if request.ignored else {}


def _delta(request: ChatRequest, answer_id: str, delta: dict[str, Any]) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
    return _event({**_head(request, answer_id, CHUNK), "choices": [choice]})


def _head(request: ChatRequest, answer_id: str, kind: str) -> dict[str, Any]:
    """The fields that every part of an answer begins with, without a time: the same run gives the same answers."""
    ignored = {"oncurve_ignored": list(request.ignored)} if request.ignored else {}
    return {"id": answer_id, "object": kind, "created": 0, "model": request.model or MODEL, **ignored}


def _calls(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.message.calls
    ]


def _logprobs(answer: ChatAnswer, decode: Decode) -> dict[str, Any]:
    """The log-probability of every token that was sampled, those of calls and of the end among them."""
    texts = [decode([token]) for token in answer.token_ids]
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, answer.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    written = len(answer.token_ids)
    return {
        "prompt_tokens": answer.num_read,
        "completion_tokens": written,
        "total_tokens": answer.num_read + written,
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
