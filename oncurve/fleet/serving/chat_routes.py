"""The chat routes of `oncurve serve`: the model as a chat server, with sessions that keep its tokens.

Nothing is trained on here, so that a request may say how tokens are drawn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from aiohttp import web

from oncurve.agents.agent_endpoint import PATHS, chat_error, send, stream_headers
from oncurve.agents.agent_session import AgentSession, Conversation, PendingTurn, SessionLimits
from oncurve.agents.chat_answers import failed_event, first_event, last_events, models, text_event
from oncurve.agents.chat_request import ChatError, ChatRequest, read_body
from oncurve.agents.conversation_frames import Frames
from oncurve.chat_messages import text_before_any_call
from oncurve.core.errors import ConfigError, SamplerError, single_line
from oncurve.core.records import CUTS, SamplingParams
from oncurve.core.sampler import PolicyView, end_token_ids, exact_text
from oncurve.fleet.servers.protocol import GenerateRequest
from oncurve.fleet.serving.sampling import Paused, Sampling, SubmittedRequest
from oncurve.sample.turn_keys import turn_key
from oncurve.sample.turns import Sampled

MAX_SESSIONS = 4096
"""Sessions that are kept; the one that was used longest ago is forgotten first."""
SESSION = "/session/{key}"
HALF = "\ufffd"
"""Stands at the end of a text whose last letter is not whole yet."""
DRAWN = ("temperature", *CUTS, "seed")
"""The settings of sampling that a request may have."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ChatRoutes:
    """Chat completions of a served model."""

    def __init__(self, policy: PolicyView, sampling: Sampling, frames: Frames, *, context_tokens: int) -> None:
        self.sampling, self.frames, self.context_tokens = sampling, frames, context_tokens
        self.tokenizer = policy.tokenizer
        self.end_ids = frames.end_ids = end_token_ids(policy.model, policy.tokenizer)
        self.is_draining = False
        self._sessions: OrderedDict[str, AgentSession] = OrderedDict()

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Answer on the routes of chat clients."""
        for path in PATHS:
            router.add_post(f"{path}/chat/completions", _in_form(self.chat))
            router.add_get(f"{path}/models", _in_form(self.models))
        router.add_get(SESSION, _in_form(self.show))
        router.add_delete(SESSION, _in_form(self.forget))

    async def models(self, request: web.Request) -> web.Response:
        """There is one."""
        return web.json_response(models())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """One turn. Without a session in the path nothing of it is kept."""
        chat_request = read_body(await request.text())
        chat_request = replace(chat_request, ignored=tuple(name for name in chat_request.ignored if name not in DRAWN))
        params = _params(chat_request)
        session = self._session(request.match_info.get("key"))
        pending = session.ask(chat_request)
        if chat_request.is_stream and pending.room:
            return await self._stream(request, session, pending, params)
        try:
            sampled = await self._sample(pending, params) if pending.room else ([], [], "length")
        except BaseException:
            session.forget(pending)
            raise
        return await send(request, chat_request, session.took(pending, sampled), self._decode)

    async def show(self, request: web.Request) -> web.Response:
        """A session's conversations as tokens with their log-probabilities."""
        session = self._sessions.get(request.match_info["key"])
        if session is None:
            raise ChatError("there is no such session, or it was forgotten", status=404, code="not_found")
        return web.json_response({"conversations": [_conversation_body(row) for row in session.ordered()]})

    async def forget(self, request: web.Request) -> web.Response:
        """Keep a session no longer."""
        session = self._sessions.pop(request.match_info["key"], None)
        return web.json_response({"deleted": session is not None})

    async def _stream(
        self, request: web.Request, session: AgentSession, pending: PendingTurn, params: SamplingParams
    ) -> web.StreamResponse:
        """One turn, word by word while it is sampled; what may be a call is held back until the turn is whole."""
        chat_request, news, loop = pending.request, asyncio.Queue[list[int] | None](), asyncio.get_running_loop()
        work, stream, num_sent = None, web.StreamResponse(headers=stream_headers(chat_request)), 0
        try:
            work = self._submit(pending, params, lambda ids: loop.call_soon_threadsafe(news.put_nowait, ids))
            done = asyncio.wrap_future(work.future)
            done.add_done_callback(lambda _: news.put_nowait(None))
            await stream.prepare(request)
            await stream.write(first_event(chat_request, pending.answer_id))
            while (ids := await news.get()) is not None:
                text = self._decode([token for token in ids if token not in self.end_ids]).rstrip(HALF)
                text = text_before_any_call(text) if chat_request.may_call else text
                if len(text) > num_sent:
                    await stream.write(text_event(chat_request, pending.answer_id, text[num_sent:]))
                    num_sent = len(text)
            [completion] = await done
        except SamplerError as error:
            session.forget(pending)
            await stream.write(failed_event(ChatError(single_line(error), status=500)))
        except BaseException:
            if work is not None:
                self.sampling.drop(work)
            session.forget(pending)
            raise
        else:
            answer = session.took(
                pending, (list(completion.token_ids), list(completion.logprobs), completion.finish_reason)
            )
            for event in last_events(chat_request, answer, self._decode, num_sent=num_sent):
                await stream.write(event)
        await stream.write_eof()
        return stream

    async def _sample(self, pending: PendingTurn, params: SamplingParams) -> Sampled:
        work = self._submit(pending, params)
        try:
            [completion] = await asyncio.wrap_future(work.future)
        except asyncio.CancelledError:
            self.sampling.drop(work)
            raise
        except SamplerError as error:
            raise ChatError(single_line(error), status=500) from None
        return list(completion.token_ids), list(completion.logprobs), completion.finish_reason

    def _submit(
        self, pending: PendingTurn, params: SamplingParams, on_tokens: Callable[[list[int]], object] | None = None
    ) -> SubmittedRequest:
        """Have a turn sampled. Raises ChatError where none is."""
        if self.is_draining:
            raise ChatError("the server is ending", status=503)
        seed = pending.request.drawing.get("seed")
        keys = None if seed is None else (turn_key(int(seed) % 2**63, pending.key),)
        params = params.limited_to(pending.room)
        request = GenerateRequest("", pending.read_ids, 1, params, self.end_ids, keys)
        try:
            return self.sampling.submit(request, on_tokens=on_tokens)
        except Paused:
            raise ChatError("the server is paused", status=503) from None
        except ValueError as error:
            raise ChatError(str(error)) from None

    def _session(self, key: str | None) -> AgentSession:
        if key is not None and key in self._sessions:
            self._sessions.move_to_end(key)
            return self._sessions[key]
        limits = SessionLimits(self.context_tokens, context_tokens=self.context_tokens)
        made = AgentSession(self.frames, self._decode, self.end_ids, limits)
        if key is not None:
            self._sessions[key] = made
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return made

    def _decode(self, ids: Any) -> str:
        return exact_text(self.tokenizer, ids)


