"""Answers to requests for a chat completion, in OpenAI's form: whole, or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oncurve.rollouts.agents.agent_session import ChatAnswer
from oncurve.rollouts.agents.chat_request import ChatRequest

MODEL = "policy"
"""The name of the model, whatever a request calls it."""
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
    return {**_head(request, answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(request: ChatRequest, answer: ChatAnswer, decode: Decode) -> Iterator[bytes]:
    """The same as server-sent events, the last of which says that it is done."""
    content = answer.message.content
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": content[start : start + PIECE]} for start in range(0, len(content), PIECE)]
    deltas += [{"tool_calls": [{"index": place, **call}]} for place, call in enumerate(_calls(answer))]
    head = _head(request, answer, "chat.completion.chunk")
    for delta in deltas:
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]})
    logprobs = _logprobs(answer, decode) if request.wants_logprobs else None
    last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": logprobs}
    yield _event({**head, "choices": [last]})
    if request.wants_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def headers(request: ChatRequest) -> dict[str, str]:
    """What is said of a request beside its answer."""
    return {IGNORED_HEADER: ", ".join(request.ignored)} if request.ignored else {}


def _head(request: ChatRequest, answer: ChatAnswer, kind: str) -> dict[str, Any]:
    """What every part of an answer begins with. There is no time in it: the same run gives the same answers."""
    ignored = {"oncurve_ignored": list(request.ignored)} if request.ignored else {}
    return {"id": answer.answer_id, "object": kind, "created": 0, "model": request.model or MODEL, **ignored}


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