def _in_form(handler: Handler) -> Handler:
    """Mistakes get an answer in OpenAI's form."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except ChatError as error:
            return chat_error(error)
        except ConfigError as error:  # the model's chat template cannot be continued
            return chat_error(ChatError(str(error)))

    return answer


def _params(request: ChatRequest) -> SamplingParams:
    """The sampling parameters of a request. Raises ChatError for values that are no numbers."""
    bounds: dict[str, tuple[float, float]] = dict.fromkeys(CUTS, (0.0, 2**31))
    bounds |= {"temperature": (0.0, 100.0), "top_p": (1e-6, 1.0), "min_p": (0.0, 1.0)}
    values: dict[str, Any] = {}
    for name, (least, most) in bounds.items():
        neutral = SamplingParams.__dataclass_fields__[name].default
        value = request.drawing.get(name, neutral)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
            raise ChatError(f"{name} is {value!r:.60}; it must be from {least:g} to {most:g}", param=name)
        values[name] = type(neutral)(value)
    if not isinstance(request.drawing.get("seed", 0), int):
        raise ChatError("seed must be a whole number", param="seed")
    return SamplingParams(**values)


def _conversation_body(row: Conversation) -> dict[str, Any]:
    return {
        "prompt_ids": list(row.prompt_ids),
        "prompt": row.prompt_text,
        "token_ids": row.token_ids,
        "logprobs": [float(value) for value in np.array(row.logprobs, dtype=np.float32)],
        "segments": [asdict(part) for part in row.segments],
        "finish_reason": row.reason,
    }
